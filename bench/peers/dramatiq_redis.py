"""Dramatiq on Redis: a handler without work, sent one by one, as its interface has it; the worker with its defaults."""

from __future__ import annotations

from typing import Any

import dramatiq  # type: ignore[import-not-found]
import redis  # type: ignore[import-not-found]
from dramatiq.brokers.redis import RedisBroker  # type: ignore[import-not-found]

from bench.peers import workers
from bench.peers.driving import PAYLOAD, Driver, Gate, Result, Task

TEXT = PAYLOAD.hex()[: len(PAYLOAD)]  # arguments travel as JSON: a hundred bytes of text

broker = RedisBroker(url=workers.url())
dramatiq.set_broker(broker)


def on_message(_text: str) -> None:
    return


actor: Any = dramatiq.actor(on_message, actor_name="on_message", queue_name="bench")


def handle(task: Task, gate: Gate) -> Result:
    server = redis.Redis(host="127.0.0.1", port=task.port)
    command = [workers.program("dramatiq"), "bench.peers.dramatiq_redis"]
    return workers.handle(task, gate, command, lambda: actor.send(TEXT), lambda: server.hlen("dramatiq:bench.msgs"))


DRIVERS: dict[str, Driver] = {"handle": handle}
