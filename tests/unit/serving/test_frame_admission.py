"""Room for frames: who is read, who waits in line, who is sent away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fairway import limits
from fairway.limits import KIB, MIB
from fairway.serving.read_limits import CROWDED, OLDEST, OVERDUE, STALLED, FrameAdmission
from fairway.simulation import Simulation, simulate

ROOM = 8 * MIB
STALL_S = limits.FRAME_STALL_MS / 1_000
WAIT_S = limits.FRAME_WAIT_MS / 1_000


class Senders:
    """Names that send parts of frames, each as much as it is told to."""

    def __init__(self, world: Simulation) -> None:
        self.parts: dict[str, int] = {}
        self.deaf: set[str] = set()  # those whom we do not read, for a reason of our own
        self.gone_on: list[str] = []
        self.dismissed: dict[str, str] = {}
        self.admission: FrameAdmission[str] = FrameAdmission(
            ROOM,
            world.clock,
            world.loop.call_later,
            weigh=lambda name: self.parts.get(name, 0),
            listens=lambda name: name not in self.deaf,
            go_on=self.gone_on.append,
            dismiss=self._dismiss,
        )

    def _dismiss(self, name: str, why: str) -> None:
        self.dismissed[name] = why
        self.parts[name] = 0

    def begin(self, name: str, frame_bytes: int, part: int = 64 * KIB) -> bool:
        """Whether it is read on."""
        self.parts[name] = part
        return self.admission.note(name, frame_bytes, anew=True)

    def send(self, name: str, frame_bytes: int) -> bool:
        return self.admission.note(name, frame_bytes, anew=False)

    def finish(self, name: str) -> None:
        self.parts[name] = 0
        self.admission.note(name, 0, anew=True)


def play(story: Callable[[Senders], object]) -> None:
    async def scenario(world: Simulation) -> None:
        told = story(Senders(world))
        if asyncio.iscoroutine(told):
            await told

    simulate(scenario, 1)


def test_large_frames_have_their_turn_one_after_the_other_in_the_order_in_which_they_came() -> None:
    def story(senders: Senders) -> None:
        names = [f"s{number}" for number in range(12)]
        assert [senders.begin(name, 5 * MIB) for name in names] == [True] + [False] * 11
        assert senders.admission.granted_bytes == 5 * MIB
        for done, name in enumerate(names):
            assert senders.gone_on == names[1 : done + 1]
            assert senders.send(name, 5 * MIB)
            senders.finish(name)
        assert not senders.dismissed
        assert (senders.admission.taken_bytes, senders.admission.waiting) == (0, 0)

    play(story)


def test_a_smaller_one_does_not_overtake_the_first_in_line() -> None:
    def story(senders: Senders) -> None:
        assert senders.begin("first", 5 * MIB)
        assert not senders.begin("large", 5 * MIB)
        assert not senders.begin("less", MIB), "there would be room for it"
        senders.finish("first")
        assert senders.gone_on == ["large", "less"]

    play(story)


def test_one_that_is_as_large_as_all_the_room_is_read_alone() -> None:
    def story(senders: Senders) -> None:
        assert senders.begin("a", ROOM)
        assert not senders.begin("b", MIB)
        senders.finish("a")
        assert not senders.begin("c", ROOM)
        senders.finish("b")
        assert senders.gone_on == ["b", "c"]

    play(story)


def test_small_frames_never_wait() -> None:
    def story(senders: Senders) -> None:
        assert senders.begin("large", ROOM)
        assert not senders.begin("another", ROOM)
        for number in range(100):
            assert senders.begin(f"small-{number}", limits.LARGE_FRAME_BYTES, part=KIB)
            assert senders.begin(f"header-{number}", 0, part=8)
        assert not senders.dismissed

    play(story)


def test_parts_of_small_frames_have_what_grants_leave_and_the_oldest_makes_room() -> None:
    def story(senders: Senders) -> None:
        part = 200 * KIB
        names = [f"small-{number}" for number in range(20)]
        for name in names:
            assert senders.begin(name, limits.LARGE_FRAME_BYTES, part=part)
        assert not senders.dismissed
        assert senders.begin("large", ROOM)
        assert list(senders.dismissed.values()) == [OLDEST] * len(senders.dismissed)
        assert list(senders.dismissed) == names[: len(senders.dismissed)]
        assert senders.admission.taken_bytes <= ROOM + ROOM // 8
        assert 0 < len(senders.dismissed) < 20

    play(story)


def test_who_stands_still_is_sent_away_when_another_waits_and_not_before() -> None:
    async def story(senders: Senders) -> None:
        assert senders.begin("still", ROOM)
        await asyncio.sleep(10 * STALL_S)
        assert not senders.dismissed
        assert senders.begin("next", ROOM)
        assert senders.dismissed == {"still": STALLED}
        assert not senders.begin("third", ROOM)
        for _ in range(10):
            await asyncio.sleep(STALL_S / 2)
            senders.send("next", ROOM)
        assert list(senders.dismissed) == ["still"], "who goes on sending goes on"
        await asyncio.sleep(STALL_S + 0.1)
        assert senders.gone_on == ["next", "third"]
        assert senders.admission.evictions == 2

    play(story)


def test_whose_silence_is_ours_does_not_stand_still() -> None:
    async def story(senders: Senders) -> None:
        senders.deaf.add("paused")
        assert senders.begin("paused", ROOM)
        assert not senders.begin("next", ROOM)
        await asyncio.sleep(2 * STALL_S)
        assert not senders.dismissed
        senders.deaf.clear()
        await asyncio.sleep(2 * STALL_S)
        assert senders.dismissed == {"paused": STALLED}

    play(story)


def test_a_sender_that_trickles_has_an_end_too() -> None:
    async def story(senders: Senders) -> None:
        assert senders.begin("trickle", ROOM)
        assert not senders.begin("next", ROOM)
        most_s = limits.FRAME_GRACE_MS / 1_000 + ROOM / limits.FRAME_BYTES_PER_S_MIN
        for _ in range(round(most_s / STALL_S) + 2):
            if "trickle" not in senders.dismissed:
                senders.send("trickle", ROOM)
                await asyncio.sleep(STALL_S / 2)
                senders.send("trickle", ROOM)
                await asyncio.sleep(STALL_S / 2)
        assert senders.dismissed == {"trickle": STALLED}
        assert senders.gone_on == ["next"]

    play(story)


def test_the_line_is_bounded_in_number_and_in_time() -> None:
    async def story(senders: Senders) -> None:
        assert senders.begin("busy", ROOM)
        for number in range(limits.LARGE_FRAMES_WAITING_MAX):
            assert not senders.begin(f"waits-{number}", ROOM)
        assert not senders.begin("late", ROOM)
        assert senders.dismissed == {"late": CROWDED}
        senders.deaf.add("busy")
        await asyncio.sleep(WAIT_S / 2)
        senders.begin("newer", ROOM)
        senders.admission.forget("newer")
        assert senders.admission.waiting <= limits.LARGE_FRAMES_WAITING_MAX

    play(story)


def test_who_waits_for_too_long_is_told_to_come_back() -> None:
    async def story(senders: Senders) -> None:
        senders.deaf.add("slow")
        assert senders.begin("slow", 64 * ROOM)  # so large that its own time is longer than anybody waits
        assert not senders.begin("next", ROOM)
        await asyncio.sleep(WAIT_S + 0.1)
        assert senders.dismissed == {"next": OVERDUE}

    play(story)


def test_who_is_gone_makes_room() -> None:
    def story(senders: Senders) -> None:
        assert senders.begin("a", ROOM)
        assert not senders.begin("b", ROOM)
        assert not senders.begin("c", ROOM)
        senders.admission.forget("b")
        senders.admission.forget("a")
        assert senders.gone_on == ["c"]
        senders.admission.forget("c")
        assert senders.admission.taken_bytes == 0

    play(story)
