"""Decommission check: asks masters which messages would be lost if a group of servers were given up.

`Masters` asks the questions, also for `fairway.meta.route_upkeep`, and makes sentences of the answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fairway.errors import FairwayError, Unreachable
from fairway.lookup.registries import Inquirer
from fairway.meta.cluster_state import DELAY, GroupView, address_of
from fairway.protocol.admin_messages import Depth, Describe, Described, GroupDescription, SubjectDescription
from fairway.protocol.delay_messages import DelayTally, Tallied, TransitReport, Which
from fairway.registry.layout import RegisteredCopy
from fairway.runtime.clock import Clock
from fairway.runtime.net import Net
from fairway.runtime.rng import Rng

T = TypeVar("T")

ANSWER_S = 10.0
_NAMED_MAX = 5  # consumer groups in the sentence


@dataclass(frozen=True)
class Debt:
    """Messages that would be lost with a group. `sentence` is for people; empty: none."""

    sentence: str = ""
    is_known: bool = True  # False: nobody could be asked, and the sentence says why


class Masters:
    """Asks masters, each time over a new connection. `FairwayError`: the master has not answered."""

    def __init__(self, net: Net, clock: Clock, rng: Rng) -> None:
        self._net = net
        self._clock = clock
        self._rng = rng

    async def ask(self, master: RegisteredCopy, question: Callable[[Inquirer], Awaitable[T]]) -> T:
        inquirer = Inquirer(self._net, self._clock, self._rng, [(master.host, master.port)], name="fairway meta")
        try:
            if not await inquirer.connected(0, ANSWER_S):
                raise Unreachable(f"no connection to {address_of(master)}: {inquirer.line.trouble}")
            return await question(inquirer)
        finally:
            inquirer.abort()

    async def subjects(self, view: GroupView, names: Sequence[str]) -> dict[str, SubjectDescription]:
        """Those of these subjects that a broker group has."""

        async def question(inquirer: Inquirer) -> dict[str, SubjectDescription]:
            found = dict[str, SubjectDescription]()
            for name in names:
                described = await _described(inquirer, Describe(Depth.SUBJECTS, name, items_max=1))
                found.update((each.name, each) for each in described.subjects)
            return found

        return await self.ask(_master_of(view), question)

    async def page(self, view: GroupView, after: str, number: int) -> Described:
        """The next `number` subjects of a broker group, by name."""
        asked = Describe(Depth.SUBJECTS, after=after, items_max=number)
        return await self.ask(_master_of(view), lambda inquirer: _described(inquirer, asked))

    # --- what would be lost with a group -----------------------------------------------------------------------------

    async def owed(self, view: GroupView) -> Debt:
        """The messages of a group of servers that are still outstanding."""
        master = view.master
        if master is None:
            sentence = "it has no master, so nobody can say what it still owes: start its servers, or use --force"
            return Debt(sentence, is_known=False)
        try:
            return await self.ask(master, _pending if view.kind == DELAY else _unconsumed)
        except FairwayError as error:
            sentence = f"its master at {address_of(master)} does not say what it still owes: {error}"
            return Debt(sentence, is_known=False)

    async def bound_for(self, group: str, delays: Sequence[GroupView]) -> Debt:
        """The messages that delay servers have made for a broker group, and that only this group can confirm."""
        found: dict[str, int] = {}
        for view in sorted(delays, key=lambda each: each.name):
            master = view.master
            remedy = f"start the servers of {view.name}, or use --force"
            who = f"group {view.name} of delay servers"
            if master is None:
                return Debt(f"{who} has no master to say what it owes to {group}: {remedy}", is_known=False)
            try:
                _, in_transit = await self.ask(master, _tallied)
            except FairwayError as error:
                return Debt(f"{who} does not say what it owes to {group} ({error}): {remedy}", is_known=False)
            messages = sum(each.messages for each in in_transit if each.group == group)
            if messages:
                found[view.name] = messages
        if not found:
            return Debt()
        count, by_group = sum(found.values()), ", ".join(f"{name} {messages:,}" for name, messages in found.items())
        what = "1 delayed message waits" if count == 1 else f"{count:,} delayed messages wait"
        return Debt(
            f"{what} for it at delay servers ({by_group}), and only it can say whether it has them: "
            "start its servers if they are stopped, and ask again"
        )


async def _described(inquirer: Inquirer, asked: Describe) -> Described:
    described = await inquirer.ask(asked, Described, ANSWER_S)
    if not described.broker.is_master:
        raise FairwayError("the broker does not lead its group")
    return described


def _master_of(view: GroupView) -> RegisteredCopy:
    if view.master is None:
        raise FairwayError(f"group {view.name} has no master")
    return view.master


async def _tallied(inquirer: Inquirer) -> tuple[Tallied, list[TransitReport]]:
    """The pending messages, and the messages on their way to broker groups."""
    tallied = await inquirer.ask(DelayTally(Which()), Tallied, ANSWER_S)
    if tallied.in_transit is None:
        raise FairwayError("it is of an older version, which does not count what is on its way: upgrade it")
    return tallied, tallied.in_transit


async def _pending(inquirer: Inquirer) -> Debt:
    tallied, in_transit = await _tallied(inquirer)
    count = sum(each.messages for each in in_transit)
    told = [f"{tallied.count} delayed messages are pending"] if tallied.count else []
    if count:
        groups = ", ".join(f"{each.group} {each.messages:,}" for each in in_transit[:_NAMED_MAX])
        told.append(f"{count:,} are on their way to their broker groups ({groups})")
    return Debt(" and ".join(told))


async def _unconsumed(inquirer: Inquirer) -> Debt:
    owed: dict[str, int] = {}
    after = ""
    while True:
        page = await inquirer.ask(Describe(Depth.GROUPS, after=after), Described, ANSWER_S)
        for subject in page.subjects:
            for group in subject.groups:
                if rest := owed_to(group):
                    owed[f"{group.name} on {subject.name}"] = rest
        after = page.next
        if not after:
            break
    if not owed:
        return Debt()
    named = ", ".join(f"{who} {rest}" for who, rest in [*owed.items()][:_NAMED_MAX])
    more = ", ..." if len(owed) > _NAMED_MAX else ""
    return Debt(f"{sum(owed.values())} messages are owed to consumers ({named}{more})")


def owed_to(group: GroupDescription) -> int:
    """Messages that a consumer group has not pulled, or has not finished."""
    return group.lag + group.in_flight + group.returned + group.retrying + group.dying + group.inbox + group.parked
