"""A group as slow and plain as can be: one record per message. What `fairway.groups` must agree with."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fairway.groups import AfterDead, Coalesce, GroupConfig, Handout, Order, Range
from fairway.groups.lots import Lot

MS_NS = 1_000_000


@dataclass
class Held:
    """One message below the cursor that is neither done nor dead."""

    place: str  # held, stock, dying; parked behind another of its key
    attempt: int
    owner: str = ""
    lot: int = 0
    number: int = 0
    handed_ns: int = 0
    due_ms: int = 0
    key: int = 0  # so far as the group knows it: it does not, from before it was ordered
    failed: tuple[tuple[int, int, str], ...] = ()  # attempts that did: number, when, with whom


@dataclass
class Membership:
    renewed_ns: int
    version: int
    arrived: int = 0


@dataclass
class Model:
    """The same group. Every sequence below `cursor` is in `open`, `done`, `dead`, or was skipped."""

    config: GroupConfig
    cursor: int = 0
    recovered_end: int = 0
    is_paused: bool = False
    paused: set[str] = field(default_factory=set)
    members: dict[str, Membership] = field(default_factory=dict)
    open: dict[int, Held] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    halted: set[int] = field(default_factory=set)  # keys
    is_mixed: bool = False
    is_halted: bool = False  # all of a group in strict order
    resting: dict[int, int] = field(default_factory=dict)  # keys, until when
    now_ms: int = 0
    declined_count: int = 0
    hungry: set[str] = field(default_factory=set)  # members whose last pull found nothing

    @property
    def is_keyed(self) -> bool:
        return self.config.is_keyed

    @property
    def is_strict(self) -> bool:
        return self.config.order is Order.STRICT

    def ready_strictly(self, now_ms: int) -> set[int]:
        """From the first that is open and in nobody's hands, up to the first that must wait."""
        found = set()
        for at, each in sorted(self.open.items()):
            if each.place == "dying" or (each.place == "stock" and each.due_ms > now_ms):
                break
            if each.place == "stock":
                found.add(at)
        return set() if self.is_halted else found

    @property
    def in_flight(self) -> bool:
        return any(each.place != "parked" for each in self.open.values())

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def held_by(self, name: str) -> dict[int, Held]:
        return {at: each for at, each in self.open.items() if each.place == "held" and each.owner == name}

    def ready(self, now_ms: int) -> set[int]:
        ready = {at for at, each in self.open.items() if each.place == "stock" and each.due_ms <= now_ms}
        return {at for at in ready if self.open[at].key not in self.halted and not self.follows(at)}

    def out_of(self, key: int) -> list[int]:
        """Messages of the key that are not parked."""
        return sorted(at for at, each in self.open.items() if key and each.key == key and each.place != "parked")

    def parked_of(self, key: int) -> list[int]:
        return sorted(at for at, each in self.open.items() if key and each.key == key and each.place == "parked")

    @property
    def behind_count(self) -> int:
        """Messages that are parked, or out and not the first of their keys that are."""
        keys = [each.key for each in self.open.values() if each.key and each.place != "parked"]
        return sum(each.place == "parked" for each in self.open.values()) + len(keys) - len(set(keys))

    def follows(self, at: int) -> bool:
        """Whether another of its key is out that comes before it."""
        message = self.open[at]
        return message.key != 0 and message.place != "parked" and self.out_of(message.key)[0] < at

    def unarrived(self, name: str) -> set[int]:
        arrived = self.members[name].arrived
        return {each.number for each in self.held_by(name).values() if each.number > arrived}

    def give_up_loose(self, name: str, number: int) -> None:
        """Of a response that did not arrive: what follows a message that is not this member's any more is parked."""
        for at, message in sorted(self.held_by(name).items()):
            before = [self.open[each] for each in self.out_of(message.key) if each < at]
            is_loose = any((each.owner, each.attempt) != (name, 1) for each in before)
            if self.is_keyed and message.number == number and message.attempt == 1 and is_loose:
                self.fail(at, counts=False, due_ms=0)

    # --- membership

    def hear(self, name: str, arrived: int, now_ns: int) -> None:
        member = self.members[name]
        member.renewed_ns = now_ns
        member.arrived = max(member.arrived, arrived)

    def join(self, name: str, arrived: int, now_ns: int) -> None:
        if name in self.members and not arrived and self.held_by(name):
            self.part(name, counts=True)
        self.members[name] = Membership(now_ns, self.config.version, arrived)

    def part(self, name: str, *, counts: bool) -> None:
        for at in self.held_by(name):
            self.fail(at, counts=counts, due_ms=0)
        del self.members[name]
        self.hungry.discard(name)

    def fail(self, at: int, *, counts: bool, due_ms: int, is_said: bool = False) -> None:
        """What follows another has not been begun, unless its consumer says so: that is no attempt."""
        message = self.open[at]
        failed = self.failed_now(message) if counts else message.failed
        if message.attempt == 1 and not is_said and self.follows(at):
            self.open[at] = Held("parked", 1, key=message.key)
        elif counts and message.attempt >= self.config.attempts_max:
            self.open[at] = Held("dying", message.attempt, key=message.key, failed=failed)
        else:
            attempt = message.attempt + counts
            self.open[at] = Held("stock", attempt, due_ms=due_ms, key=message.key, failed=failed)

    def failed_now(self, message: Held) -> tuple[tuple[int, int, str], ...]:
        return (*message.failed, (message.attempt, self.now_ms, message.owner))

    def expire(self, now_ns: int) -> None:
        for name, member in list(self.members.items()):
            if member.renewed_ns <= now_ns - self.config.lease_ms * MS_NS:
                self.part(name, counts=True)
        limit_ms = self.config.max_handling_ms
        for at, message in self.open.items():
            is_held = message.place == "held"
            if limit_ms is not None and is_held and message.handed_ns <= now_ns - limit_ms * MS_NS:
                self.fail(at, counts=True, due_ms=0)

    def begin_life(self, end: int, now_ns: int) -> None:
        self.recovered_end = end
        self.hungry.clear()
        for member in self.members.values():
            member.renewed_ns = now_ns
            member.arrived = 0
        for message in self.open.values():
            message.handed_ns = now_ns

    # --- handing out and settling

    def skip(self, to: int) -> None:
        self.skipped.update(range(self.cursor, to))
        self.cursor = max(self.cursor, to)

    def run_max(self, asked: int) -> int:
        """Messages behind the first of a key that go out with it, at most."""
        config = self.config
        is_plain = config.order is Order.KEY and config.coalesce is Coalesce.NONE and not config.rate_per_key
        return asked - 1 if is_plain and config.max_handling_ms is None else 0

    def led(self, heads: Iterable[int]) -> set[int]:
        """Keys that may have a run behind these."""
        open_ = [self.open[at] for at in heads if self.open[at].attempt == 1]
        return {each.key for each in open_ if len(self.out_of(each.key)) == 1}

    def extendable(self, name: str, most: int) -> dict[int, int]:
        """Keys that this member has all to itself, and how many more may go out behind what it has."""
        found = {}
        for key in {each.key for each in self.open.values()} - {0} - self.halted:
            out, parked = self.out_of(key), self.parked_of(key)
            is_its = all((self.open[at].owner, self.open[at].attempt) == (name, 1) for at in out)
            if out and is_its and all(at > out[-1] for at in parked):
                found[key] = max(most - len(out) + 1, 0)
        return found

    def grow(self, runs: dict[int, int], rooms: Mapping[int, int], room: int) -> int:
        """Runs get longer by what is parked, in equal shares; how many messages that is."""
        ends = {key: min(most, len(self.parked_of(key))) for key, most in rooms.items()}
        before = sum(runs.values())
        while room > 0 and (growing := [key for key in ends if ends[key] > runs.get(key, 0)]):
            if room < len(growing):  # the oldest
                growing = sorted(growing, key=lambda key: self.parked_of(key)[runs.get(key, 0)])[:room]
            share = room // len(growing)
            for key in growing:
                longer = min(share, ends[key] - runs.get(key, 0))
                runs[key] = runs.get(key, 0) + longer
                room -= longer
        return sum(runs.values()) - before

    def choose_by_key(
        self,
        keys: Mapping[int, int],
        name: str,
        again: set[int],
        fresh: range,
        most: int,
        asked: int,
        *,
        extends: bool,
    ) -> tuple[set[int], set[int], set[int], dict[int, int], dict[int, int]]:
        """Fresh messages that go out as heads, are parked, are declined; how many of each key go out behind others so
        far, and how many may."""
        run_max = self.run_max(asked)
        may_extend = extends and run_max > 0 and not self.hungry - {name}
        rooms = self.extendable(name, run_max) if may_extend else {}
        rooms |= dict.fromkeys(self.led(again), run_max)
        behind_max = most if may_extend else most // 2
        runs: dict[int, int] = {}
        grown = self.grow(runs, rooms, min(behind_max, most - len(again)))
        room = most - len(again) - grown
        chosen, parked, declined, followed = self.choose(
            keys, fresh.start, fresh.stop, room, run_max, behind_max - grown, rooms
        )
        runs |= {key: followed.count(key) for key in followed}
        return chosen, parked, declined, runs, rooms

    def note_hunger(self, name: str, *, is_hungry: bool) -> None:
        if self.is_keyed:
            (self.hungry.add if is_hungry else self.hungry.discard)(name)

    def check_runs(self, following: Iterable[int], name: str) -> None:
        """The promise about runs: what comes before them and is not over is in the same hands, and has not failed."""
        for at in following:
            before = [self.open[each] for each in self.out_of(self.open[at].key) if each < at]
            assert all((each.owner, each.attempt) == (name, 1) for each in before), (
                f"{at} goes to {name} behind {before}"
            )
            assert not any(each < at for each in self.parked_of(self.open[at].key)), f"{at} overtakes"

    def choose(
        self,
        keys: Mapping[int, int],
        first: int,
        end: int,
        most: int,
        run_max: int,
        behind_max: int,
        rooms: Mapping[int, int],
    ) -> tuple[set[int], set[int], set[int], list[int]]:
        """Of fresh messages by key: those that go out, are parked, are declined; what lies behind is not looked at. And
        the keys of those that are parked and go out all the same."""
        blocked = self.halted | {each.key for each in self.open.values()}
        waiting = {each.key: at for at, each in sorted(self.open.items()) if each.place == "parked"}
        chosen, parked, declined = set[int](), set[int](), set[int]()
        followed: list[int] = []
        room = self.config.parked_max - self.behind_count
        for at in range(first, end):
            key = keys.get(at, 0)
            if len(chosen) + len(followed) == most:
                break
            if key and (key in blocked or self.rests_until(key)):
                if key in waiting and self.config.coalesce is not Coalesce.NONE:
                    loser = at if self.config.coalesce is Coalesce.DECLINE else waiting[key]
                    declined.add(loser)
                    parked.discard(loser)
                    if loser == at:
                        continue
                elif len(parked) >= room:
                    break
                parked.add(at)
                waiting[key] = at
                is_led = key in {keys.get(each, 0) for each in chosen}
                longest = run_max if is_led else 0 if self.parked_of(key) else rooms.get(key, 0)
                if followed.count(key) < longest and len(followed) < behind_max:
                    followed.append(key)
            else:
                chosen.add(at)
                blocked.add(key)
        return chosen, parked, declined, followed

    def decline(self, sequences: set[int]) -> None:
        for at in sequences:
            self.open.pop(at, None)
        self.done |= sequences
        self.declined_count += len(sequences)

    def park(self, sequences: Iterable[int], keys: Mapping[int, int]) -> None:
        for at in sorted(sequences):
            key = keys.get(at, 0)
            is_behind = key in self.halted or any(each.key == key for each in self.open.values())
            self.open[at] = Held("parked" if is_behind else "stock", 1, key=key)
            if not is_behind:
                self.open[at].due_ms = self.rests_until(key)

    def rests_until(self, key: int) -> int:
        until_ms = self.resting.get(key, 0)
        return until_ms if until_ms > self.now_ms else 0

    def settle_keys(self, keys: Iterable[int]) -> None:
        """The head of each is done: the next of its key comes, if nobody has it."""
        for key in set(keys) - {0} - self.halted:
            parked, out = self.parked_of(key), self.out_of(key)
            if parked and (not out or parked[0] < out[0]):
                self.open[parked[0]] = Held("stock", 1, key=key, due_ms=self.rests_until(key))

    def reorder(self, config: GroupConfig) -> None:
        """Another configuration."""
        was, self.config = self.config, config  # what was parked goes to the stock after that
        if (config.order, config.is_keyed) != (was.order, was.is_keyed):
            self.is_mixed = config.is_ordered and self.in_flight
        self.is_halted &= self.is_strict and config.after_dead is AfterDead.HALT
        if not self.is_keyed:
            self.halted.clear()
            self.resting.clear()
            for at, each in self.open.items():
                each.key = 0
                if each.place == "parked":
                    self.open[at] = Held("stock", 1)
        elif config.after_dead is AfterDead.GO_ON:
            self.go_on(set(self.halted))

    def go_on(self, keys: set[int]) -> None:
        going = self.halted & keys
        self.halted -= going
        self.settle_keys(going)

    def hand_out(
        self,
        name: str,
        lot: int,
        attempt: int,
        sequences: Iterable[int],
        number: int,
        now_ns: int,
        keys: Mapping[int, int] | None = None,
    ) -> None:
        for at in sequences:
            failed = self.open[at].failed if at in self.open else ()
            if at in self.open:
                key = self.open[at].key
            else:
                assert at == self.cursor or self.is_keyed
                key = (keys or {}).get(at, 0) if self.is_keyed else 0
                self.cursor = max(self.cursor, at + 1)
                self.is_mixed = False
            self.open[at] = Held("held", attempt, name, lot, number, now_ns, key=key, failed=failed)
            if key and self.config.rate_per_key:
                self.resting[key] = self.now_ms + self.config.key_rest_ms
        for message in self.held_by(name).values():
            if (message.lot, message.attempt) == (lot, attempt):  # the rest of the same lot has more time
                message.handed_ns = now_ns

    def holds(self, name: str, lot: int, attempt: int, sequences: Iterable[int], arrived: int) -> set[int]:
        """Of what had arrived when it was said; with 0, of all."""
        held = {
            at
            for at, each in self.held_by(name).items()
            if (each.lot, each.attempt) == (lot, attempt) and (not arrived or each.number <= arrived)
        }
        return held & set(sequences)

    def has_lot(self, name: str, lot: int, attempt: int) -> bool:
        return any((each.lot, each.attempt) == (lot, attempt) for each in self.held_by(name).values())

    def believable(self, attempt: int, sequences: Iterable[int]) -> set[int]:
        found = set()
        for at in () if self.config.is_ordered else sequences:
            message = self.open.get(at)
            is_unheld_lots = message is not None and message.place == "stock" and message.attempt == attempt
            if at < self.recovered_end and (is_unheld_lots or (at >= self.cursor and attempt == 1)):
                found.add(at)
        return found

    def believe(self, sequences: set[int], due_ms: int) -> None:
        for at in sequences:
            self.open.pop(at, None)
            self.done.add(at)
        for at in range(self.cursor, max(sequences) + 1):
            self.cursor = at + 1
            if at not in sequences:
                self.open[at] = Held("stock", 1, due_ms=due_ms)

    def ack(self, sequences: Collection[int]) -> None:
        keys = [self.open.pop(at).key for at in sequences]
        self.done.update(sequences)
        self.settle_keys(keys)

    def reject(self, sequences: Iterable[int]) -> None:
        for at in sequences:
            message = self.open[at]
            failed = self.failed_now(message)
            self.open[at] = Held("dying", message.attempt, key=message.key, failed=failed)

    def mark_dead(self, sequences: Iterable[int]) -> None:
        buried = [at for at in sequences if at in self.open and self.open[at].place == "dying"]
        keys = {self.open.pop(at).key for at in buried}
        self.dead.update(buried)
        if self.config.after_dead is AfterDead.HALT and self.is_keyed:
            self.halted |= keys - {0}
        if self.config.after_dead is AfterDead.HALT and self.is_strict and buried:
            self.is_halted = True
        self.settle_keys(keys)

    def seek(self, to: int) -> None:
        for part in (self.open, self.done, self.dead, self.skipped, self.halted, self.resting):
            part.clear()
        self.is_mixed = self.is_halted = False
        self.skipped.update(range(to))
        self.cursor = to
        self.recovered_end = 0


@dataclass
class Client:
    """What a consumer knows by itself."""

    arrived: int = 0
    lots: list[Handout] = field(default_factory=list)


@dataclass
class Moment:
    """Where a crash may cut: so many events, and what the model was then."""

    events: int
    model: Model
    snapshot: bytes


def sequences(ranges: Sequence[Range]) -> set[int]:
    return {at for first, count in ranges for at in range(first, first + count)}


def response_of(lot: Lot, at: int) -> int:
    """The one response that the message went out in: a lot may have gone out in several, part by part."""
    numbers = {number for number, _ in lot.parts} or {lot.number}
    [number] = [each for each in numbers if lot.open_in_response(each) >> at - lot.base & 1]
    return number


def failed_of(lot: Lot) -> tuple[tuple[int, int, str], ...]:
    """The attempts of its messages that failed: number, when, with whom."""
    return tuple((each.attempt, each.time_ms, each.consumer) for each in lot.history)
