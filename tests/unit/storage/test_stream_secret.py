"""Who may go on with a stream: only who shows its secret, whatever becomes of process, checkpoint and copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway import batch, limits
from fairway.errors import Code, FairwayError, Refused, StoredRange
from fairway.limits import KIB
from fairway.names import Subject
from fairway.simulation.disk import SimDisk
from fairway.storage import consume_log, segment
from fairway.storage.dedupe import DedupeWindow, PlaceTaken
from fairway.storage.index_file import ENTRY_BYTES
from fairway.storage.message_log import AppendReceipt
from fairway.storage.record import HEADER_BYTES, RecordKind
from fairway.storage.store import Store, StoreOptions
from tests.unit.storage.copies import Pair
from tests.unit.storage.helpers import BILLS, ORDERS, ROOMY, SMALL, World, batch_of, content, names, records_of

SECRET, ANOTHER = bytes(range(16)), bytes(range(1, 17))
STRANGERS = (b"", ANOTHER, SECRET[:15], SECRET + b"\0", bytes(16))


def offer(
    store: Store, first: int, payload: bytes = b"x", *, secret: bytes = SECRET, producer: int = 1
) -> AppendReceipt:
    return store.produce(ORDERS, batch_of([payload], producer=producer, first=first), secret=secret)


def stored(world: World, first: int, *, secret: bytes = SECRET, producer: int = 1) -> AppendReceipt:
    receipt = offer(world.store, first, secret=secret, producer=producer)
    world.run(world.store.durable(receipt))
    return receipt


def refusal(store: Store, first: int, *, secret: bytes, producer: int = 1) -> Refused:
    with pytest.raises(Refused) as caught:
        offer(store, first, secret=secret, producer=producer)
    return caught.value


def check_closed(store: Store, next_: int) -> None:
    """A stranger can neither go on, nor ask for a receipt, nor learn where the stream stands."""
    end = store.messages.log.end
    for secret in STRANGERS:
        for first in (0, next_, next_ + 1):
            refused = refusal(store, first, secret=secret)
            assert refused.code is Code.FOREIGN_STREAM
            assert str(next_) not in refused.sentence.replace("0000000000000001", "")
    assert store.messages.log.end == end


def _with_checkpoint(world: World) -> None:
    world.reopen()


def _rebuilt(world: World) -> None:
    world.kill()
    for name in names(world.disk, "checkpoints"):
        world.disk.remove(name)
    world.open()


def _after_a_power_cut(world: World) -> None:
    world.crash()
    world.open()


LIVES: list[Callable[[World], None]] = [lambda _: None, _with_checkpoint, _rebuilt, _after_a_power_cut]


@pytest.mark.parametrize("live_on", LIVES, ids=["live", "with checkpoint", "rebuilt", "power cut"])
def test_only_who_shows_the_secret_goes_on(live_on: Callable[[World], None]) -> None:
    with World(options=ROOMY) as world:
        stored(world, 0)
        live_on(world)
        check_closed(world.store, 1)
        assert offer(world.store, 0).is_duplicate
        assert stored(world, 1).first_sequence == 1


@pytest.mark.parametrize("live_on", LIVES, ids=["live", "with checkpoint", "rebuilt", "power cut"])
def test_a_stream_that_was_begun_without_a_secret_goes_on_as_ever_and_never_gets_one(
    live_on: Callable[[World], None],
) -> None:
    with World(options=ROOMY) as world:
        stored(world, 0, secret=b"")
        live_on(world)
        assert stored(world, 1, secret=SECRET).first_sequence == 1
        live_on(world)
        assert stored(world, 2, secret=b"").first_sequence == 2
        assert stored(world, 3, secret=ANOTHER).first_sequence == 3


def test_the_secret_outlives_the_segments_that_stated_it_and_the_checkpoint() -> None:
    """Every segment in which a stream has a batch states its verifier, so any suffix of the log knows it."""
    options = StoreOptions(segment_bytes=SMALL.segment_bytes, action_segment_bytes=4096, low_water_bytes=0)
    with World(options=options) as world:
        for first in range(200):
            stored(world, first)
        world.settle()
        bases = [each.base for each in world.store.messages.log.segments]
        assert len(bases) > 4
        for base in bases[:-2]:
            world.store._drop(base)
        world.store.checkpoint()
        world.settle()
        _rebuilt(world)
        assert len(names(world.disk, "messages")) <= 3
        check_closed(world.store, 200)
        assert stored(world, 200).first_sequence == 200


@pytest.mark.parametrize("which", [0, 1], ids=["before the first batch", "behind it"])
def test_one_rotten_statement_opens_no_stream(which: int) -> None:
    with World(options=ROOMY) as world:
        stored(world, 0)
        stored(world, 1)
        world.settle()
        world.kill()
        for name in names(world.disk, "checkpoints"):
            world.disk.remove(name)
        file = segment.file_name("messages", 0)
        found = records_of(world.disk, file, world.store.identity.messages_id)
        statements = [each for each in found if each.header.kind == RecordKind.STREAM]
        assert len(statements) == 2
        world.disk.flip(file, 8 * (statements[which].header.position + HEADER_BYTES + 9))
        world.open()
        assert world.store.findings
        check_closed(world.store, 2)
        assert stored(world, 2).first_sequence >= 2


def test_a_full_disk_that_undoes_a_statement_leaves_no_stream_open() -> None:
    with World(options=ROOMY) as world:
        stored(world, 0, producer=2)
        views = world.store.messages.views
        receipt = offer(world.store, 0)
        views.cut(receipt.end - HEADER_BYTES)  # as a full disk does
        assert views.dedupe.statement(1, SECRET, 0) is not None
        with pytest.raises(Refused):
            views.dedupe.judge(header(1), 1, SECRET)
        assert views.dedupe.statement(2, SECRET, 0) is None


def header(first: int = 0, producer: int = 1) -> batch.BatchHeader:
    return batch.peek(batch_of([b"x"], producer=producer, first=first))


def test_copies_know_it_and_so_does_the_one_that_leads_next() -> None:
    with Pair() as pair:
        for first in range(60):
            offer(pair.master.store, first)
            pair.wait(0.01)
        pair.settle()
        assert len(pair.copy.store.messages.log.segments) > 1
        pair.master.abandon()
        pair.master, pair.copy = pair.copy, pair.master
        pair.master.store.lead(5)
        check_closed(pair.master.store, 60)
        assert offer(pair.master.store, 60).first_sequence == 60
        pair.master.end(SimDisk.crash_process)
        for name in names(pair.master.disk, "checkpoints"):
            pair.master.disk.remove(name)
        check_closed(pair.master.open(epoch=6), 61)


def test_no_file_of_a_store_holds_a_secret() -> None:
    with World(options=SMALL) as world:
        for first in range(50):
            stored(world, first)
        world.reopen()
        for directory in ("messages", "actions", "index", "checkpoints"):
            for name in names(world.disk, directory):
                assert SECRET not in content(world.disk, name), name


def test_nothing_that_readers_get_has_the_secret_or_what_verifies_it() -> None:
    with World(options=SMALL) as world:
        for first in range(50):
            stored(world, first)
        subject = world.store.messages.views.subjects.find(ORDERS)
        assert subject is not None
        read = world.store.messages.read(subject.id, 0, messages_max=100, bytes_max=1 << 20)
        assert [each.data for each in read] == [batch_of([b"x"], first=first) for first in range(50)]


def test_a_stream_that_was_forgotten_may_be_begun_anew_by_anybody_and_is_then_theirs() -> None:
    with World(options=ROOMY) as world:
        stored(world, 0)
        world.store.messages.views.dedupe.expire(world.clock.wall_ms() + limits.STREAM_IDLE_MS_MAX + 1)
        assert refusal(world.store, 1, secret=SECRET).code is Code.UNKNOWN_PRODUCER
        stored(world, 0, secret=ANOTHER)
        assert refusal(world.store, 1, secret=SECRET).code is Code.FOREIGN_STREAM
        _rebuilt(world)
        assert refusal(world.store, 1, secret=SECRET).code is Code.FOREIGN_STREAM
        assert stored(world, 1, secret=ANOTHER).first_sequence == 2


def to_new(store: Store, first: int) -> AppendReceipt:
    return store.produce(Subject("new"), batch_of([b"x"], producer=7, first=first), secret=SECRET)


def test_checkpoint_of_a_tail_that_is_cut_leaves_the_stream_to_its_owner() -> None:
    """The subject of the stream goes with the tail; the next master gives its id to another subject."""
    with Pair() as pair:
        offer(pair.master.store, 0)
        pair.settle()
        ends = pair.master.store.committed_ends()
        to_new(pair.master.store, 0)  # synced here, never copied, never answered
        pair.wait()
        pair.master.store.checkpoint()
        pair.wait()
        pair.copy.abandon()
        pair.copy.open(epoch=5)
        pair.copy.store.hold()
        pair.master.cut(*ends[:2])
        pair.master, pair.copy = pair.copy, pair.master
        pair.master.store.produce(BILLS, batch_of([b"x"], producer=9), secret=SECRET)
        assert not to_new(pair.master.store, 0).is_duplicate
        pair.settle()
        pair.master.abandon()
        pair.copy.store.lead(9)
        assert to_new(pair.copy.store, 0).is_duplicate
        assert not to_new(pair.copy.store, 1).is_duplicate


def test_picture_holds_no_verifier_of_a_stream_that_is_not_committed() -> None:
    with World(options=ROOMY) as world:
        stored(world, 0)
        to_new(world.store, 0)  # not synced
        picture = world.store._picture()
        assert list(DedupeWindow.unpack(picture.streams, picture.verifiers)._streams) == [1]


def test_stream_without_batches_takes_the_subject_of_its_newest_statement() -> None:
    """A checkpoint of an earlier version may hold such a stream under a subject that was never committed."""
    body = DedupeWindow().statement(1, SECRET, 0)
    assert body is not None
    window = DedupeWindow()
    window.state(body, 2, 100)
    carried = DedupeWindow.unpack(b"", window.pack_verifiers(200, dict))
    assert carried.judge(header(0), 3, SECRET) is None
    carried.state(body, 3, 300)
    carried.note(header(0), 3, 0, 400, 0)
    assert carried.judge(header(1), 3, SECRET) is None
    with pytest.raises(PlaceTaken):
        carried.judge(header(1), 2, SECRET)


def test_picture_between_two_statements_of_a_stream_holds_its_verifier() -> None:
    """A statement, the end of the picture, a batch, a statement: the second one may be lost with the tail."""
    body = DedupeWindow().statement(1, SECRET, 0)
    assert body is not None
    window = DedupeWindow()
    window.state(body, 1, 100)
    window.note(header(0), 1, 0, 300, 0)
    window.state(body, 1, 300)
    carried = DedupeWindow.unpack(window.pack(200, dict), window.pack_verifiers(200, dict))
    carried = DedupeWindow.unpack(carried.pack(200, dict), carried.pack_verifiers(200, dict))
    carried.note(header(0), 1, 0, 300, 0)
    with pytest.raises(Refused) as caught:
        carried.judge(header(1), 1, ANOTHER)
    assert caught.value.code is Code.FOREIGN_STREAM


# --- what a conflict says --------------------------------------------------------------------------------------------


def resolved(world: World, first: int, payloads: list[bytes], **how: bytes) -> AppendReceipt | PlaceTaken:
    with pytest.raises(PlaceTaken) as caught:
        world.store.produce(ORDERS, batch_of(payloads, first=first), secret=how.get("secret", SECRET))
    said: list[tuple[FairwayError | None, AppendReceipt | PlaceTaken]] = []
    world.store.when_taken(caught.value, lambda fault, answer: said.append((fault, answer)))
    world.settle()
    [(fault, answer)] = said
    assert fault is None
    return answer


def parts(answer: AppendReceipt | PlaceTaken) -> list[tuple[int, int]] | None:
    assert isinstance(answer, PlaceTaken)
    return None if answer.stored is None else [(each.first, each.messages) for each in answer.stored]


def crc_of(first: int, payloads: list[bytes]) -> int:
    return int.from_bytes(batch_of(payloads, first=first)[4:8], "little")


def test_a_conflict_says_what_is_stored_there() -> None:
    with World(options=ROOMY) as world:
        for first, payloads in ((0, [b"a", b"b"]), (2, [b"c", b"d", b"e"])):
            world.run(world.store.durable(world.store.produce(ORDERS, batch_of(payloads, first=first), secret=SECRET)))
        answer = resolved(world, 2, [b"c", b"d", b"other"])
        assert isinstance(answer, PlaceTaken)
        assert answer.stored == (StoredRange(2, 3, crc_of(2, [b"c", b"d", b"e"])),)
        assert parts(resolved(world, 1, [b"b"])) == [(0, 2)]
        assert parts(resolved(world, 1, [b"b", b"c"])) == [(0, 2), (2, 3)]
        assert parts(resolved(world, 4, [b"e", b"f"])) == [(2, 3)]


def flood(world: World, count: int) -> None:
    """A relay sends so many rows at once, one batch each."""
    last = [
        world.store.produce(ORDERS, batch_of([b"%d" % first], first=first), secret=SECRET) for first in range(count)
    ]
    world.run(world.store.durable(last[-1]))


@pytest.mark.parametrize("options", [ROOMY, SMALL], ids=["one segment", "many segments"])
def test_what_has_left_the_window_is_found_in_the_log(options: StoreOptions) -> None:
    with World(options=options) as world:
        world.run(world.store.durable(world.store.produce(BILLS, batch_of([b"x"], producer=9), secret=ANOTHER)))
        flood(world, 300)
        receipt = resolved(world, 5, [b"5"])
        assert isinstance(receipt, AppendReceipt)
        assert (receipt.first_sequence, receipt.count, receipt.is_duplicate) == (5, 1, True)
        other = resolved(world, 5, [b"other"])
        assert isinstance(other, PlaceTaken)
        assert other.stored == (StoredRange(5, 1, crc_of(5, [b"5"])),)
        assert parts(resolved(world, 5, [b"5", b"6"])) == [(5, 1), (6, 1)]


@pytest.mark.parametrize("is_reopened", [False, True])
def test_look_back_reaches_as_far_right_behind_a_segment_roll(
    monkeypatch: pytest.MonkeyPatch, is_reopened: bool
) -> None:
    """The newest 200 entries, wherever in them a segment ends. A run has more entries than that."""
    monkeypatch.setattr(consume_log, "_LOOKED_BACK_MAX", 200 * ENTRY_BYTES)
    options = StoreOptions(segment_bytes=100 * KIB, action_segment_bytes=64 * KIB, low_water_bytes=0)
    with World(options=options) as world:
        for first in range(1_300):
            stored(world, first)
            if first % 5 or first < 300:
                continue
            if is_reopened and first % 50 == 0:
                world.reopen()
            assert isinstance(resolved(world, first - 199, [b"x"]), AppendReceipt)
            assert parts(resolved(world, first - 150, [b"y"] * 3)) == [(first - 150 + each, 1) for each in range(3)]
            assert parts(resolved(world, first - 200, [b"x"])) is None, "beyond the bound"
        assert len(world.store.messages.log.segments) > 2
        assert max(each.entries for each in world.store.messages.views.entries._runs[1]) > 200


def test_one_stream_that_feeds_a_subject_is_found_far_back() -> None:
    with World(options=ROOMY) as world:
        flood(world, 5_000)
        assert isinstance(resolved(world, 5, [b"5"]), AppendReceipt)
        assert parts(resolved(world, 5, [b"y"] * 64)) == [(5 + each, 1) for each in range(64)]
        assert parts(resolved(world, 5, [b"y"] * 65)) is None, "a refusal names 64 batches at most"


def test_what_is_too_far_back_or_gone_is_not_known() -> None:
    with World(options=SMALL) as world:
        flood(world, 300)
        world.settle()
        for base in [each.base for each in world.store.messages.log.segments][:-1]:
            world.store._drop(base)
        assert parts(resolved(world, 5, [b"5"])) is None
        assert parts(resolved(world, 299, [b"other"])) == [(299, 1)]


def test_a_stream_of_another_subject_says_nothing_of_what_is_there() -> None:
    with World(options=ROOMY) as world:
        stored(world, 0)
        with pytest.raises(PlaceTaken) as caught:
            world.store.produce(BILLS, batch_of([b"x"], first=1), secret=SECRET)
        answer = world.store.messages.resolve(caught.value)
        assert isinstance(answer, PlaceTaken)
        assert answer.stored is None


def test_an_older_epoch_at_a_free_place_has_nothing_stored_there() -> None:
    with World(options=ROOMY) as world:
        receipt = world.store.produce(ORDERS, batch_of([b"x"], epoch=3), secret=SECRET)
        world.run(world.store.durable(receipt))
        with pytest.raises(PlaceTaken) as caught:
            world.store.produce(ORDERS, batch_of([b"y"], first=1, epoch=2), secret=SECRET)
        assert caught.value.stored == ()


# --- any order of events ---------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.sampled_from(["produce", "other", "plain", "checkpoint", "kill", "crash", "forget checkpoints", "retain"]),
    min_size=4,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_happens_a_guarded_stream_stays_guarded(steps: list[str]) -> None:
    """A model of three streams: two with secrets, one without. What is acknowledged is known again, and no stranger
    goes on with a guarded one for as long as it is remembered."""
    with World("secrets", options=StoreOptions(2_048, 4_096, 0)) as world:
        secrets = {1: SECRET, 2: ANOTHER, 3: b""}
        stands = {1: 0, 2: 0, 3: 0}
        for step in steps:
            if step in ("produce", "other", "plain"):
                producer = {"produce": 1, "other": 2, "plain": 3}[step]
                stored(world, stands[producer], secret=secrets[producer], producer=producer)
                stands[producer] += 1
            elif step == "checkpoint":
                world.checkpoint()
            elif step == "kill":
                world.kill()
                world.open()
            elif step == "crash":
                world.crash()
                world.open()
            elif step == "retain":
                world.settle()
                for each in list(world.store.messages.log.segments)[:-1]:
                    if each.end <= world.store._droppable_end():
                        world.store._drop(each.base)
                world.checkpoint()
            else:
                world.settle()
                bases = [each.base for each in world.store.messages.log.segments]
                world.kill()
                if bases and bases[0] == 0:  # else nobody could tell what retention has taken
                    for name in names(world.disk, "checkpoints"):
                        world.disk.remove(name)
                world.open()
            check(world.store, secrets, stands)


def check(store: Store, secrets: dict[int, bytes], stands: dict[int, int]) -> None:
    for producer, secret in secrets.items():
        next_ = stands[producer]
        if not next_:
            continue
        for stranger in (b"", bytes(reversed(SECRET))):
            if secret:
                assert refusal(store, next_, secret=stranger, producer=producer).code is Code.FOREIGN_STREAM
        assert offer(store, next_ - 1, secret=secret, producer=producer).is_duplicate


def test_a_picture_knows_a_stream_that_has_been_stated_and_has_no_batch_yet() -> None:
    window = DedupeWindow()
    statement = window.statement(7, SECRET, 0)
    assert statement is not None
    window.state(statement, 1, 100)
    assert window.pack_verifiers(100, dict) == b"", "it is not below that"
    again = DedupeWindow.unpack(window.pack(200, dict), window.pack_verifiers(200, dict))
    with pytest.raises(Refused) as caught:
        again.judge(header(producer=7), 1)
    assert caught.value.code is Code.FOREIGN_STREAM
    assert again.judge(header(producer=7), 1, SECRET) is None
