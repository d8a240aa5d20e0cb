"""Pages, counts and stretches of what is pending."""

from __future__ import annotations

import pytest

from fairway import batch
from fairway.delay import pending_messages
from fairway.delay.pending_messages import BrowsedPage, Filter
from fairway.errors import Code, Refused
from tests.unit.delay.helpers import BILLS, DAY_MS, HOUR_MS, ORDERS, World


def pages(world: World, which: Filter, items_max: int) -> list[BrowsedPage]:
    found = [world.run(world.engine.page(which, "", items_max))]
    for _ in range(1_000):
        if not found[-1].next:
            return found
        found.append(world.run(world.engine.page(which, found[-1].next, items_max)))
    raise AssertionError("a listing ends")


def test_pages_hold_each_message_once_by_due_time() -> None:
    with World() as world:
        dues = [world.now_ms + HOUR_MS + number * 7_919 % 50 * DAY_MS for number in range(60)]
        ids = world.schedule([b"x" * number for number in range(60)], dues, keys=[f"k-{n}" for n in range(60)])
        world.settle()
        found = [each for page in pages(world, world.engine.filter(), 7) for each in page.messages]
        assert [each.due_ms for each in found] == sorted(dues)
        assert {each.id: (each.key, each.size_bytes) for each in found} == {
            each: (f"k-{number}", number) for number, each in enumerate(ids)
        }


def test_what_changes_between_two_pages_hides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_messages, "_WINDOW_ROWS", 8)
    with World() as world:
        ids = world.schedule([b"x"] * 40, [world.now_ms + DAY_MS] * 40)
        world.settle()
        page = world.run(world.engine.page(world.engine.filter(), "", 5))
        seen = [each.id for each in page.messages]
        world.engine.cancel(ids[5])
        world.engine.reschedule(ids[7], world.now_ms + 300 * DAY_MS)
        while page.next:
            page = world.run(world.engine.page(world.engine.filter(), page.next, 5))
            seen += [each.id for each in page.messages]
        assert sorted(seen) == sorted(each for each in ids if each != ids[5])


def test_a_prefix_is_looked_for_with_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_messages, "_LOOKED_AT_MAX", 10)
    monkeypatch.setattr(pending_messages, "_LOOK_ROWS", 4)
    with World() as world:
        keys = [None if n % 3 == 0 else f"{'eu' if n > 35 else 'us'}-{n}" for n in range(40)]
        world.schedule([b"x"] * 40, [world.now_ms + DAY_MS + n for n in range(40)], keys=keys)
        world.settle()
        listing = pages(world, world.engine.filter(key_prefix="eu-"), 2)
        assert [each.key for page in listing for each in page.messages] == ["eu-37", "eu-38"]
        assert listing[0].messages == []  # so many keys were looked at, and there are more
        assert world.run(world.engine.tally(world.engine.filter(key_prefix="eu-"))).count == 2


def test_a_page_comes_with_its_messages() -> None:
    with World() as world:
        due_ms = world.now_ms + DAY_MS
        ids = world.schedule([b"1", b"2"], [due_ms, due_ms + 2], keys=["a", None])
        ids += world.schedule([b"3"], [due_ms + 1], subject=BILLS, producer=2)
        world.settle()
        page = world.run(world.engine.page(world.engine.filter()))
        found = [(subject, batch.decode(data)) for subject, data in world.run(world.engine.batches_of(page))]
        assert [subject for subject, _ in found] == [ORDERS, BILLS, ORDERS]
        assert [opened.payloads for _, opened in found] == [[b"1"], [b"3"], [b"2"]]
        assert [opened.ids() for _, opened in found] == [[ids[0]], [ids[2]], [ids[1]]]
        assert [opened.due_times_ms() for _, opened in found] == [[due_ms], [due_ms + 1], [due_ms + 2]]


def test_a_page_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_messages, "_PAGE_BYTES_MAX", 100)
    with World() as world:
        world.schedule([b"x" * 60, b"y" * 200, b"z" * 60, b"z" * 40], [world.now_ms + DAY_MS + n for n in range(4)])
        world.settle()
        listing = pages(world, world.engine.filter(), 10)
        assert [[each.size_bytes for each in page.messages] for page in listing] == [[60], [200], [60, 40]]


def test_a_count_comes_by_stretches_and_too_many_are_refused() -> None:
    with World() as world:
        start_ms = world.now_ms // DAY_MS * DAY_MS
        world.schedule([b"x"] * 4, [start_ms + day * DAY_MS for day in (2, 2, 4, 400)])
        world.settle()
        assert world.run(world.engine.tally(world.engine.filter())).count == 4
        found = world.run(world.engine.tally(world.engine.filter(ORDERS, to_ms=start_ms + 9 * DAY_MS), DAY_MS))
        assert found.stretches == [(start_ms + 2 * DAY_MS, 2), (start_ms + 4 * DAY_MS, 1)]
        world.schedule([b"x"] * 4_000, [start_ms + DAY_MS + n for n in range(4_000)])
        world.schedule([b"x"] * 4_000, [start_ms + DAY_MS + 10_000 + n for n in range(4_000)])
        world.schedule([b"x"] * 4_000, [start_ms + DAY_MS + 20_000 + n for n in range(4_000)])
        with pytest.raises(Refused, match="wider") as caught:
            world.run(world.engine.tally(world.engine.filter(), 1))
        assert caught.value.code is Code.BAD_REQUEST


@pytest.mark.parametrize("cursor", ["x", "1.2", "1.2.-3", f"1.2.{1 << 64}", "9" * 21 + ".1.1"])
def test_a_cursor_that_is_none_is_refused(cursor: str) -> None:
    with World() as world:
        world.schedule([b"x"], [world.now_ms + DAY_MS])
        world.settle()
        with pytest.raises(Refused, match="cursor") as caught:
            world.run(world.engine.page(world.engine.filter(), cursor))
        assert caught.value.code is Code.BAD_REQUEST
