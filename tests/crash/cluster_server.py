"""One copy of a broker group in a process of its own, to be killed: `python -m tests.crash.cluster_server ORDERS`.

It is what `fairway broker --registry URL --group NAME` runs, with small segments where that is asked for.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec

from fairway.cli import replica_server
from fairway.cli.broker import broker_options
from fairway.cli.settings import CliOptions
from fairway.runtime import service
from tests.crash.broker_server import STORE


class Orders(msgspec.Struct, frozen=True):
    """What one process is to be."""

    root: str
    group: str
    listens: tuple[str, int]
    advertised: tuple[str, int]
    registry: str
    session_ms: int
    min_in_sync: int
    is_small: bool = True  # small segments and frequent checkpoints: within seconds there are many
    flaw: str = ""  # planted, one of `cluster_planted`

    @property
    def options(self) -> CliOptions:
        host, port = self.listens
        return CliOptions(
            data=self.root,
            host=host,
            port=port,
            allow_remote=host != "127.0.0.1",
            registry=self.registry,
            group=self.group,
            advertise="{}:{}".format(*self.advertised),
            session_ms=self.session_ms,
            min_in_sync=self.min_in_sync,
        )


def _planted(flaw: str) -> AbstractContextManager[None]:
    if not flaw:
        return nullcontext()
    from tests.simulation.cluster_planted import BUGS

    return BUGS[flaw].plant()


def main(raw: str) -> None:
    orders = msgspec.json.decode(raw, type=Orders)
    options = orders.options
    broker = replace(broker_options(options), drain_ms_max=500)
    if orders.is_small:
        broker = replace(broker, store=STORE)
    with _planted(orders.flaw):
        service.run_server(replica_server.serve(Path(orders.root), options, broker))


if __name__ == "__main__":
    main(sys.argv[1])
