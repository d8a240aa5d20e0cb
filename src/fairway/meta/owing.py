"""What a group of servers still owes: asked of its master before the group is given up."""

from __future__ import annotations

from collections.abc import Sequence

from fairway.errors import FairwayError
from fairway.lookup.asking import Inquirer
from fairway.meta.governing import Debt
from fairway.meta.masters import ANSWER_S, Masters
from fairway.meta.routing import DELAY, GroupView, address_of
from fairway.protocol.admin import Depth, Describe, Described, GroupDescription
from fairway.protocol.delaying import DelayTally, Tallied, TransitReport, Which

_NAMED_MAX = 5  # consumer groups in the sentence


class MasterDecommissionCheck:
    """Asks masters: `debt = await creditors.owed(view)`."""

    def __init__(self, masters: Masters) -> None:
        self._ask = masters.ask

    async def owed(self, view: GroupView) -> Debt:
        master = view.master
        if master is None:
            sentence = "it has no master, so nobody can say what it still owes: start its servers, or use --force"
            return Debt(sentence, is_known=False)
        try:
            return await self._ask(master, _pending if view.kind == DELAY else _unconsumed)
        except FairwayError as error:
            sentence = f"its master at {address_of(master)} does not say what it still owes: {error}"
            return Debt(sentence, is_known=False)

    async def bound_for(self, group: str, delays: Sequence[GroupView]) -> Debt:
        """What delay servers have made for a broker group, and do not know to be there."""
        found: dict[str, int] = {}
        for view in sorted(delays, key=lambda each: each.name):
            master = view.master
            remedy = f"start the servers of {view.name}, or use --force"
            who = f"group {view.name} of delay servers"
            if master is None:
                return Debt(f"{who} has no master to say what it owes to {group}: {remedy}", is_known=False)
            try:
                _, in_transit = await self._ask(master, _tallied)
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


async def _tallied(inquirer: Inquirer) -> tuple[Tallied, list[TransitReport]]:
    """What is pending, and what is on its way to broker groups."""
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
    """Messages that a consumer group has not had, or is not done with."""
    return group.lag + group.in_flight + group.returned + group.retrying + group.dying + group.inbox + group.parked
