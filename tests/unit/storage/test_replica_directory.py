"""A copy that went its own way comes back: cut, begun anew, or caught up; and killed at every step of that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fairway.errors import Misuse, WrongDirectory
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimulatedPowerCut
from fairway.storage import directory, replica_directory
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.recovery import DamageVerdict
from fairway.storage.store import Store
from fairway.storage.survey import survey
from tests.simulation.checks import picture
from tests.unit.storage.copies import LOGS, Pair, Side, bytes_of
from tests.unit.storage.helpers import BILLS, FIRST_MESSAGES, ORDERS, messages, names

STEPS_MAX = 400


def _fill(pair: Pair, count: int = 20) -> None:
    for number in range(count):
        pair.send([b"%d" % number * 80], *((ORDERS, 1) if number % 3 else (BILLS, 2)))
        pair.act(number)
        if number % 4 == 0:
            pair.wait(0.01)


def _same(pair: Pair) -> None:
    assert bytes_of(pair.copy) == bytes_of(pair.master)
    assert picture(pair.copy.store.messages.views) == picture(pair.master.store.messages.views)
    assert pair.copy.view.found == pair.master.view.found


def _shared_ends(one: Store, other: Store) -> tuple[int, int]:
    """Where the two histories part, found as a copy finds it."""
    ends = []
    for log in range(len(LOGS)):
        places = [*one.tail_positions(log), one.ends()[log]]
        marks = zip(one.marks(log, places[:-1]), other.marks(log, places[:-1]), strict=True)
        shared = sum(mine == theirs for mine, theirs in marks)
        ends.append(places[shared])
    return ends[0], ends[1]


def _parted(seed: int | str = 0) -> Pair:
    """Two histories: the old master wrote on alone, and the copy came to lead. Both stand, the old master as `copy`."""
    pair = Pair(seed)
    _fill(pair)
    pair.settle()
    pair.copy.store.checkpoint()
    pair.master.store.checkpoint()
    sequences = dict(pair.sequences)
    _fill(pair, 10)  # nobody else ever has this
    pair.wait()
    pair.master, pair.copy = pair.copy, pair.master
    pair.sequences = sequences
    pair.master.store.lead(2)
    _fill(pair, 10)
    pair.wait()
    pair.copy.abandon()
    pair.copy.open(follows=True)
    return pair


def test_a_deposed_master_is_cut_back_to_where_the_histories_part() -> None:
    with _parted() as pair:
        lost = bytes_of(pair.copy)
        ends = _shared_ends(pair.copy.store, pair.master.store)
        assert all(end < own for end, own in zip(ends, pair.copy.store.ends(), strict=True))
        pair.copy.abandon()
        findings = replica_directory.cut(pair.copy.disk, *ends)
        assert {each.verdict for each in findings} == {DamageVerdict.PARTED}
        kept = {each.aside: each.damage for each in findings}
        assert all(name is not None and name in names(pair.copy.disk, "aside") for name in kept)
        assert sum(each.end - each.start for each in kept.values()) == sum(map(len, lost.values())) - sum(
            map(len, bytes_of(pair.copy).values())
        )
        store = pair.copy.open(follows=True)
        assert (store.findings, store.ends()) == ([], ends)
        pair.settle()
        _same(pair)


def test_a_cut_below_the_checkpoint_takes_the_checkpoint_along() -> None:
    with _parted() as pair:
        half = pair.copy.store.positions(0, 0, 4_000)[3]
        pair.copy.cut(half, 0)
        assert pair.copy.store.ends() == (half, 0)
        assert pair.copy.store.findings == []
        assert len(pair.copy.view.found) == 0
        assert survey(pair.copy.disk, verify=True).is_sound


def test_a_cut_inside_a_sealed_segment_takes_its_index_along() -> None:
    with _parted() as pair:
        log = pair.copy.store.messages.log
        place = pair.copy.store.positions(0, log.segments[1].base, log.segments[1].end)[1]
        pair.copy.cut(place, pair.copy.store.ends()[1])
        assert all(name < f"index/{log.segments[1].base:020d}" for name in names(pair.copy.disk, "index"))
        assert survey(pair.copy.disk, verify=True).is_sound


def _at_every_step(begin: Callable[[], Pair], act: Callable[[Side], object]) -> int:
    """Cut the power in each operation of `act` in turn; open what is left; do it again. The number of steps."""
    for step in range(1, STEPS_MAX):
        with begin() as pair:
            pair.copy.disk.crash_after(step)
            try:
                act(pair.copy)
            except SimulatedPowerCut:
                pair.copy.end()
                if step % 2:
                    _open_as_it_is(pair)
                act(pair.copy)
            else:
                return step
            pair.copy.disk.crash_after(0)
            store = pair.copy.open(follows=True)
            assert store.findings == []
            pair.settle()
            _same(pair)
    raise AssertionError("it never ends")


def _open_as_it_is(pair: Pair) -> None:
    store = pair.copy.open(follows=True)
    assert [each for each in store.findings if each.verdict is not DamageVerdict.TORN] == []
    pair.copy.abandon()


def test_a_cut_can_be_killed_at_every_step() -> None:
    with _parted() as pair:
        ends = _shared_ends(pair.copy.store, pair.master.store)

    def begin() -> Pair:
        made = _parted()
        made.copy.abandon()
        return made

    assert _at_every_step(begin, lambda copy: replica_directory.cut(copy.disk, *ends)) > 10


def test_what_recovery_wrote_down_is_lowered_by_a_cut() -> None:
    with _parted() as pair:
        ends = _shared_ends(pair.copy.store, pair.master.store)
        end = pair.copy.store.ends()[0]
        pair.copy.abandon()
        pair.copy.disk.publish(f"messages/{end:020d}.synced", [])
        replica_directory.cut(pair.copy.disk, *ends)
        store = pair.copy.open(follows=True)
        assert (store.findings, store.ends()) == ([], ends)


# --- begun anew ------------------------------------------------------------------------------------------------------


def _wiped(pair: Pair, copy: Side) -> list[str]:
    store = pair.master.store
    return replica_directory.wipe(copy.disk, SeededRng("wipe"), store.identity, *store.first_bases())


def _retained() -> Pair:
    """The master has let go of what its copy still has, and of what the copy would need next."""
    pair = _parted()
    pair.copy.abandon()
    pair.master.store.confirm(*pair.master.store.ends())
    pair.wait()
    pair.master.store.checkpoint()
    pair.wait()
    pair.master.store.retain_from(pair.master.store.messages.log.segments[-2].base, 0)
    pair.wait()
    assert pair.master.store.first_bases()[0] > 0
    return pair


def test_a_copy_begun_anew_begins_where_the_master_does() -> None:
    with _retained() as pair:
        old = pair.copy.disk.beside()
        before, identity = bytes_of(pair.copy), directory.identify(old)
        assert identity is not None
        aside = _wiped(pair, pair.copy)
        assert len(aside) >= len(before)
        store = pair.copy.open(follows=True, adopt=pair.master.store.identity)
        assert store.identity.directory_id != identity.directory_id
        assert store.ends() == store.first_bases() == pair.master.store.first_bases()
        for name, data in before.items():
            moved = f"aside/{identity.directory_id:016x}-{name.replace('/', '-')}"
            file = pair.copy.disk.open(moved)
            assert file.read(0, file.size) == data
        pair.settle()
        assert bytes_of(pair.copy) == bytes_of(pair.master)
        assert pair.copy.view.found == pair.master.view.found
        assert messages(pair.copy.store) == messages(pair.master.store)
        pair.copy.store.checkpoint()
        pair.wait()
        pair.copy.end()
        assert pair.copy.open(follows=True).findings == []
        assert survey(pair.copy.disk, verify=True).is_sound


def test_beginning_anew_can_be_killed_at_every_step() -> None:
    for step in range(1, STEPS_MAX):
        with _retained() as pair:
            known = directory.identify(pair.copy.disk)
            assert known is not None
            pair.copy.disk.crash_after(step)
            try:
                _wiped(pair, pair.copy)
            except SimulatedPowerCut:
                pair.copy.end()
                is_over = False
            else:
                pair.copy.disk.crash_after(0)
                is_over = True
            store = pair.copy.open(follows=True, adopt=pair.master.store.identity)
            if store.identity.directory_id == known.directory_id:  # nothing was said yet: it is the old one, whole
                assert store.findings == []
                pair.copy.abandon()
                _wiped(pair, pair.copy)
                store = pair.copy.open(follows=True, adopt=pair.master.store.identity)
            assert (store.findings, store.ends()) == ([], pair.master.store.first_bases())
            pair.settle()
            assert bytes_of(pair.copy) == bytes_of(pair.master)
            if is_over:
                assert step > 10
                return
    raise AssertionError("it never ends")


def test_a_new_directory_can_begin_anywhere_and_be_killed() -> None:
    with _retained() as pair:
        for step in range(1, STEPS_MAX):
            fresh = Side(pair.sim, f"fresh {step}", pair.copy.options)
            fresh.disk.crash_after(step)
            try:
                _wiped(pair, fresh)
                break
            except SimulatedPowerCut:
                fresh.end()
                _wiped(pair, fresh)
                store = fresh.open(follows=True, adopt=pair.master.store.identity)
                assert store.ends() == pair.master.store.first_bases()
        assert step > 3


def test_a_damaged_plan_is_not_guessed_at() -> None:
    with _retained() as pair:
        pair.copy.disk.publish(directory.WIPING, [b"?" * replica_directory.RESET_BYTES])
        with pytest.raises(WrongDirectory, match="empty directory"):
            pair.copy.open(follows=True)


# --- catching up -----------------------------------------------------------------------------------------------------


def _behind(seed: int | str) -> Pair:
    pair = Pair(seed)
    _fill(pair)
    pair.wait()
    return pair


def test_a_copy_that_catches_up_syncs_less_often() -> None:
    syncs = []
    for catches_up in (False, True):
        with _behind(0) as pair:
            if catches_up:
                pair.copy.store.begin_catch_up()
            pair.pass_on(bytes_max=1 << 20)
            pair.wait()
            if catches_up:
                assert directory.CATCHING_UP in pair.copy.disk.listing("")
                told: list[object] = []
                pair.copy.store.end_catch_up(told.append)
                with pytest.raises(Misuse, match="has not ended"):
                    pair.copy.store.begin_catch_up()
                with pytest.raises(Misuse, match="catching up"):
                    pair.copy.store.lead(9)
                pair.wait()
                assert told == [None]
                assert directory.CATCHING_UP not in pair.copy.disk.listing("")
            pair.settle()
            _same(pair)
            syncs.append(pair.copy.store.messages.log.flusher.syncs)
    assert syncs[1] < syncs[0] / 2


@pytest.mark.parametrize("ends", [False, True])
def test_a_crash_while_catching_up_is_never_rot(ends: bool) -> None:
    verdicts: set[DamageVerdict] = set()
    for seed in range(40):
        with _behind(f"catch up {seed}") as pair:
            pair.pass_on(bytes_max=700, chunks_max=2)
            pair.wait()
            pair.copy.store.begin_catch_up()
            pair.pass_on(bytes_max=1 << 20)
            if ends:
                pair.copy.store.end_catch_up()
            pair.wait(0.000_1 * (seed % 40))
            pair.copy.end()
            before = survey(pair.copy.disk)
            assert [each.verdict for each in before.damages if each.verdict != "torn"] == []
            store = pair.copy.open(follows=True, adopt=pair.master.store.identity)
            verdicts |= {each.verdict for each in store.findings}
            assert directory.CATCHING_UP not in pair.copy.disk.listing("")
            pair.settle()
            _same(pair)
    assert verdicts == {DamageVerdict.TORN}


def test_beginning_to_catch_up_can_be_killed_at_every_step() -> None:
    for step in range(1, 20):
        with _behind("begin") as pair:
            pair.pass_on(bytes_max=700, chunks_max=2)
            pair.wait()
            pair.copy.disk.crash_after(step)
            try:
                pair.copy.store.begin_catch_up()
            except SimulatedPowerCut:
                pair.copy.end()
                assert pair.copy.open(follows=True).findings == []
                pair.copy.store.begin_catch_up()
            else:
                return
            pair.settle()
            _same(pair)
    raise AssertionError("it never ends")


def test_rot_below_where_it_began_is_still_rot() -> None:
    with _behind("rot") as pair:
        pair.settle()
        pair.copy.store.begin_catch_up()
        pair.copy.abandon()
        pair.copy.disk.flip(FIRST_MESSAGES, 200 * 8)
        store = pair.copy.open(follows=True)
        assert [each.verdict for each in store.findings] == [DamageVerdict.ROTTEN]


def test_a_damaged_file_vouches_for_nothing() -> None:
    with _behind("damaged") as pair:
        pair.copy.disk.publish(directory.CATCHING_UP, [b"?"])
        assert replica_directory.read_catch_up(pair.copy.disk) == {"messages": 0, "actions": 0}


def test_a_cut_lowers_what_a_catch_up_states() -> None:
    with _behind("cut") as pair:
        pair.settle()
        pair.copy.store.begin_catch_up()
        place = pair.copy.store.positions(0, 0, 2_000)[3]
        pair.copy.cut(place, pair.copy.store.ends()[1])
        assert (pair.copy.store.findings, pair.copy.store.ends()[0]) == ([], place)
        pair.settle()
        _same(pair)


def test_identity_of_logs_is_what_is_adopted() -> None:
    with Pair(opened=False) as pair:
        store = pair.copy.open(follows=True, adopt=DirectoryIdentity(9, 1, 2))
        assert store.identity[1:] == (1, 2)
        assert store.identity.directory_id != 9
