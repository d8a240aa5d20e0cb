"""What lies in a spool: told batch by batch; put back or thrown away, with a crash at every operation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

import pytest

import fairway
from fairway import batch
from fairway.client.spool import spool_directory
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import Aside, PlacementRecord, SpoolEntry, aside_name, aside_parts
from fairway.client.spool.spool_directory import Bench, batch_id, contents, survey
from fairway.errors import DiskFull, FairwayError, Misuse, StorageFault
from fairway.protocol.spool_port import Handed
from fairway.runtime.clock import RealClock
from fairway.runtime.disk import Completion
from fairway.runtime.rng import RealRng, SeededRng
from fairway.runtime.shared_directory import SharedDirectory
from fairway.simulation.disk import SimulatedPowerCut
from tests.support.ports import free_port
from tests.unit.cli.test_spool import leave_a_name_that_no_broker_takes
from tests.unit.client.broker import WAIT_S, Running
from tests.unit.client.test_spool_journal import NUMBER, SEGMENT_BYTES, Stage

CLOCK = RealClock()
STREAM = 7
OPERATIONS = 40  # more than any of these takes
Lost: TypeAlias = Callable[["DirectoryStage"], None]


class DirectoryStage(Stage):
    """One whose disk does no more than somebody waits for."""

    def settle_until(self, is_done: Callable[[], bool]) -> None:
        while self._timers and not is_done():
            _, _, callback, args = heapq.heappop(self._timers)
            callback(*args)


def encoded(number: int) -> bytes:
    return batch.encode([b"%d" % number], producer_id=STREAM, first_sequence=number, created_ms=1)


def handed(number: int, *, was_sent: bool = False, group: str = "") -> Handed:
    return Handed("orders", 1, was_sent, encoded(number), group)


def payloads(entries: list[SpoolEntry]) -> list[bytes]:
    return [bytes(each) for entry in entries for each in batch.decode(entry.data).payloads]


def aside_payloads(stage: DirectoryStage) -> list[bytes]:
    found = [stage.journal.read_aside(f"{each.number:016x}")[1] for each in stage.journal.asides()]
    return [bytes(each) for data in found for each in batch.decode(data).payloads]


def bench(stage: DirectoryStage) -> Bench:
    def wait(work: Callable[[Completion], None]) -> None:
        outcomes: list[StorageFault | None] = []
        work(outcomes.append)
        stage.settle_until(lambda: bool(outcomes))
        if not outcomes:
            raise SimulatedPowerCut
        if outcomes[0] is not None:
            raise outcomes[0]

    return Bench(stage.journal, SeededRng(3), wait)


def kept(*batches: Handed, is_cluster: bool = False) -> DirectoryStage:
    stage = DirectoryStage()
    stage.journal = Journal(stage.disk, NUMBER, stage.clock, segment_bytes=SEGMENT_BYTES, is_cluster=is_cluster)
    stage.journal.keep(batches, lambda _: None)
    stage.settle()
    return stage


def set_aside(stage: DirectoryStage, *numbers: int, is_unknown: bool = False) -> None:
    for entry in [each for each in stage.load() if each.number in numbers]:
        stage.journal.set_aside(entry, "TOO_LARGE: no", STREAM, is_unknown, lambda _: None)
        stage.settle()


def some_aside() -> DirectoryStage:
    """0 and 2 are set aside, of which the journal has noted nothing: the process died at once. 1 and 3 wait."""
    stage = kept(*map(handed, range(4)))
    set_aside(stage, 0, 2)
    return stage


def all_aside() -> DirectoryStage:
    """Nothing else was left, so there is no segment either."""
    stage = kept(*map(handed, range(4)))
    set_aside(stage, 0, 1, 2, 3)
    assert stage.segments() == []
    return stage


def all_aside_unnoted() -> DirectoryStage:
    """The same, but the process died before it could remove the segment: whoever opens the journal does."""
    stage = kept(*map(handed, range(4)))
    for entry in stage.load():
        note = Aside(entry.number, entry.subject, entry.messages, "no", False, STREAM, 0)
        stage.disk.publish(aside_name(entry.number), aside_parts(note, entry.data))
    return stage


def some_pinned() -> DirectoryStage:
    """0 was under way when it came; 1 and 2 are about to be sent; 3 goes to another group."""
    stage = kept(
        *(handed(each, was_sent=not each, group="b" if each == 3 else "a") for each in range(4)), is_cluster=True
    )
    stage.journal.place([PlacementRecord(1, "a", STREAM, 1), PlacementRecord(2, "a", 99, 0)], lambda _: None)
    stage.settle()
    return stage


def dies(stage: DirectoryStage) -> None:
    stage.reopen(has_power=True)


def loses_power(stage: DirectoryStage) -> None:
    stage.reopen(has_power=False)


def cut_short(stage: DirectoryStage, operations: int, work: Callable[[Bench], None]) -> bool:
    """Whether the power went before it was done."""
    stage.disk.crash_after(operations)
    with suppress(SimulatedPowerCut):
        work(bench(stage))
        stage.settle()
    return not stage.disk.alive


def put_all_back(bench: Bench) -> None:
    for aside in bench.journal.asides():
        bench.put_back(aside)


def free_all(bench: Bench) -> None:
    for entry in bench.pinned_to("a"):
        bench.free(entry)


def discard_all(bench: Bench) -> None:
    for aside in bench.journal.asides():
        bench.discard(aside)


EACH = [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("crash", [dies, loses_power])
@pytest.mark.parametrize("stage_of", [some_aside, all_aside, all_aside_unnoted])
def test_what_is_put_back_is_there_once_wherever_it_is_cut_short(
    stage_of: Callable[[], DirectoryStage], crash: Lost
) -> None:
    was_cut = []
    for operations in range(1, OPERATIONS):
        stage = stage_of()
        crash(stage)
        was_cut.append(cut_short(stage, operations, put_all_back))
        crash(stage)
        assert sorted(payloads(stage.load()) + aside_payloads(stage)) == EACH
        assert len(stage.disk.listing("aside")) == len(stage.journal.asides()), "what was replaced is gone"
        put_all_back(bench(stage))
        crash(stage)
        assert sorted(payloads(stage.load())) == EACH
        assert stage.disk.listing("aside") == []
    assert was_cut[0]
    assert not was_cut[-1], "the whole way was tried"


@pytest.mark.parametrize("crash", [dies, loses_power])
def test_what_is_pinned_is_there_once_wherever_it_is_cut_short(crash: Lost) -> None:
    was_cut = []
    for operations in range(1, OPERATIONS):
        stage = some_pinned()
        crash(stage)
        assert stage.journal.pinned() == {"a": 3}
        was_cut.append(cut_short(stage, operations, free_all))
        crash(stage)
        assert sorted(payloads(stage.load())) == EACH
        free_all(bench(stage))
        crash(stage)
        assert stage.journal.pinned() == {}
        found = stage.load()
        assert sorted(payloads(found)) == EACH
        assert not any(stage.journal.may_be_stored(entry) for entry in found)
    assert was_cut[0]
    assert not was_cut[-1]


@pytest.mark.parametrize("crash", [dies, loses_power])
@pytest.mark.parametrize("stage_of", [some_aside, all_aside, all_aside_unnoted])
def test_what_is_discarded_never_comes_back_wherever_it_is_cut_short(
    stage_of: Callable[[], DirectoryStage], crash: Lost
) -> None:
    was_cut = []
    for operations in range(1, OPERATIONS):
        stage = stage_of()
        crash(stage)
        waiting = sorted(payloads(stage.load()))
        was_cut.append(cut_short(stage, operations, discard_all))
        crash(stage)
        assert sorted(payloads(stage.load())) == waiting, "it is set aside, or gone, and never sent"
        discard_all(bench(stage))
        crash(stage)
        assert sorted(payloads(stage.load())) == waiting
        assert stage.journal.asides() == []
    assert was_cut[0]
    assert not was_cut[-1]


def test_what_is_put_back_is_new_to_the_broker_and_keeps_its_ids() -> None:
    """It is no longer in doubt, so a broker that does not know its stream takes it; and never has a used number."""
    stage = kept(handed(0), handed(1), handed(2))
    stage.journal.mark_sent(3, lambda _: None)
    set_aside(stage, 0, 1, 2, is_unknown=True)
    loses_power(stage)
    put_all_back(bench(stage))
    loses_power(stage)
    found = stage.load()
    assert [entry.number for entry in found] == [3, 4, 5]
    assert not any(entry.was_sent or entry.number < stage.journal.sent_before for entry in found)
    opened = [batch.decode(entry.data) for entry in found]
    assert [str(each.id(0)) for each in opened] == [str(batch.MessageId(STREAM, number)) for number in range(3)]
    headers = [batch.peek(entry.data) for entry in found]
    assert len({header.producer_id for header in headers} - {STREAM}) == 1
    assert [header.first_sequence for header in headers] == [0, 1, 2]


def test_what_is_put_back_into_the_journal_of_a_cluster_stays_there() -> None:
    """Although no segment is left that would tell."""
    stage = kept(handed(0, group="a"), is_cluster=True)
    set_aside(stage, 0)
    loses_power(stage)
    put_all_back(bench(stage))
    loses_power(stage)
    assert stage.journal.is_cluster
    assert payloads(stage.load()) == [b"0"]


def test_what_others_are_judged_by_stays_until_they_have_arrived() -> None:
    """If 0 is stored late after all, 1 may be stored behind it: without a word of 0 it would be sent anew."""
    stage = kept(handed(0), handed(1))
    stage.journal.mark_sent(2, lambda _: None)
    set_aside(stage, 0, is_unknown=True)
    loses_power(stage)
    for work in (put_all_back, discard_all):
        with pytest.raises(FairwayError, match=r"\(1 more\) is judged by it: `fairway spool drain` first"):
            work(bench(stage))
    assert len(stage.journal.asides()) == 1
    stage.journal.note_done(1)
    put_all_back(bench(stage))
    assert stage.journal.asides() == []


def test_a_full_disk_leaves_it_set_aside() -> None:
    stage = all_aside()
    loses_power(stage)
    stage.disk.reserve(stage.disk.open("other", create=True), stage.disk.free_bytes())
    with pytest.raises(DiskFull):
        put_all_back(bench(stage))
    loses_power(stage)
    assert sorted(aside_payloads(stage)) == EACH
    discard_all(bench(stage))
    assert stage.journal.asides() == [], "which needs no room"


def test_what_cannot_be_noted_is_not_discarded() -> None:
    """Its end was never noted: without its file it would be sent."""
    stage = some_aside()
    loses_power(stage)
    stage.disk.reserve(stage.disk.open("other", create=True), stage.disk.free_bytes())
    with pytest.raises(DiskFull):
        discard_all(bench(stage))
    loses_power(stage)
    assert sorted(aside_payloads(stage)) == [b"0", b"2"]


def test_a_batch_that_is_damaged_is_not_put_back() -> None:
    stage = all_aside()
    [name, *_] = stage.disk.listing("aside")
    stage.disk.flip(f"aside/{name}", (stage.disk.open(f"aside/{name}").size - 1) * 8)
    loses_power(stage)
    with pytest.raises(FairwayError, match="it is damaged"):
        put_all_back(bench(stage))
    assert len(stage.journal.asides()) == 4


# --- a directory, on a real disk --------------------------------------------------------------------------------------


@contextmanager
def journal_of(spool: Path, *batches: Handed, is_unknown: bool | None = None) -> Iterator[str]:
    """Of a process that lives meanwhile; with `is_unknown`, all that it has is set aside."""
    shared_directory = SharedDirectory(spool, post=lambda callback, *args: callback(*args))
    number, disk = shared_directory.make(RealRng())
    journal = Journal(disk, number, RealClock())
    done: SimpleQueue[StorageFault | None] = SimpleQueue()
    journal.keep(batches, done.put)
    assert done.get(timeout=30) is None
    for at, each in enumerate(batches if is_unknown is not None else ()):
        entry = SpoolEntry(at, each.subject, each.messages, False, each.data)
        journal.set_aside(entry, "no", STREAM, bool(is_unknown), done.put)
        assert done.get(timeout=30) is None
    try:
        yield journal.name
    finally:
        disk.close()


def leave(spool: Path, *batches: Handed, is_unknown: bool | None = None) -> str:
    with journal_of(spool, *batches, is_unknown=is_unknown) as name:
        return name


def test_batches_are_chosen_by_id_and_others_are_told(tmp_path: Path) -> None:
    first = leave(tmp_path, handed(0), handed(1), is_unknown=False)
    second = leave(tmp_path, handed(2), is_unknown=False)
    ids = [batch_id(first, 1).upper(), batch_id(second, 0), batch_id(second, 7), "nonsense"]
    done = spool_directory.retry(str(tmp_path), ids, RealClock(), RealRng())
    assert sorted(done.ids) == sorted([batch_id(first, 1), batch_id(second, 0)])
    assert (done.messages, done.may_repeat, done.left) == (2, 0, [])
    assert done.unknown == [batch_id(second, 7), "nonsense"]
    found = {each.name: (each.messages, len(each.set_aside)) for each in survey(str(tmp_path), RealClock()).journals}
    assert found == {first: (1, 1), second: (1, 0)}


def test_what_may_be_stored_needs_a_word(tmp_path: Path) -> None:
    leave(tmp_path, handed(0), is_unknown=False)
    leave(tmp_path, handed(1), is_unknown=True)
    with pytest.raises(Misuse, match=r"messages: 1\).* may be stored twice. Say --may-repeat"):
        spool_directory.retry(str(tmp_path), None, RealClock(), RealRng())
    assert survey(str(tmp_path), RealClock()).messages == 0, "nothing was done by halves"
    done = spool_directory.retry(str(tmp_path), None, RealClock(), RealRng(), may_repeat=True)
    assert (done.messages, done.may_repeat) == (2, 1)


def test_a_journal_whose_process_lives_is_left_alone_and_the_rest_is_done(tmp_path: Path) -> None:
    dead = leave(tmp_path, handed(0), is_unknown=False)
    with journal_of(tmp_path, handed(1), is_unknown=False) as living:
        done = spool_directory.discard(str(tmp_path), None, RealClock(), RealRng())
        assert done.ids == [batch_id(dead, 0)]
        [sentence] = done.left
        assert living in sentence
        assert "is alive and has it: end that first" in sentence
    assert [each.name for each in survey(str(tmp_path), RealClock()).journals] == [living], "the other one is empty"
    assert spool_directory.discard(str(tmp_path), None, RealClock(), RealRng()).left == []
    assert survey(str(tmp_path), RealClock()).journals == []


# --- contents ---------------------------------------------------------------------------------------------------------


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
