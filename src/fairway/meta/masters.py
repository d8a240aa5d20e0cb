"""Questions to the masters of groups of servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fairway.errors import FairwayError, Unreachable
from fairway.lookup.asking import Inquirer
from fairway.meta.routing import GroupView, address_of
from fairway.protocol.admin import Depth, Describe, Described, SubjectDescription
from fairway.registry.layout import RegisteredCopy
from fairway.world.clock import Clock
from fairway.world.net import Net
from fairway.world.rng import Rng

T = TypeVar("T")

ANSWER_S = 10.0


class Masters:
    """Asks masters, each time on a connection of its own. `FairwayError`: the master has not answered."""

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
        """The next so many subjects of a broker group, by name."""
        asked = Describe(Depth.SUBJECTS, after=after, items_max=number)
        return await self.ask(_master_of(view), lambda inquirer: _described(inquirer, asked))


async def _described(inquirer: Inquirer, asked: Describe) -> Described:
    described = await inquirer.ask(asked, Described, ANSWER_S)
    if not described.broker.is_master:
        raise FairwayError("the broker does not lead its group")
    return described


def _master_of(view: GroupView) -> RegisteredCopy:
    if view.master is None:
        raise FairwayError(f"group {view.name} has no master")
    return view.master
