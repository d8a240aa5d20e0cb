"""What each copy of a cluster answers when it is asked itself. The registry tells of a dead process only after its
session, and of a master before it is open to clients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fairway.errors import FairwayError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fairway.protocol.admin import BrokerState
    from fairway.protocol.routing import Routed

ANSWER_S = 2.0  # for a connection, and again for the answer
_AT_ONCE = 32


def ask_copies(found: Routed) -> dict[str, BrokerState | str]:
    """By address: what it says of itself, or why it does not."""
    return asyncio.run(_ask_all(copy.address for group in found.groups for copy in group.copies if copy.address))


async def _ask_all(addresses: Iterable[str]) -> dict[str, BrokerState | str]:
    room = asyncio.Semaphore(_AT_ONCE)

    async def ask(address: str) -> tuple[str, BrokerState | str]:
        async with room:
            return address, await _ask(address)

    return dict(await asyncio.gather(*map(ask, dict.fromkeys(addresses))))


async def _ask(address: str) -> BrokerState | str:
    from fairway.lookup.asking import Inquirer
    from fairway.lookup.opening import parse_meta
    from fairway.protocol.admin import Depth, Describe, Described
    from fairway.world.clock import RealClock
    from fairway.world.net import RealNet
    from fairway.world.rng import RealRng

    inquirer = Inquirer(RealNet(), RealClock(), RealRng(), parse_meta(f"fairway://{address}"), name="fairway check")
    try:
        if not await inquirer.connected(0, ANSWER_S):
            return str(inquirer.line.trouble or f"no answer in {ANSWER_S:g} s")
        return (await inquirer.ask(Describe(Depth.SUBJECTS), Described, ANSWER_S)).broker
    except FairwayError as error:
        return str(error)
    finally:
        inquirer.abort()
