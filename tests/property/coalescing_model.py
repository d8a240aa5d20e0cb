"""The book of machines beside a naive model: per key a list of those who are there, and a deadline."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from fairway.client.coalescing import CoalescedRequest, CoalescingTable, RequestStatus
from fairway.errors import Refused

TIMEOUT_S = 1.0
TIMEOUT_NS = 1_000_000_000
KEYS = st.sampled_from("abcdef")
KEYS_MAX = 4


class Naive:
    """What a key's requests come to, written down as plainly as possible."""

    def __init__(self, keep: str) -> None:
        self.keep = keep
        self.there: dict[str, list[int]] = {}
        self.due: dict[str, int] = {}
        self.status: dict[int, RequestStatus] = {}
        self.counts: Counter[str] = Counter()

    def drop_head(self, key: str, copy_status: RequestStatus, now_ns: int) -> None:
        queue = self.there[key]
        self.status[queue.pop(0)] = copy_status
        if queue:
            self.counts["promoted"] += 1
            self.status[queue[0]] = RequestStatus.ACCEPTED
            self.due[key] = now_ns + TIMEOUT_NS
        else:
            del self.there[key], self.due[key]

    def evict_overdue(self, key: str, now_ns: int) -> None:
        if key in self.there and self.due[key] <= now_ns:
            self.counts["evicted"] += 1
            self.drop_head(key, RequestStatus.EVICTED, now_ns)

    def ask(self, who: int, key: str, now_ns: int) -> None:
        queue = self.there.setdefault(key, [])
        if not queue:
            self.status[who] = RequestStatus.ACCEPTED
            self.counts["accepted"] += 1
            self.due[key] = now_ns + TIMEOUT_NS
            queue.append(who)
        elif len(queue) == 1:
            self.status[who] = RequestStatus.WAITING
            self.counts["waited"] += 1
            queue.append(who)
        elif self.keep == "first":
            self.status[who] = RequestStatus.DECLINED
            self.counts["declined"] += 1
        else:
            self.status[queue[1]] = RequestStatus.DECLINED
            self.status[who] = RequestStatus.WAITING
            self.counts["declined"] += 1
            self.counts["waited"] += 1
            queue[1] = who


class BookMachine(RuleBasedStateMachine):
    """Requests that come, end, give up, come back too late; time that passes in leaps."""

    book_type: type[CoalescingTable[str]] = CoalescingTable
    places = Bundle("places")

    @initialize(keep=st.sampled_from(["first", "latest"]))
    def begin(self, keep: Literal["first", "latest"]) -> None:
        self.book = self.book_type(TIMEOUT_S, keep, KEYS_MAX)
        self.model = Naive(keep)
        self.now_ns = 0
        self.swept_at_ns = 0
        self.asked: list[CoalescedRequest[str]] = []
        self.rung: Counter[int] = Counter()

    @rule(key=KEYS, target=places)
    def ask(self, key: str) -> int:
        who, place = len(self.asked), CoalescedRequest(key)
        place.on_change = lambda: self.rung.update([who])
        self.asked.append(place)
        self.model.evict_overdue(key, self.now_ns)
        is_new = key not in self.model.there
        if is_new and (self.now_ns >= self.swept_at_ns or len(self.model.there) >= KEYS_MAX):
            self._sweep_model()
        if is_new and len(self.model.there) >= KEYS_MAX:
            self.model.status[who] = RequestStatus.DECLINED
            self.model.counts["refused"] += 1
            with pytest.raises(Refused) as refused:
                self.book.ask(place, self.now_ns)
            assert 1 <= (refused.value.retry_after_ms or 0) <= TIMEOUT_S * 1_000
            return who
        self.model.ask(who, key, self.now_ns)
        self.book.ask(place, self.now_ns)
        return who

    @rule(who=places)
    def end(self, who: int) -> None:
        """By anybody, as often as they like."""
        key = self.asked[who].key
        is_head = self.model.there.get(key, [None])[0] == who
        assert self.book.end(self.asked[who], self.now_ns) == is_head
        if is_head:
            self.model.drop_head(key, RequestStatus.RELEASED, self.now_ns)

    @rule(who=places)
    def withdraw(self, who: int) -> None:
        queue = self.model.there.get(self.asked[who].key, [])
        is_tail = who in queue[1:]
        assert self.book.withdraw(self.asked[who]) == is_tail
        if is_tail:
            queue.remove(who)
            self.model.status[who] = RequestStatus.WITHDRAWN
            self.model.counts["withdrawn"] += 1

    @rule(who=consumes(places))
    def leave(self, who: int) -> None:
        key = self.asked[who].key
        queue = self.model.there.get(key, [])
        self.book.leave(self.asked[who], self.now_ns)
        if who in queue[:1]:
            self.model.drop_head(key, RequestStatus.RELEASED, self.now_ns)
        elif who in queue:
            queue.remove(who)
            self.model.status[who] = RequestStatus.WITHDRAWN
            self.model.counts["withdrawn"] += 1

    @rule(who=places)
    def renew(self, who: int) -> None:
        key = self.asked[who].key
        is_head = self.model.there.get(key, [None])[0] == who
        assert self.book.renew(self.asked[who], self.now_ns) == is_head
        if is_head:
            self.model.due[key] = self.now_ns + TIMEOUT_NS

    @rule(who=places)
    def look(self, who: int) -> None:
        key = self.asked[who].key
        wait_ns = self.book.look(self.asked[who], self.now_ns)
        if self.model.status[who] is RequestStatus.WAITING:
            assert wait_ns == max(self.model.due[key] - self.now_ns, 0)
            self.model.evict_overdue(key, self.now_ns)
        else:
            assert wait_ns == 0

    @rule(ms=st.sampled_from([1, 400, 600, 1_000, 2_500]))
    def pass_time(self, ms: int) -> None:
        self.now_ns += ms * 1_000_000

    @rule()
    def sweep(self) -> None:
        assert self.book.sweep(self.now_ns) == self._sweep_model()

    def _sweep_model(self) -> int:
        before = self.model.counts["evicted"]
        for key in list(self.model.there):
            self.model.evict_overdue(key, self.now_ns)
        self.swept_at_ns = self.now_ns + TIMEOUT_NS
        return self.model.counts["evicted"] - before

    @invariant()
    def standings_agree(self) -> None:
        if hasattr(self, "book"):
            found = {who: place.status for who, place in enumerate(self.asked)}
            assert found == self.model.status

    @invariant()
    def figures_agree(self) -> None:
        if not hasattr(self, "book"):
            return
        told = self.book.statistics()
        names = ("accepted", "waited", "promoted", "declined", "withdrawn", "evicted", "refused")
        assert {name: getattr(told, name) for name in names} == {name: self.model.counts[name] for name in names}
        assert told.keys == len(self.model.there) <= KEYS_MAX

    @invariant()
    def one_works_and_one_waits(self) -> None:
        """The two aims of the machine, seen from outside."""
        if hasattr(self, "book"):
            for copy_status in (RequestStatus.ACCEPTED, RequestStatus.WAITING):
                per_key = Counter(place.key for place in self.asked if place.status is copy_status)
                assert all(count == 1 for count in per_key.values()), (copy_status, per_key)
