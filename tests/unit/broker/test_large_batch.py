"""A batch of a MiB and more on its way through a broker: it is not copied, it is stored whole, its memory is freed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from fairway import batch
from fairway.batch import checksum
from fairway.limits import KIB, MIB, PLAIN_CONTROL_BYTES_MAX
from fairway.protocol import BatchesReceived, Bytes
from fairway.protocol.messages import Produce
from fairway.runtime.buffers import LazyBuffer
from fairway.scheduling import Account
from fairway.serving.memory_budget import Allowance
from fairway.serving.requests import Requester, ServedRequest, admit_batches
from fairway.storage.store import Store
from tests.support.raw import Raw
from tests.unit.broker.scene import BROKER, PORT, SUBJECT, Scene, options_of
from tests.unit.broker.test_produce import PooledScene

PAYLOADS = [random.Random(7).randbytes(3 * MIB), b"small"]
DATA = batch.encode(PAYLOADS, producer_id=9, first_sequence=0, created_ms=1)


@dataclass(eq=False)
class Waiting:
    """An asker that nobody answers."""

    address: str = ""
    here: str = ""
    is_gone: bool = False
    is_swamped: bool = False
    frame_bytes_max: int = 64 * MIB
    account: Account = field(default_factory=Account)
    unstored_bytes: int = 0
    waiting: dict[ServedRequest[Any], None] = field(default_factory=dict)

    def respond(self, *_: object) -> None: ...

    def respond_all(self, *_: object) -> None: ...

    def refuse(self, *_: object) -> None: ...


def admitted(attachment: Bytes) -> Bytes:
    """The attachment, as an actor sees it."""
    allowance: Allowance[Requester] = Allowance(64 * MIB, "wait")
    received = BatchesReceived(Produce(SUBJECT), [1], [attachment], 20)
    return admit_batches(Waiting(), received, allowance, deadline_ns=1, received_ns=0).attachments[0]


def in_a_buffer(beside_bytes: int) -> memoryview:
    buffer = LazyBuffer(len(DATA) + beside_bytes)
    buffer[beside_bytes:] = DATA
    return memoryview(buffer)[beside_bytes:].toreadonly()


def test_a_batch_that_has_the_buffer_of_its_frame_to_itself_is_not_copied() -> None:
    attached = in_a_buffer(PLAIN_CONTROL_BYTES_MAX)
    assert admitted(attached) is attached


@pytest.mark.parametrize(
    "attached",
    [
        memoryview(DATA),
        memoryview(DATA[: 20 * KIB]),
        in_a_buffer(2 * PLAIN_CONTROL_BYTES_MAX),
        in_a_buffer(0)[: 20 * KIB],
    ],
    ids=["of a chunk", "small", "beside others", "small part"],
)
def test_a_batch_that_would_keep_other_bytes_in_memory_is_copied(attached: memoryview) -> None:
    kept = admitted(attached)
    assert type(kept) is bytes
    assert kept == attached


def test_the_checksum_of_a_large_view_is_that_of_its_bytes() -> None:
    for size in (16 * KIB, 256 * KIB - 1, 256 * KIB, 256 * KIB + 1, 3 * MIB):
        assert checksum(memoryview(DATA)[:size], 77) == checksum(DATA[:size], 77)


class Watched:
    """Which batches a store was given."""

    def __init__(self, store: Store) -> None:
        self._produce = store.produce
        self.kinds: list[type] = []

    def produce(self, subject: Any, data: Any, *rest: Any) -> Any:
        self.kinds.append(type(data))
        return self._produce(subject, data, *rest)


def test_a_large_batch_is_stored_from_its_buffer_and_the_buffer_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []

    async def story(scene: Scene) -> None:
        discard = scene.broker.session_manager.discard_buffer

        def note(buffer: LazyBuffer) -> None:
            freed.append(len(buffer))
            discard(buffer)

        monkeypatch.setattr(scene.broker.session_manager, "discard_buffer", note)
        watched = Watched(scene.broker.store)
        monkeypatch.setattr(scene.broker.store, "produce", watched.produce)
        raw = await Raw.connect(scene.sim.net.host("large"), BROKER, PORT)
        raw.connection.request(Produce(SUBJECT), [DATA])
        data = b"".join(bytes(part) for part in raw.connection.take())
        for at in range(0, len(data), 64 * KIB):
            raw.send(data[at : at + 64 * KIB])
            await asyncio.sleep(0.01)
        await asyncio.sleep(5)
        assert (raw.is_lost, raw.answered) == (False, 1)
        assert watched.kinds == [memoryview]
        await scene.send(b"another")
        assert freed == [len(data)], "nothing holds the batch any more"
        assert scene.broker.waiting.taken_bytes == 0
        monkeypatch.undo()
        await scene.restart()
        assert [each.payload for each in await scene.scan()] == PAYLOADS  # as much as an answer holds
        raw.abort()

    PooledScene("large", options_of(), capacity_bytes=64 * MIB).play(story)
