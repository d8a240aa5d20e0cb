"""The order of subjects: as sorting would have it, whatever is added, renamed or cut off meanwhile."""

from __future__ import annotations

import random

from fairway.broker import descriptions
from fairway.broker.descriptions import SubjectIndex
from fairway.names import Subject
from fairway.storage.subjects import SubjectTable


def add(table: SubjectTable, *names: str, at: int = 0) -> None:
    for name in names:
        table.introduce(Subject(name), at)


def refreshed(order: SubjectIndex) -> int:
    """How many steps it took."""
    steps = 1
    while not order.refresh():
        steps += 1
    return steps


def listed(order: SubjectIndex) -> list[str]:
    refreshed(order)
    names = []
    name = order.following("")
    while name is not None:
        names.append(name)
        name = order.following(name)
    return names


def test_names_come_in_order_however_they_were_added() -> None:
    table, rng = SubjectTable(), random.Random(1)
    order = SubjectIndex(table)
    known: set[str] = set()
    for number in (1, 3, 70, 5_000, 2, 200):
        new = {f"s{rng.randrange(10**9)}" for _ in range(number)} - known
        add(table, *sorted(new, key=lambda name: name[::-1]))
        known |= new
        assert listed(order) == sorted(known)


def test_many_new_names_are_taken_in_step_by_step() -> None:
    table = SubjectTable()
    order = SubjectIndex(table)
    add(table, *(f"s{number}" for number in range(10_001)))
    assert refreshed(order) == 10_001 // descriptions._NAMES_PER_STEP + 1
    assert refreshed(order) == 1


def test_inboxes_are_left_out() -> None:
    table = SubjectTable()
    add(table, "orders", "inbox:g:orders", "dead:g:orders")
    assert listed(SubjectIndex(table)) == ["dead:g:orders", "orders"]


def test_a_name_is_followed_by_the_next_or_by_itself() -> None:
    table = SubjectTable()
    add(table, "b", "d")
    order = SubjectIndex(table)
    assert [order.following(name) for name in ("a", "b", "c", "d")] == ["b", "d", "d", None]
    assert [order.following(name, is_included=True) for name in ("a", "b", "c", "d")] == ["b", "b", "d", "d"]


def test_plain_names_skip_those_of_dead_letters() -> None:
    table = SubjectTable()
    plain = ["a", "dead", "dead-x", "deae", "z"]
    add(table, *plain, *(f"dead:g:s{number}" for number in range(100)))
    order = SubjectIndex(table)
    names = sorted(plain)
    for number in range(1, 7):
        for after in ("", *names, "dead:g:s5", "zz"):
            expected = [name for name in names if name > after][:number]
            assert order.plain_after(after, number) == expected, (after, number)


def test_what_was_cut_off_is_forgotten_although_others_came_in_its_place() -> None:
    table = SubjectTable()
    add(table, "a", "b", at=1)
    add(table, "c", at=9)
    order = SubjectIndex(table)
    table.cut(9)
    add(table, "d", at=9)
    assert order.find("c") is None
    assert listed(order) == ["a", "b", "d"]
    table.cut(1)
    assert listed(order) == []
