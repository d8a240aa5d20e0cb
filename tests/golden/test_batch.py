"""Format version 1 is read for ever, and written as it always was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fairway.batch import Codec, check, decode, encode
from tests.golden.batch import CASES, FOLDER, IDENTITY, content, write

NAMES = sorted(path.stem for path in FOLDER.glob("*.bin"))


def test_every_case_has_its_file() -> None:
    assert set(CASES) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_golden_batch_is_read(name: str) -> None:
    data = (FOLDER / f"{name}.bin").read_bytes()
    check(data)
    assert content(decode(data)) == json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "codec" not in case])
def test_golden_batch_is_what_encode_writes(name: str) -> None:
    assert encode(**IDENTITY, **CASES[name]) == (FOLDER / f"{name}.bin").read_bytes()


def test_compressed_golden_batch_holds_what_encode_compresses() -> None:
    """Another zstd release may pack tighter, so the frame itself is not compared."""
    stored = decode((FOLDER / "zstd.bin").read_bytes())
    plain = decode(encode(**IDENTITY, **CASES["zstd"] | {"codec": Codec.NONE}))
    assert stored.header.codec is Codec.ZSTD
    assert content(stored) | {"crc": "", "codec": ""} == content(plain) | {"crc": "", "codec": ""}


def test_golden_files_are_never_written_again(tmp_path: Path) -> None:
    write(tmp_path)
    written = tmp_path / "plain.bin"
    assert written.read_bytes() == (FOLDER / "plain.bin").read_bytes()
    written.write_bytes(b"what lies on somebody's disk")
    write(tmp_path)
    assert written.read_bytes() == b"what lies on somebody's disk"
