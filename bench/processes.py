"""A broker in a process of its own, and loads in others, for benches: told what to do over pipes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.machine import queued_s, resident_bytes
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.limits import MIB
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from fairway.runtime.service import run
from fairway.scheduling import SchedulerOptions
from fairway.storage.store import StoreOptions
from tests.unit.scheduling.orders import Arrival

ANSWER_S_MAX = 120.0
SEGMENT_BYTES = 16 * MIB

# Not a plain fork, which would take the parent's loop and threads with it; and one import of everything for all.
_SPAWN = multiprocessing.get_context("forkserver")
_SPAWN.set_forkserver_preload(["__main__", "bench.loads", "numpy"])


class Child:
    """A process that answers commands. Leaving its `with` ends it."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=target, args=(*args, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, *command: Any) -> None:
        self._pipe.send(command)

    def hear(self, within_s: float = ANSWER_S_MAX) -> Any:
        if not self._pipe.poll(within_s):
            raise TimeoutError(f"process {self._process.pid} of this bench does not answer")
        return self._pipe.recv()

    def has_spoken(self) -> bool:
        return self._pipe.poll()

    def ask(self, *command: Any) -> Any:
        self.tell(*command)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self._process.is_alive():
            self.tell("stop")
            self._process.join(10)
        self._process.kill()
        self._process.join()
        self._pipe.close()


async def commands(pipe: Pipe, answer: Callable[..., Coroutine[Any, Any, Any]]) -> None:
    """Answer what comes over the pipe, one after the other, until `stop`."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(pipe.fileno(), arrived.set)
    os.set_blocking(pipe.fileno(), True)  # uvloop has changed that, and a long answer would not fit at once
    try:
        while True:
            await arrived.wait()
            arrived.clear()
            while pipe.poll():
                command = pipe.recv()
                if command[0] == "stop":
                    return
                pipe.send(await answer(*command))
    except EOFError:
        return
    finally:
        loop.remove_reader(pipe.fileno())


# --- the broker ------------------------------------------------------------------------------------------------------


class BrokerProcess(Child):
    """A broker on loopback. `is_plain`: one queue for all, and reads that block."""

    def __init__(self, root: Path, *, is_plain: bool = False, slice_ns: int | None = None) -> None:
        super().__init__(_broker, str(root), is_plain, slice_ns)
        self.port: int = self.hear()

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("figures")
        return found

    def evict(self) -> int:
        """Drop the page cache of every segment but the newest; how many bytes were dropped."""
        found: int = self.ask("evict")
        return found


def _broker(root: str, is_plain: bool, slice_ns: int | None, pipe: Pipe) -> None:
    run(_serve(root, is_plain, slice_ns, pipe))


async def _serve(root: str, is_plain: bool, slice_ns: int | None, pipe: Pipe) -> None:
    loop = asyncio.get_running_loop()
    world = BrokerWorld(RealClock(), RealDisk(root, post=loop.call_soon_threadsafe), RealNet(), RealRng())
    scheduler = SchedulerOptions(slice_ns=slice_ns) if slice_ns is not None else SchedulerOptions()
    store = StoreOptions(segment_bytes=SEGMENT_BYTES)
    options = BrokerOptions(port=0, scheduler=scheduler, store=store)
    if is_plain:
        options = BrokerOptions(port=0, scheduler=scheduler, store=store, fetches_at_once=0)
    broker = await Broker.start(world, options, Arrival() if is_plain else None)
    pipe.send(broker.port)

    async def answer(command: str) -> Any:
        return _figures(broker) if command == "figures" else _evict(Path(root) / "messages")

    await commands(pipe, answer)
    await broker.stop()


def _figures(broker: Broker) -> dict[str, Any]:
    groups = {}
    for host in broker.coordinator.groups:
        actor = broker.scheduler.find(host.key)
        if actor is not None:
            lag = broker.store.messages.end_sequence(host.subject_id) - host.state_machine.cursor
            groups[str(host.name)] = {
                "loop_ns": actor.served_ns,
                "elsewhere_ns": actor.elsewhere_ns,
                "bytes": actor.bytes_served,
                "lag": lag,
            }
    return {
        "at_s": time.perf_counter(),
        "cpu_s": time.process_time(),
        "queued_s": queued_s(),
        "resident_bytes": resident_bytes(),
        "groups": groups,
        "pulled": broker.consume.puller.pulled_messages,
        "fetches": broker.fetches.count if broker.fetches is not None else 0,
    }


def _evict(directory: Path) -> int:
    dropped = 0
    for path in sorted(directory.iterdir())[:-1]:
        fd = os.open(path, os.O_RDONLY)
        try:
            dropped += os.fstat(fd).st_size
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return dropped
