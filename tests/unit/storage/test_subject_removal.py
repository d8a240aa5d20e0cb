"""A removed subject is gone for readers at once and for ever: through crashes, restarts, cuts, rot and retention."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from fairway import limits
from fairway.errors import Code, Refused, RemoteProtocolError
from fairway.names import Subject
from fairway.storage import subjects
from fairway.storage.record import RecordHeader, RecordKind
from fairway.storage.store import Store, StoreOptions
from fairway.storage.subjects import SubjectTable
from fairway.storage.survey import survey
from tests.unit.storage.helpers import BILLS, FIRST_MESSAGES, ORDERS, ROOMY, SMALL, World, content, messages, records_of
from tests.unit.storage.test_subjects import table


def remove(world: World, *names: Subject) -> None:
    """Write the removal, and wait until it is settled."""
    find = world.store.messages.views.subjects.find
    states = [state for name in names if (state := find(name)) is not None]
    assert len(states) == len(names)
    world.store.remove_subjects(states)
    world.settle()


def listed(store: Store) -> set[str]:
    return {str(each.name) for each in store.messages.views.subjects}


# --- the table -------------------------------------------------------------------------------------------------------


def removed(of: SubjectTable, *names: str, end: int = 1_000, settled: bool = True) -> SubjectTable:
    states = [state for name in names if (state := of.find(Subject(name))) is not None]
    of.take_removal(of.pack_removal(states), end)
    if settled:
        of.settle(end)
    return of


def test_the_next_subject_of_the_name_starts_above_and_has_another_number() -> None:
    made = removed(table(orders=5, bills=7), "orders")
    assert made.find(ORDERS) is None
    again = made.introduce(ORDERS, 2_000)
    assert (again.id, again.next_sequence) == (3, 5)


def test_a_subject_that_was_never_written_raises_nothing() -> None:
    made = removed(table(orders=0, bills=7), "orders")
    assert made.introduce(ORDERS, 2_000).next_sequence == 0


def test_until_it_is_settled_a_removal_can_be_undone() -> None:
    made = removed(table(orders=5), "orders", end=1_000, settled=False)
    state = made.find(ORDERS)
    assert state is not None
    assert [each.is_shut for each in made] == [True]
    assert made.settle(999) == []
    made.cut(990)
    assert made.find(ORDERS) is state
    assert [each.is_shut for each in made] == [False]
    assert made.settle(1_000) == []


def test_a_cut_behind_the_removal_leaves_it() -> None:
    made = removed(table(orders=5), "orders", end=1_000, settled=False)
    made.cut(1_000)
    assert [each.name for each in made.settle(1_000)] == [ORDERS]


def test_a_replay_may_meet_the_next_subject_of_the_name_before_the_removal_is_settled() -> None:
    made = removed(table(orders=5), "orders", settled=False)
    newer = SubjectTable()
    newer.restate(table(other=0, orders=9).pack(), 0)
    made.restate(newer.pack(), 2_000)
    assert made.find(ORDERS) is made.by_id(2)
    made.settle(1_000)
    assert made.find(ORDERS) is made.by_id(2)
    assert 1 not in made


def test_a_picture_knows_the_removed_ones_only_behind_their_removal() -> None:
    made = removed(table(orders=5, bills=7), "orders", end=1_000, settled=False)
    assert [name for _, name, _ in subjects.unpack(made.pack(upto=999))] == [ORDERS, BILLS]
    assert [name for _, name, _ in subjects.unpack(made.pack(upto=1_000))] == [BILLS]
    assert [name for _, name, _ in subjects.unpack(made.pack())] == [BILLS]  # as a segment restates it


def test_a_record_that_was_mended_does_not_bring_a_subject_back() -> None:
    made = table(orders=5, bills=7)
    old = made.pack()
    removed(made, "orders")
    made.restate(old, 0)
    assert made.find(ORDERS) is None
    picture = SubjectTable()
    picture.restate(made.pack_picture(2_000, {}), 0)
    picture.restate(old, 0)
    assert picture.find(ORDERS) is None
    assert picture.is_removed(1)


def test_removed_ids_are_forgotten_with_the_log_that_spoke_of_them() -> None:
    made = removed(table(orders=5, bills=7), "orders", end=1_000)
    made.forget_removed(999)
    assert made.is_removed(1)
    made.forget_removed(1_000)
    assert not made.is_removed(1)


def test_removed_ids_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REMOVED_SUBJECTS_MAX", 3)
    made = removed(table(**{f"s{number}": 1 for number in range(5)}), *(f"s{number}" for number in range(5)))
    assert [made.is_removed(each) for each in range(1, 6)] == [False, False, True, True, True]


def test_a_subject_that_starts_above_0_is_known_to_be_unwritten_until_it_is_written() -> None:
    made = removed(table(orders=5, bills=7), "orders")
    fresh = made.introduce(ORDERS, 2_000)
    for body in (made.pack(), made.pack_one(fresh), made.pack_picture(3_000, {})):
        again = SubjectTable()
        again.restate(body, 0)
        state = again.find(ORDERS)
        assert state is not None
        assert state.is_unwritten
    assert not made.by_id(2).is_unwritten
    made.advance(fresh.id, 6)
    again = SubjectTable()
    again.restate(made.pack(), 0)
    assert not again.by_id(fresh.id).is_unwritten


def test_a_removal_that_is_cut_short_is_refused() -> None:
    body = table(orders=5).pack_removal([table(orders=5).by_id(1)])
    with pytest.raises(RemoteProtocolError):
        subjects.unpack_removal(body[:8])
    with pytest.raises(RemoteProtocolError):
        subjects.unpack_removal(b"\xff" + body[1:])


def test_introducing_looks_at_no_other_subject() -> None:
    class Counting(dict[int, object]):
        looks = 0

        def values(self):  # type: ignore[no-untyped-def]
            Counting.looks += 1
            return super().values()

    made = table(orders=5, bills=7)
    made._by_id = Counting(made._by_id)  # type: ignore[assignment]
    made.introduce(Subject("new"), 1_000)
    made.take_back(made.introduce(Subject("newer"), 1_000))
    assert Counting.looks == 0


def test_dead_letters_and_inboxes_are_known_by_their_subject() -> None:
    made = table(orders=0, bills=0)
    for name in ("dead:a:orders", "inbox:a:orders", "dead:b:dead:a:orders", "dead:a:bills"):
        made.introduce(Subject(name), 500)
    assert [str(each.name) for each in made.owned_by(ORDERS)] == [
        "dead:a:orders", "inbox:a:orders", "dead:b:dead:a:orders",
    ]  # fmt: skip
    removed(made, "dead:a:orders", end=1_000)
    assert [str(each.name) for each in made.owned_by(ORDERS)] == ["inbox:a:orders", "dead:b:dead:a:orders"]


# --- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["close", "kill", "crash", "checkpoint", "no checkpoint"])
@pytest.mark.parametrize("options", [SMALL, ROOMY])
def test_a_removed_subject_stays_removed(ending: str, options: StoreOptions) -> None:
    with World(options=options) as world:
        world.produce([b"one", b"two"])
        world.produce([b"bill"], BILLS, producer=2)
        remove(world, ORDERS)
        assert listed(world.store) == {"bills"}
        for _ in range(20):
            world.produce([b"x" * 500], BILLS, producer=2)
        if ending == "close":
            world.close()
        else:
            if ending == "checkpoint":
                world.checkpoint()
            world.crash() if ending == "crash" else world.kill()
            if ending == "no checkpoint":
                for name in world.disk.listing("checkpoints"):
                    world.disk.remove(f"checkpoints/{name}")
                for name in world.disk.listing("index"):
                    world.disk.remove(f"index/{name}")
        world.open()
        world.settle()
        assert listed(world.store) == {"bills"}
        assert messages(world.store, ORDERS) == {}
        assert len(messages(world.store, BILLS)) == 21
        world.sequences.pop(3, None)
        receipt = world.produce([b"new"], ORDERS, producer=3)
        assert receipt.first_sequence == 2
        assert messages(world.store, ORDERS) == {2: b"new"}
        views = world.store.messages.views
        assert set(views.entries._runs) <= {each.id for each in views.subjects}


def test_a_removal_that_a_power_cut_took_has_not_happened() -> None:
    with World() as world:
        world.produce([b"one"])
        state = world.store.messages.views.subjects.find(ORDERS)
        assert state is not None
        world.store.remove_subjects([state])
        world.crash()
        world.open()
        world.settle()
        assert messages(world.store) == {0: b"one"}
        world.produce([b"two"])
        assert messages(world.store) == {0: b"one", 1: b"two"}


def test_nobody_uses_a_subject_that_is_leaving() -> None:
    with World() as world:
        world.produce([b"one"])
        state = world.store.messages.views.subjects.find(ORDERS)
        assert state is not None
        world.store.remove_subjects([state])
        with pytest.raises(Refused) as sent:
            world.send([b"two"])
        with pytest.raises(Refused) as named:
            world.store.ensure_subject(ORDERS)
        for refused in (sent.value, named.value):
            assert refused.code is Code.BUSY
            assert refused.retry_after_ms
        world.settle()
        assert world.store.ensure_subject(ORDERS).id != state.id


def test_a_full_disk_undoes_a_removal_whole() -> None:
    with World(options=ROOMY) as world:
        world.produce([b"one"])
        state = world.store.messages.views.subjects.find(ORDERS)
        assert state is not None
        world.disk.publish("filler", [bytes(world.disk.free_bytes())])
        with suppress(Refused):
            world.store.remove_subjects([state])
        world.settle_undone()
        assert not state.is_shut
        assert messages(world.store) == {0: b"one"}


def test_one_rotten_record_does_not_undo_a_removal() -> None:
    with World(options=ROOMY) as world:
        world.produce([b"one"])
        world.produce([b"bill"], BILLS, producer=2)
        remove(world, ORDERS)
        first = world.store.messages.log.end
        remove_header = [each for each in _records(world) if each.kind == RecordKind.REMOVED]
        assert len(remove_header) == 2
        world.produce([b"more"], BILLS, producer=2)
        world.kill()
        for name in world.disk.listing("checkpoints"):
            world.disk.remove(f"checkpoints/{name}")
        data = bytearray(content(world.disk, FIRST_MESSAGES))
        data[remove_header[0].position + 90] ^= 1
        assert remove_header[1].end == first
        world.disk.publish(FIRST_MESSAGES, [bytes(data)])
        world.open()
        world.settle()
        assert listed(world.store) == {"bills"}


def _records(world: World) -> list[RecordHeader]:
    return [each.header for each in records_of(world.disk, FIRST_MESSAGES, world.store.messages.log.log_id)]


def test_a_stream_into_a_removed_subject_is_forgotten() -> None:
    with World() as world:
        world.produce([b"one"])
        remove(world, ORDERS)
        with pytest.raises(Refused) as refused:
            world.send([b"two"])
        assert refused.value.code is Code.UNKNOWN_PRODUCER
        world.sequences[1] = 0
        assert world.produce([b"again"]).first_sequence == 1
        world.reopen()
        world.produce([b"and on"])
        world.sequences[1] = 7
        with pytest.raises(Refused) as refused:
            world.send([b"gap"])
        assert refused.value.code is Code.SEQUENCE_GAP
        world.kill()
        for name in world.disk.listing("checkpoints"):
            world.disk.remove(f"checkpoints/{name}")
        world.open()
        world.sequences[1] = 2
        world.produce([b"to the end"])
        assert list(messages(world.store).values()) == [b"again", b"and on", b"to the end"]


def test_retention_takes_the_messages_of_a_removed_subject() -> None:
    with World() as world:
        world.produce([b"one"])
        remove(world, ORDERS)
        assert world.store.messages.views.subjects.is_removed(1)
        for _ in range(30):
            world.produce([b"x" * 1_000], BILLS, producer=2)
        while len(world.store.messages.log.segments) > 1:
            world.store._drop(world.store.messages.log.segments[0].base)
        assert not world.store.messages.views.subjects.is_removed(1)
        assert listed(world.store) == {"bills"}


def test_what_is_full_says_how_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUBJECTS_MAX", 1)
    with World() as world:
        world.produce([b"one"])
        with pytest.raises(Refused) as refused:
            world.store.ensure_subject(BILLS)
        assert refused.value.code is Code.BUSY
        assert "fairway subject remove" in refused.value.sentence
        remove(world, ORDERS)
        world.store.ensure_subject(BILLS)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_removed_messages_stay_away_and_all_others_stay(seed: int) -> None:
    """Sends, removals, checkpoints, power cuts and restarts in any order, against a model of what must be there."""
    rng = random.Random(seed)
    names = [Subject(f"s{number}") for number in range(4)]
    with World(seed, options=rng.choice([SMALL, ROOMY])) as world:
        stored: dict[Subject, dict[int, bytes]] = {}
        ever: dict[tuple[Subject, int], bytes] = {}
        producer = 10
        for step in range(40):
            name = rng.choice(names)
            deed = rng.choice(["send", "send", "send", "remove", "checkpoint", "crash", "kill", "reopen", "bare"])
            if deed == "send":
                producer += 1
                payload = f"{step}".encode() * rng.choice([1, 300])
                first = world.produce([payload], name, producer=producer).first_sequence
                assert (name, first) not in ever
                ever[name, first] = payload
                stored.setdefault(name, {})[first] = payload
            elif deed == "remove" and name in stored:
                remove(world, name)
                del stored[name]
            elif deed == "checkpoint":
                world.checkpoint()
            elif deed == "reopen":
                world.reopen()
            elif deed in {"crash", "kill", "bare"}:
                world.crash() if deed == "crash" else world.kill()
                if deed == "bare":
                    for folder in ("checkpoints", "index"):
                        for each in world.disk.listing(folder):
                            world.disk.remove(f"{folder}/{each}")
                world.open()
                world.settle()
            assert listed(world.store) == {str(each) for each in stored}
            for each in names:
                assert messages(world.store, each) == stored.get(each, {})


def test_tools_report_neither_the_subject_nor_damage() -> None:
    with World(options=SMALL) as world:
        world.produce([b"one"])
        world.produce([b"bill"], BILLS, producer=2)
        remove(world, ORDERS)
        world.produce([b"bill"], BILLS, producer=2)
        world.close()
        found = survey(world.disk, verify=True)
        assert [each.name for each in found.subjects] == ["bills"]
        assert found.is_sound
