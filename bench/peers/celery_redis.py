"""Celery on Redis: a handler without work, late acks and no results, a long prefetch as its guide has it."""

from __future__ import annotations

from typing import Any

import celery  # type: ignore[import-not-found]
import redis  # type: ignore[import-not-found]

from bench.peers import workers
from bench.peers.driving import PAYLOAD, Driver, Gate, Result, Task

TEXT = PAYLOAD.hex()[: len(PAYLOAD)]  # arguments travel as JSON: a hundred bytes of text

app = celery.Celery("bench", broker=f"{workers.url()}/0")
app.conf.update(
    task_acks_late=True,  # at least once, as everyone else here
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    task_default_queue="bench",
    broker_connection_retry_on_startup=True,
)


def on_message(_text: str) -> None:
    return


job: Any = app.task(on_message, name="bench.on_message")


def handle(task: Task, gate: Gate) -> Result:
    server = redis.Redis(host="127.0.0.1", port=task.port)
    chatter = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    command = [workers.program("celery"), "-A", "bench.peers.celery_redis", "worker", "--loglevel", "ERROR", *chatter]
    command += POOLS[task.variant]

    def left() -> int:
        waiting: int = server.llen("bench")
        in_hand: int = server.hlen("unacked")
        return waiting + in_hand

    return workers.handle(task, gate, command, lambda: job.delay(TEXT), left)


POOLS = {
    "prefork": ["--pool", "prefork"],
    "threads": ["--pool", "threads", "--concurrency", "8"],
    "solo": ["--pool", "solo"],
}
DRIVERS: dict[str, Driver] = {"handle": handle}
