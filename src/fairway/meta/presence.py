"""A meta server's own node in the registry: others see that it lives, and where."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from fairway.errors import FairwayError
from fairway.protocol.backoff import RetryDelays
from fairway.registry import layout
from fairway.registry.port import Exists, Missing, Registry, SessionState
from fairway.world.rng import Rng

_RETRY_FIRST_MS = 100
_RETRY_MOST_MS = 5_000
_NS = 1_000_000_000


class MetaRecord(msgspec.Struct, frozen=True):
    """What the node says; its name is the address."""

    name: str  # program and version
    started_ms: int = 0


class Presence:
    """Makes the node, and makes it again in every new session."""

    def __init__(self, registry: Registry, rng: Rng, address: str, record: MetaRecord) -> None:
        self._registry = registry
        self._path = f"{layout.METAS}/{address}"
        self._value = msgspec.json.encode(record)
        self._backoff = RetryDelays(rng, first_ms=_RETRY_FIRST_MS, most_ms=_RETRY_MOST_MS)
        self._is_due = asyncio.Event()
        self._is_due.set()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="fairway-meta-presence")

    def session_is(self, state: SessionState) -> None:
        if state is SessionState.OPEN:
            self._is_due.set()

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            if await self._appear():
                self._backoff.reset()
            else:
                self._is_due.set()
                await asyncio.sleep(self._backoff.next_ns() / _NS)

    async def _appear(self) -> bool:
        """Whether the node is there and ours. One of a life before is in the way until it is removed."""
        try:
            node = await self._registry.get(self._path, fresh=True)
            if node is not None and node.owner == self._registry.session_id:
                return True
            if node is not None:
                with contextlib.suppress(Missing):
                    await self._registry.remove(self._path, node.version)
            with contextlib.suppress(Exists):
                await self._registry.create(self._path, self._value, is_ephemeral=True)
                return True
        except FairwayError:
            return False
        return False
