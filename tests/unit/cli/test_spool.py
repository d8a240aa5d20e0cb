"""`fairway spool`: shows the messages that wait on disk, and sends them to the broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

import fairway
from fairway.batch import MessageId, encode
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import SpoolEntry
from fairway.protocol.spool_port import Handed
from fairway.runtime.clock import RealClock
from fairway.runtime.rng import RealRng
from fairway.runtime.shared_directory import SharedDirectory
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
    yard = SharedDirectory(spool, post=lambda callback, *args: callback(*args))
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


def test_what_a_client_of_a_cluster_left_is_drained_with_the_url_of_a_cluster(cli: Cli, tmp_path: Path) -> None:
    spool, cluster = str(tmp_path / "spool"), cli.url.replace("fairway://", "meta://")
    with fairway.connect(
        NOBODY.replace("fairway://", "meta://"), spool=fairway.SpoolOptions(spool, after_ms=10)
    ) as client:
        client.send("spool.cluster", b"a")
    told = cli.run("spool", "drain", spool, status=1)
    assert "1 left, by a client of a cluster: drain it with --url meta://HOST:PORT" in told
    assert "1 message delivered, 0 left" in cli.run("spool", "drain", spool, "--url", cluster)


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


# --- what does not go on by itself ------------------------------------------------------------------------------------

PRODUCER = 0x5EED


@contextmanager
def journal_of(spool: Path, *batches: Handed, aside: bool | None = None, is_cluster: bool = False) -> Iterator[str]:
    """Of a process that lives meanwhile. `aside`: all of it is set aside, and whether it may be stored."""
    number, disk = SharedDirectory(spool, post=lambda callback, *args: callback(*args)).make(RealRng())
    journal = Journal(disk, number, RealClock(), is_cluster=is_cluster)
    done: SimpleQueue[object] = SimpleQueue()
    journal.keep(batches, done.put)
    assert done.get(timeout=30) is None
    for at, each in enumerate(batches if aside is not None else ()):
        journal.set_aside(SpoolEntry(at, *each), "it was no good", PRODUCER, bool(aside), done.put)
        assert done.get(timeout=30) is None
    try:
        yield journal.name
    finally:
        disk.close()


def batch_to(subject: str, first: int, *payloads: bytes, due_ms: list[int] | None = None, group: str = "") -> Handed:
    data = encode(payloads, producer_id=PRODUCER, first_sequence=first, created_ms=1, due_ms=due_ms)
    return Handed(subject, len(payloads), bool(group), data, group)


def stored_on(cli: Cli, subject: str) -> list[tuple[bytes, MessageId]]:
    with cli.client() as client:
        pages = [page.batch for page in client.scan(subject)]
    return sorted((bytes(each.payloads[at]), each.id(at)) for each in pages for at in range(len(each)))


def test_what_was_set_aside_is_put_back_and_sent_under_the_ids_of_its_receipts(cli: Cli, tmp_path: Path) -> None:
    spool, subject = str(tmp_path / "spool"), "spool.again"
    batches = (
        batch_to(subject, 0, b"a", b"b"),
        batch_to(subject, 2, b"c"),
        batch_to(subject, 3, b"d", due_ms=[RealClock().wall_ms() + 3_600_000]),
    )
    with journal_of(tmp_path / "spool", *batches, aside=False) as name:
        pass
    shown = cli.run("spool", "status", spool, status=4)
    assert f"{name}/1" in shown
    assert "remove the cause, then send the batches again: `fairway spool retry" in shown
    done = cli.json("spool", "retry", spool, f"{name}/1", f"{name}/9", status=1)
    assert (done["ids"], done["messages"], done["unknown"]) == ([f"{name}/1"], 1, [f"{name}/9"])
    told, wrong = cli.both("spool", "retry", spool)
    assert "2 batches with 3 messages put back: `fairway spool drain" in told
    assert wrong == ""
    assert "nothing was set aside" in cli.run("spool", "retry", spool)
    assert "4 messages delivered, 0 left" in cli.run("spool", "drain", spool)
    assert stored_on(cli, subject) == [(each, MessageId(PRODUCER, at)) for at, each in enumerate((b"a", b"b", b"c"))]
    with cli.client() as client:
        assert client.delayed.count(subject) == 1
    assert cli.json("spool", "status", spool)["journals"] == []


def test_what_may_be_stored_already_is_sent_again_only_by_a_word(cli: Cli, tmp_path: Path) -> None:
    spool = str(tmp_path / "spool")
    with journal_of(tmp_path / "spool", batch_to("spool.twice", 0, b"a"), aside=True):
        pass
    refused = cli.fails("spool", "retry", spool, status=2)
    assert "may be stored twice. Say --may-repeat if it may" in refused
    told = cli.run("spool", "retry", spool, "--may-repeat")
    assert "1 message may be stored twice, under the same id" in told
    assert "1 message delivered, 0 left" in cli.run("spool", "drain", spool)


def test_what_is_refused_again_is_set_aside_again_and_can_be_discarded(cli: Cli, tmp_path: Path) -> None:
    spool = str(tmp_path / "spool")
    leave_a_name_that_no_broker_takes(tmp_path / "spool")
    cli.run("spool", "drain", spool, status=4)
    cli.run("spool", "retry", spool)
    cli.run("spool", "drain", spool, status=4)
    [journal] = cli.json("spool", "status", spool, status=4)["journals"]
    [aside] = journal["set_aside"]
    assert aside["number"] > 0
    assert "give the IDs of batches, or --all" in cli.fails("spool", "discard", spool, status=2)
    assert "is set aside" in cli.fails("spool", "discard", spool, f"{journal['name']}/77", status=1)
    told = cli.run("spool", "discard", spool, f"{journal['name']}/{aside['number']}")
    assert "1 batch with 1 message deleted" in told
    assert cli.json("spool", "discard", spool, "--all")["ids"] == []
    assert cli.json("spool", "status", spool)["journals"] == []


def test_what_a_living_process_has_set_aside_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    spool = str(tmp_path / "spool")
    with journal_of(tmp_path / "spool", batch_to("spool.alive", 0, b"a"), aside=False) as name:
        for verb in (("retry",), ("discard", "--all")):
            refused = cli.fails("spool", verb[0], spool, *verb[1:], status=1)
            assert f"journal {name}: process" in refused
            assert "is alive and has it: end that first" in refused
        assert len(cli.json("spool", "status", spool, status=4)["journals"][0]["set_aside"]) == 1
    cli.run("spool", "retry", spool)


def test_what_waits_for_a_group_that_is_gone_is_freed_by_a_word(cli: Cli, tmp_path: Path) -> None:
    spool, cluster, subject = str(tmp_path / "spool"), cli.url.replace("fairway://", "meta://"), "spool.freed"
    batches = (batch_to(subject, 0, b"a", b"b", group="gone"), batch_to(subject, 2, b"c"))
    with journal_of(tmp_path / "spool", *batches, is_cluster=True):
        pass
    told = cli.run("spool", "drain", spool, "--url", cluster, "--timeout-s", "0.5", status=1)
    assert "if it was given up for good: `fairway spool retry --group`" in told
    free = ("spool", "retry", spool, "--group", "gone")
    assert "2 messages may be stored in broker group gone already" in cli.fails(*free, status=2)
    assert "is not a meta server" in cli.fails(*free, "--may-repeat", status=2)
    nobody = NOBODY.replace("fairway://", "meta://")
    assert "no meta server at" in cli.fails(*free, "--may-repeat", "--url", nobody, "--patience-s", "0.1", status=3)
    assert cli.json("spool", "status", spool)["journals"][0]["pinned"]["gone"] == 2
    done = cli.json(*free, "--may-repeat", "--url", cluster)
    assert (done["messages"], done["may_repeat"], done["left"]) == (2, 2, [])
    assert "nothing waits for broker group gone" in cli.run(*free)
    assert " 0 left" in cli.run("spool", "drain", spool, "--url", cluster)
    assert stored_on(cli, subject) == [(each, MessageId(PRODUCER, at)) for at, each in enumerate((b"a", b"b", b"c"))]


def test_what_waits_for_a_group_that_the_meta_server_knows_stays(cli: Cli, tmp_path: Path) -> None:
    spool, cluster = str(tmp_path / "spool"), cli.url.replace("fairway://", "meta://")
    with journal_of(tmp_path / "spool", batch_to("spool.known", 0, b"a", group="here"), is_cluster=True):
        pass
    refused = cli.fails("spool", "retry", spool, "--group", "here", "--may-repeat", "--url", cluster, status=1)
    assert "the meta server knows broker group here" in refused
    assert cli.json("spool", "status", spool)["journals"][0]["pinned"] == {"here": 1}
    assert "not both" in cli.fails("spool", "retry", spool, "x/1", "--group", "here", status=2)
