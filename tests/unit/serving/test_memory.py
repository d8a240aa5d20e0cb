"""Memory that many share: who may grow, who pays, what is left for others."""

from __future__ import annotations

import random

from fairway.serving.memory_plan import MemoryAccount, SharedMemory, show
from fairway.serving.metrics import MetricsText

RESERVE = 10


def _memory(bytes_max: int = 8_000) -> SharedMemory[str, str]:
    return SharedMemory(bytes_max, RESERVE)


def test_a_holder_may_have_as_much_as_is_left_beside_it() -> None:
    memory = _memory()
    memory.note("a", 0)
    grown = memory.room("a")
    memory.note("a", grown)
    assert grown == 7_000 - RESERVE, "an eighth is kept"
    assert memory.room("a") == 0
    memory.note("b", 0)
    assert memory.room("b") == 0


def test_half_is_left_when_a_holder_has_taken_all_it_may_in_small_steps() -> None:
    memory = _memory()
    held = 0
    memory.note("a", 0)
    while memory.room("a") >= 10:
        held += 10
        memory.note("a", held)
    memory.note("b", 0)
    assert memory.room("b") > 3_000


def test_many_holders_of_one_payer_get_no_more_than_one() -> None:
    memory = _memory()
    held = dict.fromkeys((f"group {number}" for number in range(50)), 0)
    for _ in range(1_000):
        for holder in held:
            memory.note(holder, held[holder])
            memory.charge(holder, "connection")
            if memory.room(holder, "connection") >= 10:
                held[holder] += 10
                memory.note(holder, held[holder])
    memory.note("good", 0)
    assert sum(held.values()) <= 3_500
    assert memory.room("good", "another") > 2_500


def test_what_a_payer_is_charged_for_goes_with_the_one_who_made_it_grow() -> None:
    memory = _memory()
    memory.note("a", 1_000)
    memory.charge("a", "ann")
    before = memory.room("b", "ann")
    memory.charge("a", "ben")
    assert memory.room("b", "ann") == before + 1_000 + RESERVE
    memory.note("a", 1_500)
    memory.forget_payer("ben")
    assert memory.room("b", "ben") == memory.room("b")
    memory.forget("a")
    assert memory.taken_bytes == 0


def test_what_is_kept_is_for_those_who_begin() -> None:
    memory = _memory()
    memory.note("a", 7_200)
    assert memory.room("b") == 0
    assert memory.room("b", is_small=True) == 800 - RESERVE
    assert memory.has_room_for_another(100)
    memory.note("b", 790 - RESERVE)
    assert not memory.has_room_for_another(1)


def test_the_total_is_the_sum_of_the_holders_whatever_happens() -> None:
    rng = random.Random(7)
    memory, sizes, paid = _memory(), dict[str, int](), dict[str, str]()
    for _ in range(5_000):
        holder, payer = f"h{rng.randrange(8)}", f"p{rng.randrange(4)}"
        match rng.randrange(5):
            case 0 | 1:
                sizes[holder] = rng.randrange(500)
                memory.note(holder, sizes[holder])
            case 2 if holder in sizes:
                paid[holder] = payer
                memory.charge(holder, payer)
            case 3:
                sizes.pop(holder, None)
                paid.pop(holder, None)
                memory.forget(holder)
            case 4:
                memory.forget_payer(payer)
                paid = {each: by for each, by in paid.items() if by != payer}
        assert memory.taken_bytes == sum(sizes.values()) + RESERVE * len(sizes)
        for each in ("p0", "p1", "p2", "p3"):
            owed = sum(sizes[one] + RESERVE for one, by in paid.items() if by == each)
            assert memory.room("new", each) == max(7_000 - memory.taken_bytes - owed, 0)


def test_accounts_are_shown_with_their_bounds() -> None:
    out = MetricsText()
    show(out, [MemoryAccount("groups", 10, lambda: 4), MemoryAccount("process", 0, lambda: 5)])
    lines = out.text().splitlines()
    assert 'fairway_memory_bytes{what="groups"} 4' in lines
    assert 'fairway_memory_bytes_max{what="groups"} 10' in lines
    assert 'fairway_memory_bytes{what="process"} 5' in lines
    assert 'fairway_memory_bytes_max{what="process"} 0' not in lines
