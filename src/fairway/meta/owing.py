"""What a group of servers still owes: asked of its master before the group is given up."""

from __future__ import annotations

from fairway.errors import FairwayError
from fairway.lookup.asking import Inquirer
from fairway.meta.routing import DELAY, GroupView, address_of
from fairway.protocol.admin import Depth, Describe, Described, GroupState
from fairway.protocol.delaying import Tallied, Tally, Which
from fairway.world.clock import Clock
from fairway.world.net import Net
from fairway.world.rng import Rng

_ANSWER_S = 10.0
_NAMED_MAX = 5  # consumer groups in the sentence


class Creditors:
    """Asks masters. `await creditors.owed(view)` is a sentence for people; empty: nobody is owed anything."""

    def __init__(self, net: Net, clock: Clock, rng: Rng) -> None:
        self._net = net
        self._clock = clock
        self._rng = rng

    async def owed(self, view: GroupView) -> str:
        master = view.master
        if master is None:
            return "it has no master, so nobody can say what it still owes: start its servers, or use --force"
        inquirer = Inquirer(self._net, self._clock, self._rng, [(master.host, master.port)], name="fairway meta")
        try:
            if not await inquirer.connected(0, _ANSWER_S):
                return f"its master at {address_of(master)} cannot be asked what it still owes: {inquirer.line.trouble}"
            return await (_pending(inquirer) if view.kind == DELAY else _unconsumed(inquirer))
        except FairwayError as error:
            return f"its master at {address_of(master)} does not say what it still owes: {error}"
        finally:
            inquirer.abort()


async def _pending(inquirer: Inquirer) -> str:
    tallied = await inquirer.ask(Tally(Which()), Tallied, _ANSWER_S)
    return f"{tallied.count} delayed messages are pending" if tallied.count else ""


async def _unconsumed(inquirer: Inquirer) -> str:
    owed: dict[str, int] = {}
    after = ""
    while True:
        page = await inquirer.ask(Describe(Depth.GROUPS, after=after), Described, _ANSWER_S)
        for subject in page.subjects:
            for group in subject.groups:
                if rest := owed_to(group):
                    owed[f"{group.name} on {subject.name}"] = rest
        after = page.next
        if not after:
            break
    if not owed:
        return ""
    named = ", ".join(f"{who} {rest}" for who, rest in [*owed.items()][:_NAMED_MAX])
    return f"{sum(owed.values())} messages are owed to consumers ({named}{', ...' if len(owed) > _NAMED_MAX else ''})"


def owed_to(group: GroupState) -> int:
    """Messages that a consumer group has not had, or is not done with."""
    return group.lag + group.in_flight + group.returned + group.retrying + group.dying + group.inbox + group.parked
