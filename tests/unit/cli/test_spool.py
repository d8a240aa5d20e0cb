"""`fairway spool`: what waits on disk is shown, and brought to the broker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fairway
from fairway.batch import encode
from fairway.client.spool_journal import Journal
from fairway.protocol.diversion import Handed
from fairway.world.clock import RealClock
from fairway.world.rng import RealRng
from fairway.world.yard import Yard
from tests.support.ports import free_port
from tests.unit.cli.running import Cli

NOBODY = f"fairway://127.0.0.1:{free_port()}"


def leave(spool: Path, subject: str, count: int) -> None:
    """What a process leaves behind that ends while its broker is away."""
    chosen = fairway.SpoolOptions(str(spool), after_ms=10)
    with fairway.connect(NOBODY, spool=chosen) as client:
        for number in range(count):
            client.send(subject, b"%d" % number)


def leave_a_name_that_no_broker_takes(spool: Path) -> None:
    """As another program might."""
    yard = Yard(spool, post=lambda callback, *args: callback(*args))
    number, disk = yard.make(RealRng())
    done: list[object] = []
    journal = Journal(disk, number, RealClock())
    data = encode([b"x"], producer_id=7, first_sequence=0, created_ms=0)
    journal.keep([Handed("no such name!", 1, False, data)], done.append)
    disk.close()


def test_an_empty_spool_and_none_at_all(cli: Cli, tmp_path: Path) -> None:
    assert "there is no spool at" in cli.fails("spool", "status", str(tmp_path / "none"), status=2)
    (tmp_path / "spool").mkdir()
    assert "nothing is in the spool" in cli.run("spool", "status", str(tmp_path / "spool"))
    assert "0 messages delivered, 0 left" in cli.run("spool", "drain", str(tmp_path / "spool"))


def test_what_a_dead_process_left_is_shown_and_drained(cli: Cli, tmp_path: Path) -> None:
    leave(tmp_path / "spool", "spool.drain", 30)
    shown = cli.json("spool", "status", str(tmp_path / "spool"))
    [journal] = shown["journals"]
    assert (journal["process"], journal["messages"]) == (None, 30)
    assert "dead" in cli.run("spool", "status", str(tmp_path / "spool"))
    assert "30 messages delivered, 0 left" in cli.run("spool", "drain", str(tmp_path / "spool"))
    with cli.client() as client:
        stored = [bytes(each) for page in client.scan("spool.drain") for each in page.batch.payloads]
    assert stored == [b"%d" % number for number in range(30)]
    assert cli.json("spool", "status", str(tmp_path / "spool"))["journals"] == []


def test_delayed_messages_go_on_waiting_where_they_belong(cli: Cli, tmp_path: Path) -> None:
    chosen = fairway.SpoolOptions(str(tmp_path / "spool"), after_ms=10)
    with fairway.connect(NOBODY, spool=chosen) as client:
        client.send("spool.later", b"later", after=3_600)
        client.send("spool.later", b"now")
        client.send_many("spool.later", [b"past", b"later"], after=[0, 3_600])
    assert "4 messages delivered, 0 left" in cli.run("spool", "drain", str(tmp_path / "spool"))
    with cli.client() as client, client.consumer("spool.later", group="g") as consumer:
        seen = {message.payload for _ in range(2) for message in consumer.take(1, 30)}
        assert seen == {b"now", b"past"}
        assert client.delayed.count("spool.later") == 2


def test_a_living_process_keeps_its_own(cli: Cli, tmp_path: Path) -> None:
    chosen = fairway.SpoolOptions(str(tmp_path / "spool"), after_ms=10)
    with fairway.connect(NOBODY, spool=chosen) as client:
        client.send("spool.living", b"a").result(30)
        told = cli.run("spool", "drain", str(tmp_path / "spool"))
        assert "lives, and sends its own 1" in told


def test_nobody_there_is_status_3_and_nothing_is_lost(cli: Cli, tmp_path: Path) -> None:
    leave(tmp_path / "spool", "spool.nobody", 3)
    assert "no broker at" in cli.fails("spool", "drain", str(tmp_path / "spool"), "--url", NOBODY, status=3)
    assert cli.json("spool", "status", str(tmp_path / "spool"))["journals"][0]["messages"] == 3


def test_what_no_broker_takes_is_set_aside_and_shown(cli: Cli, tmp_path: Path) -> None:
    leave_a_name_that_no_broker_takes(tmp_path / "spool")
    assert "set aside" in cli.fails("spool", "drain", str(tmp_path / "spool"), status=4)
    told = cli.run("spool", "status", str(tmp_path / "spool"), status=4)
    assert "no such name!" in told
    assert "BAD_NAME" in told


@pytest.mark.parametrize("place", [100, 2_000])
def test_damage_is_shown(cli: Cli, tmp_path: Path, place: int) -> None:
    leave(tmp_path / "spool", "spool.damage", 200)
    [segment] = (tmp_path / "spool").glob("*/log/*")
    content = bytearray(segment.read_bytes())
    content[min(place, len(content) - 1)] ^= 1
    segment.write_bytes(content)
    shown = json.loads(cli.run("spool", "status", str(tmp_path / "spool"), "--json", status=4))
    assert shown["journals"][0]["damaged"]
    assert "damaged" in cli.fails("spool", "drain", str(tmp_path / "spool"), status=4)
    [kept] = (tmp_path / "spool").glob("*/kept/*")
    assert kept.stat().st_size > 0
