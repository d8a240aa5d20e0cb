"""Peers: Redis Streams, NATS JetStream, RabbitMQ, Kafka, Dramatiq and Celery beside Fairway, in one run.

    python -m bench.peers --install             fetch what is missing, then measure
    python -m bench.peers                       measure those that are here; the others are skipped with a word
    python -m bench.peers --only kafka redis    these, and Fairway
    python -m bench.peers --workloads latency   this kind of load
    python -m bench.peers --quick               one short round: says that it works, not how fast
    python -m bench.peers --json                the figures for a program
    python -m bench.peers --plot FILE.png       and a picture

Each server is a process on loopback with a fresh directory, each client a process of its own. `contenders.py` lists
them, and says when each confirms a message and what is safe then. The head of each driver says what its client does.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    from bench.peers import command  # drivers import this package where there is neither rich nor numpy

    return command.main(argv)
