"""The members of a group, with their pull logs: the lots that a member holds, and the responses that carried them.

Only events change what the action log must know. Two things are not events, because every request of a member states
them anew: that the member is alive (`renewed_ns`) and which responses reached it (`unarrived`). After a restart the
broker grants full leases, and counts all responses as unarrived until the member reports otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from fairway.errors import invariant
from fairway.groups.lots import Lot, Name
from fairway.names import ConsumerName


class Member:
    """One consumer, from its JOIN to its LEAVE or EXPIRE."""

    __slots__ = (
        "arrived",
        "has_lasting_lease",
        "id",
        "lots",
        "name",
        "number",
        "renewed_ns",
        "responses",
        "unarrived",
        "verifier",
        "version",
    )

    def __init__(self, id: int, name: ConsumerName, version: int, number: int = 0) -> None:
        self.id = id
        self.name = name
        self.version = version  # of the configuration that the consumer got
        self.number = number  # of the last response
        self.verifier = b""  # of its session's secret (`batch.identity`); empty: no secret
        self.lots: dict[Name, Lot] = {}
        self.responses: dict[int, list[Lot]] = {}  # only those with an open message
        self.unarrived: list[int] = []  # numbers, ascending; some may be settled by now
        self.arrived = 0
        self.renewed_ns = 0
        self.has_lasting_lease = False  # the lease does not run: the caller knows at once when the consumer is gone

    def hold(self, lot: Lot) -> Lot | None:
        """Hold a lot. If a part was handed back and comes again, the new lot takes in the rest of the old lot of the
        same name, and that rest is returned. Each part stays in the response that carried it: only that response is
        resent."""
        rest = self.lots.get(lot.name)
        if rest is not None:
            self._take_in(lot, rest)
        self.lots[lot.name] = lot
        if lot.number in self.responses:
            self.responses[lot.number].append(lot)
        else:
            self.responses[lot.number] = [lot]
            self.unarrived.append(lot.number)
        self.number = max(self.number, lot.number)
        return rest

    def _take_in(self, lot: Lot, rest: Lot) -> None:
        invariant(rest.mask & lot.mask == 0, "a message is in one place")
        before = rest.parts or ((rest.number, rest.mask),)
        lot.parts = (*before, (lot.number, lot.mask))
        lot.mask |= rest.mask
        for number, _ in before:
            response = self.responses[number]
            response[response.index(rest)] = lot

    def close(self, lot: Lot, mask: int) -> None:
        """Close messages of a lot; a lot without open messages is removed."""
        invariant(mask & ~lot.mask == 0, "only an open message can be closed")
        lot.mask ^= mask
        if lot.parts:
            self._close_parts(lot)
        elif not lot.mask:
            self._strike(lot, lot.number)
        if not lot.mask:
            del self.lots[lot.name]

    def _close_parts(self, lot: Lot) -> None:
        left = []
        for number, mask in lot.parts:
            if mask & lot.mask:
                left.append((number, mask & lot.mask))
            else:
                self._strike(lot, number)
        lot.parts = tuple(left) if len(left) > 1 else ()
        if left:
            lot.number = left[-1][0]

    def _strike(self, lot: Lot, number: int) -> None:
        """Remove the lot from a response that holds none of its open messages."""
        response = self.responses[number]
        if len(response) == 1:
            del self.responses[number]
        else:
            response.remove(lot)

    def hear(self, arrived: int) -> None:
        """Note which responses have reached the member."""
        self.arrived = max(self.arrived, arrived)
        unarrived = self.unarrived
        while unarrived and (unarrived[0] <= arrived or unarrived[0] not in self.responses):
            del unarrived[0]

    def recall(self, arrived: int) -> None:
        """Like `hear`, for a member that may have forgotten responses it once had."""
        self.arrived = arrived
        self.unarrived = sorted(number for number in self.responses if number > arrived)

    def forget(self) -> None:
        """Drop everything that the member holds."""
        self.lots.clear()
        self.responses.clear()
        self.unarrived.clear()


class Roster:
    """All members, the longest silent first. Leases are of equal length, so they end in this order."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[ConsumerName, Member] = OrderedDict()
        self._by_id: dict[int, Member] = {}
        self._hungry: set[int] = set()  # ids of members whose last pull, in a group by key, found nothing

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_name.values())

    def get(self, name: ConsumerName) -> Member | None:
        return self._by_name.get(name)

    def of_id(self, id: int) -> Member:
        invariant(id in self._by_id, "an event names a member")
        return self._by_id[id]

    def name_of(self, id: int) -> ConsumerName | None:
        member = self._by_id.get(id)
        return None if member is None else member.name

    def add(self, member: Member, now_ns: int) -> None:
        invariant(member.name not in self._by_name, "a member joins once")
        self._by_name[member.name] = member
        self._by_id[member.id] = member
        member.renewed_ns = now_ns

    def remove(self, id: int) -> Member:
        member = self.of_id(id)
        del self._by_id[id]
        del self._by_name[member.name]
        self._hungry.discard(id)
        return member

    def note_hunger(self, member: Member, *, is_hungry: bool) -> None:
        """Note whether the member's pull found nothing: others then keep no keys for themselves."""
        if is_hungry:
            self._hungry.add(member.id)
        else:
            self._hungry.discard(member.id)

    def has_other_hungry(self, member: Member) -> bool:
        """Whether the last pull of any other member found nothing."""
        return len(self._hungry) > (member.id in self._hungry)

    def renew(self, member: Member, now_ns: int) -> None:
        member.renewed_ns = now_ns
        self._by_name.move_to_end(member.name)

    def renew_all(self, now_ns: int) -> None:
        for member in self:
            member.renewed_ns = now_ns

    @property
    def eldest_id(self) -> int:
        """The id of the member that joined first; 0 if there is none."""
        return next(iter(self._by_id), 0)  # ids grow, so the dict is in order

    def longest_silent(self) -> Member | None:
        """The longest silent member whose lease runs."""
        for member in self:
            if not member.has_lasting_lease:
                return member
        return None

    def silent_since(self, limit_ns: int) -> Iterator[Member]:
        """Members whose lease runs and whose last request came at `limit_ns` or before."""
        for member in self:
            if member.has_lasting_lease:
                continue
            if member.renewed_ns > limit_ns:
                return
            yield member

    def held(self) -> Iterable[tuple[Member, Lot]]:
        return ((member, lot) for member in self for lot in member.lots.values())
