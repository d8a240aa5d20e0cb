"""What servers and clients keep on disk is their user's alone; an older directory opens as it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import fairway
from fairway.runtime.process import Child
from tests.unit.cli.running import READY_S, Cli, up

NOBODY = Cli("fairway://127.0.0.1:1")


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def too_open(root: Path) -> list[str]:
    """What anybody but the owner could read, write or enter."""
    everything = [root, *root.rglob("*")]
    assert len(everything) > 2, "nothing was made"
    return [str(each) for each in everything if stat.S_IMODE(each.stat().st_mode) & 0o077]


def test_a_broker_with_a_delay_server(tmp_path: Path) -> None:
    with up(tmp_path / "data") as (child, url):
        cli = Cli(url)
        cli.run("produce", "s", "x")
        cli.run("produce", "s", "x", "--after", "1d")
        cli.run("consume", "s", "-g", "g", "-n", "1")
        assert too_open(tmp_path / "data") == []
        child.terminate()
        assert child.wait(timeout_s=READY_S) == 0
    assert too_open(tmp_path / "data") == []


def test_a_meta_server_and_its_registry(tmp_path: Path) -> None:
    with Child("fairway", "meta", "--registry", f"sqlite:{tmp_path}/meta", "--port", "0") as child:
        assert child.line(timeout_s=READY_S)
        assert (tmp_path / "meta" / "registry.sqlite-wal").exists()
        assert too_open(tmp_path / "meta") == []


def test_a_spool(tmp_path: Path) -> None:
    with fairway.connect("fairway://127.0.0.1:1", spool=str(tmp_path / "spool")) as client:
        client.send("s", b"x").result()
        assert too_open(tmp_path / "spool") == []


def test_an_older_directory_opens_as_it_is(tmp_path: Path) -> None:
    with up(tmp_path / "data") as (_, url):
        Cli(url).run("produce", "s", "x")
    before = {each: 0o755 if each.is_dir() else 0o644 for each in (tmp_path / "data").rglob("*")}
    for path, mode in before.items():  # as earlier versions made them
        path.chmod(mode)
    with up(tmp_path / "data") as (_, url):
        Cli(url).run("produce", "s", "y")
        assert Cli(url).run("consume", "s", "-g", "g", "-n", "2") == "x\ny\n"
        for path in (*(tmp_path / "data").glob("messages*"), *(tmp_path / "data").glob("messages/*.log")):
            assert stat.S_IMODE(path.stat().st_mode) == before[path], path
        assert stat.S_IMODE((tmp_path / "data" / "lock").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ("data/lock", "up --data data"),
        ("data/identity.tmp", "up --data data"),
        ("data/lock", "delay serve --data data --broker 127.0.0.1:1"),
        ("meta/lock", "meta --registry sqlite:meta"),
        ("meta/registry.sqlite", "meta --registry sqlite:meta"),
    ],
)
def test_a_planted_link_is_one_sentence_and_its_target_is_untouched(
    planted: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("victim").write_text("precious")
    Path(planted).parent.mkdir()
    Path(planted).symlink_to(tmp_path / "victim")
    said = NOBODY.fails(*words.split(), "--port", "0", status=1)
    assert f"{planted}: it is a symbolic link, and Fairway follows none; remove the link" in said
    assert said.count("\n") == 1
    assert Path("victim").read_text() == "precious"


def test_a_planted_link_to_a_directory_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` keeps delayed messages in a directory that the operator has not named."""
    monkeypatch.chdir(tmp_path)
    Path("victim").mkdir()
    Path("data").mkdir()
    Path("data/delay").symlink_to(tmp_path / "victim")
    said = NOBODY.fails("up", "--data", "data", "--port", "0", status=1)
    assert "data/delay: it is a symbolic link, and Fairway follows none; remove the link" in said
    assert said.count("\n") == 1
    assert list(Path("victim").iterdir()) == []
