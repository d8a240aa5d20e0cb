"""The table of subjects: names, numbers, and sequences that are never used twice."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.errors import InvariantViolated, RemoteProtocolError
from fairway.names import Subject
from fairway.storage import subjects
from fairway.storage.record import RecordHeader
from fairway.storage.segment import STALE, Damage
from fairway.storage.subjects import SubjectTable
from tests.unit.storage.helpers import BILLS, ORDERS


def table(**next_sequences: int) -> SubjectTable:
    made = SubjectTable()
    for position, (name, next_sequence) in enumerate(next_sequences.items()):
        made.advance(made.introduce(Subject(name), position * 100).id, next_sequence)
    return made


def again(of: SubjectTable) -> SubjectTable:
    restated = SubjectTable()
    restated.restate(of.pack(), 0)
    return restated


def test_a_table_explains_itself() -> None:
    assert list(subjects.unpack(table(orders=5, bills=7).pack())) == [(1, ORDERS, 5), (2, BILLS, 7)]


def test_a_subject_is_introduced_once() -> None:
    with pytest.raises(InvariantViolated):
        table(orders=0).introduce(ORDERS, 0)


def test_what_is_known_only_moves_forward() -> None:
    made = table(orders=5)
    made.restate(table(orders=3).pack(), 0)
    assert made.by_id(1).next_sequence == 5
    made.restate(table(orders=9).pack(), 0)
    assert made.by_id(1).next_sequence == 9


def test_a_table_of_a_position_knows_only_what_was_there() -> None:
    made = table(orders=5, bills=7)
    assert list(subjects.unpack(made.pack(upto=100, rewound={1: 2}))) == [(1, ORDERS, 2)]


def test_a_cut_forgets_who_came_later() -> None:
    made = table(orders=5, bills=7)
    made.cut(100)
    assert made.find(BILLS) is None
    assert made.find(ORDERS) is not None


def lost(start: int = 0, end: int = 100, why: str = "unreadable header", header: RecordHeader | None = None) -> Damage:
    return Damage(start, end, why, header)


def test_sequences_of_a_lost_span_are_skipped_for_everybody() -> None:
    made = table(orders=5)
    made.skip_lost(lost())
    assert made.by_id(1).next_sequence >= 5 + 4_096
    assert made.introduce(BILLS, 0).next_sequence >= 4_096


def test_a_lost_body_is_skipped_exactly() -> None:
    made = table(orders=5, bills=7)
    made.skip_lost(lost(why="damaged body", header=RecordHeader(1, 1, 0, 0, 1, 5, 0, 3, 8, 0)))
    assert [each.next_sequence for each in made] == [8, 7]


def test_a_stale_header_says_nothing_of_what_was_lost() -> None:
    made = table(orders=5)
    made.skip_lost(lost(why=STALE, header=RecordHeader(1, 1, 0, 0, 1, 2, 0, 1, 8, 0)))
    assert made.by_id(1).next_sequence >= 5 + 4_096


def test_what_was_skipped_is_remembered() -> None:
    """Found in review: a checkpoint forgot the floor, and a lost subject that came back began at 0 again."""
    made = table(orders=5)
    made.skip_lost(lost())
    floor = made.introduce(Subject("x"), 0).next_sequence
    new = again(made).introduce(BILLS, 0)
    assert new.next_sequence >= floor
    assert new.id > 2


def test_a_nameless_subject_gets_its_name_back() -> None:
    made = SubjectTable()
    made.advance(1, 20)
    assert made.by_id(1).nameless
    remembered = again(made)
    assert remembered.by_id(1).nameless
    remembered.restate(table(orders=3).pack(), 0)
    found = remembered.find(ORDERS)
    assert found is not None
    assert (found.id, found.next_sequence, found.nameless) == (1, 20, False)


def test_a_new_subject_may_be_the_one_whose_name_was_lost() -> None:
    """Found in review: it began at 0, and a sequence named two payloads."""
    made = SubjectTable()
    made.advance(1, 20)
    assert made.introduce(ORDERS, 0).next_sequence >= 20


def by_name(made: SubjectTable) -> dict[str, int]:
    """Every subject, as it is found by its own name."""
    found = {str(each.name): made.find(each.name) for each in made}
    return {name: each.id for name, each in found.items() if each is not None}


def test_a_subject_of_a_user_is_not_taken_for_one_whose_name_is_lost() -> None:
    """Early versions let users have such names: both were one subject, and whose messages were whose nobody knew."""
    made = SubjectTable()
    made.restate(table(**{"nameless-2": 5}).pack(), 0)
    made.advance(2, 20)
    assert by_name(made) == {"nameless-2": 1, "nameless-2-1": 2}
    assert (made.by_id(1).nameless, made.by_id(2).nameless) == (False, True)
    assert by_name(again(made)) == by_name(made)


def test_a_name_that_is_stated_later_is_taken_from_a_subject_whose_own_is_lost() -> None:
    made = SubjectTable()
    made.advance(2, 20)
    made.advance(3, 30)
    made.by_id(2).ceiling = 99
    made.restate(table(**{"nameless-2": 5}).pack(), 0)
    assert by_name(made) == {"nameless-2": 1, "nameless-2-1": 2, "nameless-3": 3}
    assert [(each.next_sequence, each.ceiling) for each in made] == [(20, 99), (30, 0), (5, 0)]
    made.cut(0)
    assert by_name(made) == {}


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=12))
def test_every_subject_is_found_by_its_name_whatever_is_lost(steps: list[tuple[bool, int]]) -> None:
    made = SubjectTable()
    for is_stated, number in steps:
        if is_stated:
            name = Subject.nameless(number % 3 + 1).encode()  # that of another number
            entry = subjects._ENTRY.pack(number, len(name), 1) + name
            made.restate(subjects._HEAD.pack(1, number + 1, 0) + entry, 0)
        else:
            made.advance(number, 1)
        assert sorted(by_name(made).values()) == sorted(each.id for each in made)


def test_a_name_that_is_cut_short_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError):
        list(subjects.unpack(table(**{"a-rather-long-name": 1}).pack()[:-8]))


@given(st.binary(max_size=80))
def test_any_other_bytes_are_an_error_of_our_own_family(body: bytes) -> None:
    with suppress(RemoteProtocolError):
        list(subjects.unpack(body))
