"""How long a change of masters by hand takes, beside one by SIGKILL.

    python -m bench.promotion               about two minutes
    python -m bench.promotion --quick       fewer rounds and a smaller directory
    python -m bench.promotion --json        the figures for a program

Two copies of one broker and three servers of ZooKeeper are processes of their own, with the session that brokers ask
for by default. Both copies hold so many messages that the last checkpoint does not cover, so the deposed master has a
directory to recover. A program knows both copies and sends a message every 10 ms; the outage is the longest time from
a message's due time to its receipt. Promotions and kills take turns, and the ratio is that of their medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import fairway
from bench import machine
from bench.cluster import ANSWER_S, PAYLOAD
from bench.cluster_groups import BrokerGroup
from fairway.registry.zookeeper import ZooKeeperRegistry
from fairway.replication.leadership import change_master
from tests.support.zookeeper import Ensemble, ensemble

SESSION_MS = 6_000
PROMOTE_MS_MAX = 1_000
SUBJECT = "promotion"
FEW = 5  # messages of a batch
IN_FLIGHT = 500
EVERY_S = 0.01
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    rounds: int
    messages: int  # in the directory before the first round


FULL = Sizes(8, 300_000)
QUICK = Sizes(3, 100_000)
TINY = Sizes(1, 2_000)


def fill(client: fairway.Client, messages: int) -> None:
    """So many messages, a few to a batch: what a recovery has to replay is counted in records."""
    waiting: deque[Any] = deque()
    for _ in range(messages // FEW):
        if len(waiting) == IN_FLIGHT:
            waiting.popleft().result(ANSWER_S)
        waiting.append(client.send_many(SUBJECT, [PAYLOAD] * FEW))
    for each in waiting:
        each.result(ANSWER_S)


class Outage(Thread):
    """Sends a message every few milliseconds, and keeps the longest time from one's due time to its receipt."""

    def __init__(self, client: fairway.Client) -> None:
        super().__init__(name="bench-outage", daemon=True)
        self.longest_ms = 0.0
        self._client = client
        self._is_ended = Event()
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        pending = []
        for number in count():
            due = began + number * EVERY_S
            if self._is_ended.wait(max(due - time.monotonic(), 0)):
                break
            pending.append(self._client.send(SUBJECT, PAYLOAD))
            pending[-1].add_done_callback(partial(self._done, due))
        for each in pending:
            each.result(ANSWER_S)

    def _done(self, due: float, _: object) -> None:
        self.longest_ms = max(self.longest_ms, (time.monotonic() - due) * 1e3)

    def end(self) -> float:
        self._is_ended.set()
        self.join()
        return self.longest_ms


def promote(zookeeper: Ensemble, group: BrokerGroup) -> None:
    async def change() -> None:
        registry = await ZooKeeperRegistry.open(zookeeper.hosts, session_ms=SESSION_MS)
        try:
            await change_master(registry, group.name, None)
        finally:
            await registry.close()

    asyncio.run(change())


def outage_ms(zookeeper: Ensemble, group: BrokerGroup, way: str) -> float:
    """Of one change of masters; both copies are in sync again at its end."""
    before = group.await_whole()
    with fairway.connect(group.url, patience=ANSWER_S) as client:
        client.send(SUBJECT, PAYLOAD).result(ANSWER_S)
        outage = Outage(client)
        time.sleep(SETTLE_S)
        if way == "promote":
            promote(zookeeper, group)
        else:
            group.kill(before)
        group.await_master(without=before)
        time.sleep(SETTLE_S)
        found = outage.end()
    if way == "kill":
        group.start(before)
    return found


def measure(sizes: Sizes, folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"promote": [], "kill": []}
    with ExitStack() as running:
        zookeeper = running.enter_context(ensemble(3))
        group = BrokerGroup(folder, zookeeper, "pair", 2, SESSION_MS)
        running.callback(group.close)
        with fairway.connect(group.url, patience=ANSWER_S) as client:
            fill(client, sizes.messages)
        for _ in range(sizes.rounds):
            for way, times in found.items():
                times.append(outage_ms(zookeeper, group, way))
    return found


def summarise(found: dict[str, list[float]]) -> dict[str, Any]:
    promote, kill = statistics.median(found["promote"]), statistics.median(found["kill"])
    return {
        "rounds": len(found["promote"]),
        "session_ms": SESSION_MS,
        "promote_ms": promote,
        "promote_ms_most": max(found["promote"]),
        "kill_ms": kill,
        "ratio": promote / kill,
        "met": max(found["promote"]) <= PROMOTE_MS_MAX,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.promotion", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a smaller directory")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()), help="where; default: %(default)s")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    sizes = TINY if options.tiny else QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="fairway-promotion-", dir=options.data) as name:
        told = summarise(measure(sizes, Path(name)))
    told["machine"] = machine.describe(options.data)
    if options.json:
        print(json.dumps(told))
    else:
        print(
            f"promote: {told['promote_ms']:,.0f} ms, at most {told['promote_ms_most']:,.0f} "
            f"({'met' if told['met'] else 'not met'}: at most {PROMOTE_MS_MAX:,}); "
            f"kill: {told['kill_ms']:,.0f} ms with a session of {SESSION_MS:,}; "
            f"promote ÷ kill: {told['ratio']:.2f}, {told['rounds']} rounds"
        )
        print(told["machine"])
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped then too
    sys.exit(main())
