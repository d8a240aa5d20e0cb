"""The worker program of the handler workload: `python -m bench.peers.fairway_app SUBJECT`, until SIGTERM."""

from __future__ import annotations

import sys

import fairway
from bench.peers import workers

GROUP = "handlers"


def main(subject: str) -> None:
    app = fairway.App(workers.url())
    app.listener(subject, group=GROUP, concurrency=8)(on_message)
    app.run()


def on_message(_message: fairway.Message) -> None:
    return


if __name__ == "__main__":
    main(sys.argv[1])
