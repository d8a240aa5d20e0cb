"""What a spool holds, batch by batch, for who holds it against what brokers have."""

from __future__ import annotations

from pathlib import Path

import pytest

import fairway
from fairway import batch
from fairway.client.spool.contents import contents
from fairway.errors import Misuse
from fairway.runtime.clock import RealClock
from tests.support.ports import free_port
from tests.unit.cli.test_spool import leave_a_name_that_no_broker_takes
from tests.unit.client.broker import WAIT_S, Running

CLOCK = RealClock()


def left(spool: Path, subject: str, count: int) -> list[str]:
    """By a process that ends while its broker is away; the ids that it was told."""
    nobody = f"fairway://127.0.0.1:{free_port()}"
    with fairway.connect(nobody, spool=fairway.SpoolOptions(str(spool), after_ms=10)) as client:
        return [str(client.send(subject, b"%d" % number).result(WAIT_S).id) for number in range(count)]


def ids(spool: Path) -> list[str]:
    return [str(each) for kept in contents(str(spool), CLOCK, []) for each in batch.decode(kept.data).ids()]


def test_what_waits_is_told_with_its_ids_and_what_was_sent_is_not(broker: Running, tmp_path: Path) -> None:
    told = left(tmp_path, "contents", 5)
    assert ids(tmp_path) == told
    assert ids(tmp_path) == told, "nothing was changed"
    with fairway.connect(broker.url, spool=fairway.SpoolOptions(str(tmp_path), adopt_ms=10)) as client:
        assert client.wait_drained(WAIT_S)
    assert ids(tmp_path) == []
    again = left(tmp_path, "contents", 2)
    assert ids(tmp_path) == again


def test_what_was_set_aside_says_why(broker: Running, tmp_path: Path) -> None:
    leave_a_name_that_no_broker_takes(tmp_path)
    with fairway.connect(broker.url, spool=fairway.SpoolOptions(str(tmp_path), adopt_ms=10)) as client:
        assert client.wait_drained(WAIT_S)
    (kept,) = contents(str(tmp_path), CLOCK, [])
    assert kept.subject == "no such name!"
    assert "BAD_NAME" in (kept.aside or "")


def test_a_journal_that_cannot_be_read_is_named_and_the_others_are_told(tmp_path: Path) -> None:
    told = left(tmp_path, "contents", 1)
    (whole,) = (each for each in tmp_path.iterdir() if each.is_dir())
    broken = tmp_path / "00000000000000ff"
    (broken / "aside").mkdir(parents=True)
    (broken / "aside" / "0000000000000000").write_bytes(b"\x05\x00\x00\x00nonsense")
    troubles: list[str] = []
    found = list(contents(str(tmp_path), CLOCK, troubles))
    assert [str(batch.decode(each.data).id(0)) for each in found] == told
    assert whole.is_dir()
    (trouble,) = troubles
    assert "journal 00000000000000ff" in trouble


def test_no_spool_is_usage(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="there is no spool at"):
        list(contents(str(tmp_path / "nowhere"), CLOCK, []))
