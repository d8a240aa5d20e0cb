"""Protocol version 1 is read for ever, and written as it always was."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairway.protocol import FrameReader, codec
from fairway.protocol.frames import REFUSED, RESPONSE
from fairway.protocol.messages import FIRST_REQUEST_VERB, Verb
from tests.golden.frames import CASES, CORRELATION, FOLDER, OUTGROWN, attached_to, encoded, write

NAMES = sorted(path.stem for path in FOLDER.glob("*.bin"))


def test_every_case_has_its_file() -> None:
    assert set(CASES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_golden_frame_is_read(name: str) -> None:
    verb, flags, message = CASES[name]
    reader = FrameReader(frame_bytes_max=1 << 20, version=int(verb != Verb.HELLO))
    reader.feed((FOLDER / f"{name}.bin").read_bytes())
    [frame] = reader.frames()
    assert (frame.verb, frame.flags) == (verb, flags)
    assert frame.correlation == (CORRELATION if verb >= FIRST_REQUEST_VERB else 0)
    assert list(frame.attachments) == attached_to(message)
    if verb == Verb.GOODBYE:
        assert codec.decode_goodbye(frame.control) == message
    elif flags & REFUSED:
        assert codec.refusal_of(codec.decode_refusal(verb, frame.control)) == message
    else:
        decode = codec.decode_answer if flags & RESPONSE else codec.decode_request
        assert decode(verb, frame.control) == message


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OUTGROWN])
def test_golden_frame_is_what_this_version_writes(name: str) -> None:
    assert encoded(name) == (FOLDER / f"{name}.bin").read_bytes()


def test_golden_files_are_never_written_again(tmp_path: Path) -> None:
    write(tmp_path)
    written = tmp_path / "ping.bin"
    assert written.read_bytes() == (FOLDER / "ping.bin").read_bytes()
    written.write_bytes(b"what somebody's client sends")
    write(tmp_path)
    assert written.read_bytes() == b"what somebody's client sends"
