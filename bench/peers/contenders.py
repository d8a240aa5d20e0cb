"""The contenders, with set-up and what is safe when each confirms: one row each."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.peers import install, servers

ONE_CLIENT = ("produce_many", "produce_each", "one_at_a_time", "consume_batches", "consume_each", "latency")
QUEUE = (*ONE_CLIENT, "many_connections")
HANDLER = ("handle",)

TITLES = {
    "produce_many": "produce, many at a time",
    "produce_each": "produce, one call per message",
    "one_at_a_time": "one message per request, {} in flight",
    "many_connections": "{} asyncio clients, one in flight each",
    "consume_batches": "consume and ack, batches",
    "consume_each": "consume and ack, message by message",
    "latency": "latency, send to handler, {}",
    "handle": "a handler without work, end to end",
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A server in one set-up, the driver of its client, and the workloads that it can do."""

    name: str
    durability: str  # of what is confirmed
    is_synced: bool  # whether that survives a power cut
    server: type[servers.Server]
    driver: str
    workloads: tuple[str, ...] = QUEUE
    variant: str = ""

    @property
    def is_ours(self) -> bool:
        return self.driver == "fairway_client"

    def python(self) -> Path:
        return Path(sys.executable) if self.is_ours else install.client_python()


CONTENDERS = (
    Contender("fairway", "synced before the receipt", True, servers.Fairway, "fairway_client", (*QUEUE, *HANDLER)),
    Contender(
        "fairway memory",
        "page cache, synced every 0.1 s",
        False,
        servers.FairwayMemory,
        "fairway_client",
        (*QUEUE, *HANDLER),
    ),
    Contender("redis always", "appendfsync always", True, servers.Redis, "redis_streams"),
    Contender("redis everysec", "appendfsync everysec", False, servers.RedisEverySecond, "redis_streams"),
    Contender("nats always", "file store, sync_interval always", True, servers.Nats, "nats_jetstream"),
    Contender("nats default", "file store, synced every 2 minutes", False, servers.NatsInterval, "nats_jetstream"),
    Contender("rabbitmq quorum", "quorum queue, confirms", True, servers.RabbitMq, "rabbitmq", variant="quorum"),
    Contender(
        "rabbitmq classic",
        "durable queue, persistent, confirms",
        True,
        servers.RabbitMq,
        "rabbitmq",
        variant="classic",
    ),
    Contender("kafka flush", "acks=all, flush.messages=1", True, servers.Kafka, "kafka", ONE_CLIENT),
    Contender("kafka default", "acks=all, page cache", False, servers.KafkaPageCache, "kafka", ONE_CLIENT),
    Contender("dramatiq", "Redis, appendfsync everysec", False, servers.RedisEverySecond, "dramatiq_redis", HANDLER),
    Contender("dramatiq always", "Redis, appendfsync always", True, servers.Redis, "dramatiq_redis", HANDLER),
    Contender(
        "celery",
        "Redis, appendfsync everysec; late acks",
        False,
        servers.RedisEverySecond,
        "celery_redis",
        HANDLER,
        "prefork",
    ),
    Contender(
        "celery solo",
        "Redis, appendfsync everysec; late acks",
        False,
        servers.RedisEverySecond,
        "celery_redis",
        HANDLER,
        "solo",
    ),
)

# The design's numbers: our workload, their contender, at least so many times as fast.
TARGETS: dict[tuple[str, str], float] = {
    ("produce_many", "redis always"): 20,
    ("produce_many", "redis everysec"): 20,
    ("produce_many", "nats always"): 50,
    ("produce_many", "kafka flush"): 2,
    ("produce_each", "redis always"): 8,
    ("produce_each", "redis everysec"): 5,
    ("produce_each", "nats always"): 15,
    ("produce_each", "kafka flush"): 1.5,
    ("one_at_a_time 1", "redis always"): 1,
    ("one_at_a_time 1000", "redis always"): 0.6,
    ("one_at_a_time 1000", "nats always"): 2,
    ("one_at_a_time 1000", "rabbitmq quorum"): 2,
    ("one_at_a_time 1000", "rabbitmq classic"): 5,
    ("many_connections 1", "redis always"): 1,
    ("many_connections 100", "redis always"): 1,
    ("consume_batches", "redis always"): 6,
    ("consume_batches", "redis everysec"): 10,
    ("consume_each", "redis always"): 5,
    ("consume_each", "redis everysec"): 5,
    ("handle", "dramatiq"): 20,
    ("handle", "celery"): 50,
}
CPU_TARGETS = {("many_connections 100", "redis always"): 1.3}  # of our server per message, at most so many times theirs
P50_TARGETS = {("latency 100/s", "rabbitmq quorum"): 1.0, ("latency 1000/s", "rabbitmq quorum"): 1.0}  # at most
LATENCY_SYNCS_MAX = 3.0  # p99 is at most so many times the p99 of a sync in the same run


def title(part: str) -> str:
    """Of a table: `part` is a workload, or a workload and a size of it."""
    workload, _, size = part.partition(" ")
    return TITLES[workload].format(f"{int(size):,}" if size.isdigit() else size)


def chosen(only: list[str]) -> list[Contender]:
    """All, or those whose name begins with one of the words; Fairway always, because the ratios need it."""
    if not only:
        return list(CONTENDERS)
    wanted = [each for each in CONTENDERS if any(each.name.startswith(word) for word in only)]
    ours = CONTENDERS[0]
    return wanted if ours in wanted else [ours, *wanted]
