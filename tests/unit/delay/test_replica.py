"""A copy of a delay server follows, and comes to lead: nothing is lost, nothing goes out twice, early, or cancelled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from fairway.delay.engine import Engine
from fairway.delay.pending_messages import Filter
from fairway.errors import Code, Misuse, Refused, WrongDirectory
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from tests.unit.delay.helpers import BILLS, DAY_MS, HOUR_MS, OPTIONS, SECOND_MS, Fate, World
from tests.unit.delay.pair import LOGS, Pair, Side

ENDS: list[Callable[[Side], None]] = [Side.end, Side.abandon, lambda side: side.end(SimDisk.crash_process)]
KEPT = replace(
    OPTIONS,
    store=replace(
        OPTIONS.store,
        retention=replace(OPTIONS.store.retention, bytes_max=1 << 20),
        actions_kept_bytes=1 << 20,
    ),
)


def pass_log(pair: Pair, log: int) -> None:
    """The copy takes in one of the two logs, and hears what is committed of both."""
    of = (pair.copy.store.messages.log, pair.copy.store.actions.log)[log]
    while (chunk := pair.master.store.read_chunk(log, of.end, 4_096)) is not None:
        pair.copy.store.follow(log, *chunk)
    pair.sleep(5)
    pair.copy.store.confirm(*pair.master.store.committed_ends())
    pair.copy.engine.on_committed()


# --- taking over ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ENDS)
def test_each_message_goes_out_once_whoever_leads(end: Callable[[Side], None]) -> None:
    change_masters(Engine, end)


def change_masters(made: type[Engine], end: Callable[[Side], None] = Side.end) -> None:
    with Pair(made=made) as pair:
        soon, later = pair.now_ms + SECOND_MS, pair.now_ms + DAY_MS
        ids = pair.schedule([b"soon", b"never", b"put off", b"later"], [soon, later, soon, later])
        assert pair.decide(pair.engine.cancel(ids[1])) is Fate.CANCELLED
        assert pair.decide(pair.engine.reschedule(ids[2], later)) is Fate.RESCHEDULED
        pair.settle()
        pair.advance(2 * SECOND_MS)
        assert pair.broker.payloads == [b"soon"]
        pair.take_over(end)
        pair.settle()
        assert pair.engine.rows.pending == 2
        pair.advance(HOUR_MS)
        assert pair.broker.payloads == [b"soon"]
        pair.take_over()
        pair.advance(DAY_MS)
        assert sorted(pair.broker.payloads) == [b"later", b"put off", b"soon"]


def test_a_copy_sends_nothing_and_answers_nobody() -> None:
    with Pair() as pair:
        (message_id,) = pair.schedule([b"x"], [pair.now_ms + SECOND_MS])
        pair.settle()
        pair.copy.store.confirm(*pair.master.store.committed_ends())
        copy = pair.copy.engine
        pair.sleep(5 * SECOND_MS)
        assert copy.is_passive
        assert copy.is_loaded
        assert copy.on_time() == []
        assert copy.rows.pending == 1
        for ask in (
            lambda: copy.schedule(BILLS, b""),
            lambda: copy.cancel(message_id),
            lambda: copy.reschedule(message_id, pair.now_ms),
            lambda: pair.sim.run(copy.page(Filter())),
        ):
            with pytest.raises(Refused) as refused:
                ask()
            assert refused.value.code is Code.NOT_MASTER


def test_only_a_copy_whose_logs_are_committed_comes_to_lead() -> None:
    with Pair() as pair:
        pair.schedule([b"x"], [pair.now_ms + SECOND_MS])
        pair.settle()
        with pytest.raises(Misuse, match="only a copy that follows"):
            pair.engine.lead()
        with pytest.raises(Misuse, match="not everything in the logs is committed"):
            pair.copy.engine.lead()


def test_an_intent_that_may_have_been_sent_is_sent_again_byte_for_byte() -> None:
    with Pair() as pair:
        pair.schedule([b"a", b"b"], [pair.now_ms + SECOND_MS] * 2)
        pair.settle()
        pair.sleep(2 * SECOND_MS)
        for _ in range(5):
            pair.give_out()
            pair.go_on()
        assert len(pair.late) == 1
        pair.deliver_late()  # and nobody learns of it
        pair.take_over()
        pair.settle()
        assert pair.broker.payloads == [b"a", b"b"]
        assert pair.broker.repeats == 1


def test_an_intent_goes_out_only_when_the_copy_has_it() -> None:
    with Pair() as pair:
        pair.schedule([b"x"], [pair.now_ms + SECOND_MS])
        pair.settle()
        pair.is_cut_off = True
        pair.sleep(2 * SECOND_MS)
        for _ in range(10):
            assert pair.tick() == []
            pair.sleep(5)
        pair.take_over(Side.abandon)  # the copy has not heard of that intent
        pair.settle()
        assert pair.cuts == 1
        pair.advance(SECOND_MS)
        assert pair.broker.payloads == [b"x"]
        assert pair.broker.repeats == 0


def test_a_cancel_that_no_copy_has_is_undone_with_its_master() -> None:
    cancel_alone(Engine)


def cancel_alone(made: type[Engine]) -> None:
    with Pair(made=made) as pair:
        ids = pair.schedule([b"x", b"y"], [pair.now_ms + 2 * DAY_MS] * 2)
        pair.settle()
        pair.is_cut_off = True
        assert pair.engine.cancel(ids[0]).answer is Fate.CANCELLED  # and never answered
        for _ in range(40):  # the day comes near, and its bucket is cut into hours
            pair.sleep(HOUR_MS)
            pair.engine.on_time()
            pair.sleep(5)
        pair.take_over(Side.abandon)
        pair.settle()
        assert pair.cuts == 1
        pair.take_over()  # the first one leads again, with the buckets that it had
        pair.advance(2 * DAY_MS)
        assert sorted(pair.broker.payloads) == [b"x", b"y"]


def test_what_is_not_committed_is_in_no_bucket_of_a_copy() -> None:
    with Pair() as pair:
        pair.schedule([b"x"], [pair.now_ms + DAY_MS])
        pair.settle()
        pair.copy.store.checkpoint()
        pair.sleep(10)
        pair.send([b"unanswered"], [pair.now_ms + DAY_MS], producer=2)
        pair.sleep(5)
        for log in LOGS:
            pass_log(pair, log)  # the copy has it, and its master does not know yet
        for _ in range(10):
            pair.copy.engine.on_time()
            pair.sleep(5)
        assert pair.copy.engine.rows.pending == 1
        assert pair.copy.engine.derived_end < pair.copy.store.messages.log.end
        pair.take_over()
        pair.settle()
        assert pair.engine.rows.pending == 2  # by now it is


# --- the two logs come independently ----------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", ["none", "crash", "pictured"])
def test_a_decision_may_come_before_its_message(restart: str) -> None:
    with Pair(options=KEPT) as pair:
        pair.settle()
        pair.copy.end()
        pair.wait_no_more()
        far = pair.now_ms + DAY_MS
        ids = pair.schedule([b"cancelled", b"put off", b"sent", b"left"], [far, far, pair.now_ms, far])
        pair.settle()
        pair.decide(pair.engine.cancel(ids[0]))
        pair.decide(pair.engine.reschedule(ids[1], far + DAY_MS))
        pair.settle()
        assert pair.broker.payloads == [b"sent"]
        pair.is_cut_off = True
        pair.copy.open()
        pass_log(pair, 1)
        for _ in range(200):
            pair.copy.engine.on_time()
            pair.sleep(5)
        if restart == "pictured":
            pair.copy.store.checkpoint()
            pair.sleep(10)
        if restart != "none":
            pair.copy.end()
            pair.copy.open()
        pair.is_cut_off = False
        pair.settle()
        assert pair.copy.engine.rows.pending == 2
        pair.take_over()
        pair.advance(DAY_MS + SECOND_MS)
        assert pair.broker.payloads == [b"sent", b"left"]
        pair.advance(DAY_MS)
        assert pair.broker.payloads == [b"sent", b"left", b"put off"]


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operations", [1, 3, 8, 13, 21, 55])
def test_a_copy_that_dies_at_any_step_goes_on(operations: int) -> None:
    with Pair(f"dies {operations}", options=replace(KEPT, remembered_max=2)) as pair:
        pair.copy.disk.crash_after(operations)
        for turn in range(8):
            payloads = [b"%d" % (5 * turn + index) for index in range(5)]
            pair.send(payloads, [pair.now_ms + 100 * turn] * 5, producer=turn + 1)
            for _ in range(20):
                with suppress(SimulatedPowerCut):
                    pair.tick()
                pair.sleep(5)
                if not pair.copy.disk.alive:
                    pair.copy.end()
                    pair.join()
            pair.await_receipt()
        pair.copy.disk.crash_after(0)
        pair.settle()
        pair.take_over()
        pair.advance(SECOND_MS)
        pair.take_over()
        pair.advance(SECOND_MS)
        assert sorted(pair.broker.payloads, key=int) == [b"%d" % number for number in range(40)]


@pytest.mark.parametrize("is_heard_of", [False, True])
def test_a_copy_may_be_told_to_lead_while_it_loads(is_heard_of: bool) -> None:
    with Pair(options=KEPT) as pair:
        far = pair.now_ms + HOUR_MS
        ids = [pair.schedule([b"%d" % number], [far], producer=number + 1)[0] for number in range(20)]
        pair.settle()
        pair.copy.end()
        pair.join(looks=1)
        pair.pass_on()
        if is_heard_of:
            assert pair.decide(pair.engine.cancel(ids[0])) is Fate.CANCELLED
            pair.go_on()
        pair.copy.engine.on_time()
        assert not pair.copy.engine.is_loaded
        pair.take_over()
        with pytest.raises(Refused) as refused:
            pair.engine.cancel(ids[1])
        assert refused.value.code is Code.BUSY
        pair.settle()
        assert pair.engine.rows.pending == 20 - is_heard_of
        pair.advance(2 * HOUR_MS)
        assert len(pair.broker.payloads) == 20 - is_heard_of
        assert (b"0" in pair.broker.payloads) != is_heard_of


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_copy_waits_until_what_has_rotted_is_mended(is_mended: bool) -> None:
    with Pair() as pair:
        far = pair.now_ms + HOUR_MS
        start = pair.master.store.messages.log.end
        pair.send([b"x" * 500], [far])
        end = pair.receipt.end
        pair.send([b"y"], [far], producer=2)
        pair.sleep(5)
        pass_log(pair, 0)
        (name,) = pair.copy.disk.listing("messages")
        pair.copy.disk.rot(f"messages/{name}", 3, low=end - 300, high=end - 1)
        for _ in range(30):
            pair.tick()
            pair.sleep(5)
        copy = pair.copy.engine
        assert (copy.rows.pending, len(copy.damaged)) == (0, 1)
        if is_mended:
            (span,) = copy.store.rotten_spans()
            assert start <= span.start < end
            chunk = pair.master.store.read_chunk(0, span.start, 1)
            assert chunk is not None
            copy.store.mend(0, span.start, chunk.data)
        pair.advance(2 * SECOND_MS if is_mended else HOUR_MS // 3)
        assert copy.rows.pending == 1 + is_mended
        pair.take_over()
        pair.advance(2 * HOUR_MS)
        assert len(pair.broker.payloads) == 1 + is_mended


# --- keeping house ----------------------------------------------------------------------------------------------------


def test_a_copy_that_follows_for_long_needs_no_more_than_its_master() -> None:
    with Pair(options=replace(OPTIONS, remembered_max=4)) as pair:
        for number in range(40):
            pair.schedule([b"x" * 200] * 4, [pair.now_ms + 20] * 4, producer=number + 1)
            pair.sleep(60)
            for _ in range(3):
                pair.tick()
        for _ in range(3):
            pair.advance(2 * HOUR_MS)
        copy = pair.copy.engine
        assert len(pair.broker.payloads) == 160
        assert len(copy.rows) == 0
        assert copy.rows.end < 200
        assert copy._journal._so_far == []
        assert copy._recovery.decision_index.subjects == set()
        assert copy.store.first_bases()[0] > 0
        assert copy.store.first_bases()[1] > 0
        pair.advance(DAY_MS)
        assert pair.copy.files == pair.master.files == []
        assert pair.copy.refills == 0


def test_a_copy_keeps_what_is_in_no_bucket_although_its_master_lets_it_go() -> None:
    follow_without_room(Engine)


def follow_without_room(made: type[Engine]) -> None:
    with Pair(apart=True, made=made) as pair:
        pair.settle()
        disk = pair.copy.schedule_disk
        assert disk is not None
        file = disk.open("else/where", create=True)
        disk.reserve(file, file.size + disk.free_bytes())  # somebody takes all the room for its buckets
        file.close()
        for number in range(30):
            pair.schedule([b"%d" % number + b"x" * 400], [pair.now_ms + HOUR_MS], producer=number + 1)
            pair.sleep(30)
            pair.tick()
        pair.sleep(61 * SECOND_MS)
        for _ in range(40):
            pair.tick()
            pair.sleep(5)
        assert pair.copy.store.first_bases()[0] < pair.master.store.first_bases()[0]
        disk.remove("else/where")
        pair.sleep(2 * SECOND_MS)
        pair.settle()
        pair.take_over()
        pair.advance(2 * HOUR_MS)
        assert len(pair.broker.payloads) == 30


def test_what_was_sent_and_forgotten_is_not_sent_by_the_next_one() -> None:
    with Pair(options=replace(OPTIONS, remembered_max=2)) as pair:
        for number in range(30):
            pair.schedule([b"%d" % number], [pair.now_ms + 10], producer=number + 1)
            pair.sleep(40)
            pair.tick()
        pair.schedule([b"later"], [pair.now_ms + 3 * HOUR_MS], producer=99)
        pair.settle()
        pair.copy.store.checkpoint()
        pair.sleep(10)
        pair.copy.end()
        pair.join()
        pair.settle()
        pair.take_over()
        pair.settle()
        assert pair.engine.rows.pending == 1
        pair.advance(4 * HOUR_MS)
        assert len(pair.broker.payloads) == 31
        assert pair.broker.repeats == 0


def test_a_copy_that_was_away_for_too_long_begins_anew_from_what_its_master_has() -> None:
    with Pair() as pair:
        pair.settle()
        pair.copy.end()
        pair.wait_no_more()
        for number in range(60):
            pair.schedule([b"%d" % number + b"x" * 400], [pair.now_ms + HOUR_MS], producer=number + 1)
            pair.sleep(30)
            pair.tick()
        pair.advance(61 * SECOND_MS)
        assert pair.master.store.first_bases()[0] > 0
        pair.join()
        pair.settle()
        assert pair.copy.refills == 1
        pair.take_over()
        pair.advance(2 * HOUR_MS)
        assert len(pair.broker.payloads) == 60


def test_buckets_that_are_gone_are_not_taken_for_a_first_start() -> None:
    with World() as world:
        for number in range(60):
            world.schedule([b"x" * 400], [world.now_ms + HOUR_MS], producer=number + 1)
        world.advance(61 * SECOND_MS)
        world.close()
        for name in world.disk.listing("schedule"):
            world.disk.remove(f"schedule/{name}")
        with pytest.raises(WrongDirectory, match="does not go back to the beginning"):
            world.open()


def test_a_split_does_not_wait_for_what_it_holds_up_itself() -> None:
    """A message that is held goes into a private bucket, where it counts with the switch; what came later went into the
    old one at once, which counts when all before it does."""
    with World(options=replace(OPTIONS, hold_ms=1_000)) as world:
        due_ms = world.now_ms + 40 * HOUR_MS  # a day ahead, in a day's bucket
        due_ms += DAY_MS - due_ms % DAY_MS + HOUR_MS
        world.schedule([b"first"], [due_ms])
        world.settle()
        world.sleep(due_ms - HOUR_MS - DAY_MS - world.now_ms - 1)  # a moment before it is cut into hours
        world.tick()
        world.schedule([b"held"], [due_ms], producer=2)
        world.schedule([b"%d" % number for number in range(300)], [due_ms] * 300, producer=3)
        world.tick()
        world.sleep(2)
        world.advance(61 * SECOND_MS)
        assert world.engine._housekeeper.splits == 1
        world.advance(2 * DAY_MS)
        assert len(world.broker.payloads) == 302
