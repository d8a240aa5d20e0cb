"""Those who read the copies of a group without being of any group, as Spark does: replicas and the master alike."""

from __future__ import annotations

import asyncio

from fairway import batch
from fairway.errors import Code, Refused, Unreachable
from fairway.protocol.admin_messages import Scan, Scanned
from fairway.protocol.messages import Whence
from tests.simulation.broker_clients import Mood, Scene
from tests.simulation.broker_truth import Promise
from tests.simulation.cluster_truth import ClusterTruth
from tests.support.client import Client, ConnectionEnded

PACE_MS = 250
BYTES_MAX = 4_096
WRONG = frozenset({Code.OTHER, Code.PROTOCOL_ERROR, Code.BAD_REQUEST})


class Reader:
    """Scans one subject, now at this copy and now at that one, from anywhere on. What it is shown is committed, so it
    must be there for everybody, for ever."""

    def __init__(self, scene: Scene, truth: ClusterTruth, mood: Mood, name: str, subject: str) -> None:
        self.name = name
        self.scanned = 0
        self._scene = scene
        self._truth = truth
        self._mood = mood
        self._rng = scene.rng.child(name)
        self._net = scene.net(name)
        self._subject = subject
        self._seen_to = 0
        self._host = ""
        self._client: Client | None = None

    async def run(self) -> None:
        while not self._mood.is_calm:
            await asyncio.sleep(self._rng.below(PACE_MS * 1_000) / 1e6)
            await self._turn()

    async def _turn(self) -> None:
        try:
            async with asyncio.timeout(self._scene.patience_s):
                await self._scan(await self._connected())
        except (Unreachable, ConnectionEnded, TimeoutError):
            self._hang_up()
        except Refused as refused:
            if refused.code in WRONG:
                self._truth.blame(Promise.BROKE, f"a scan at {self._host}: {refused}")

    async def _connected(self) -> Client:
        """To a copy; now and then to another one."""
        if self._rng.below(4) == 0:
            self._hang_up()
        if self._client is None:
            self._host, port = self._scene.places[self._rng.below(len(self._scene.places))]
            self._client = await Client.connect(self._net, self._scene.clock, self._host, port)
        return self._client

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.abort()

    async def _scan(self, client: Client) -> None:
        """A few pages, from the end of what it knows, or from somewhere before."""
        at = self._seen_to if self._rng.below(2) else self._rng.below(self._seen_to + 1)
        for _ in range(1 + self._rng.below(3)):
            scan = Scan(self._subject, Whence.SEQUENCE, at, None, BYTES_MAX, wait_ms=self._rng.below(100))
            scanned, batches = await client.ask(scan, Scanned)
            for attached, data in zip(scanned.batches, batches, strict=True):
                payloads = batch.decode(data).payloads
                self._truth.note_scanned(self._subject, attached.first_sequence, payloads, self._host)
                self.scanned += len(payloads)
            at = scanned.next_sequence
            self._seen_to = max(self._seen_to, at)
