"""`fairway broker`: one broker on one data directory, until it is told to end."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway import limits
from fairway.cli import output

if TYPE_CHECKING:
    from fairway.broker.server import Broker, BrokerOptions

_SPARE_DESCRIPTORS = 256  # for segments, indexes and the loop itself


class DurabilityChoice(enum.Enum):
    """`fairway.storage` has the same; it is not imported for the sake of a help text."""

    SYNC = "sync"
    MEMORY = "memory"


Data = Annotated[Path, typer.Option("--data", metavar="DIR", help="The data directory; made where it is missing.")]
Host = Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65_535, metavar="N", help="0: any that is free.")]
HttpPort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65_535, metavar="N", help="Serve /metrics, /livez and /readyz there, too; 0: any that is free."
    ),
]
Durability = Annotated[
    DurabilityChoice,
    typer.Option(
        help="When a message or an ack is answered. sync: when it survives a power cut. memory: when it survives the "
        "death of this process; it is synced ten times a second, and a power cut takes what was not."
    ),
]
BufferMib = Annotated[
    int,
    typer.Option(
        min=66,
        metavar="MIB",
        help="Memory for parts of frames, for requests that wait, and for answers that clients do not read: for each.",
    ),
]
AllowRemote = Annotated[
    bool, typer.Option("--allow-remote", help="Listen where others can connect, although nobody is asked who they are.")
]


def broker(
    data: Data,
    host: Host = "127.0.0.1",
    port: Port = 20880,
    http_port: HttpPort = None,
    durability: Durability = DurabilityChoice.SYNC,
    buffer_mib: BufferMib = 128,
    allow_remote: AllowRemote = False,
) -> None:
    """Run a broker. Prints one line with its address when it is ready.

    SIGTERM or Ctrl-C stops it: it accepts nobody any more, answers what is durable, writes a checkpoint and exits with
    status 0. Exit status 1: it could not start, or its disk failed; a sentence on stderr says why.
    """
    with output.failures("broker"):
        from fairway.broker.server import BrokerOptions
        from fairway.storage import flusher
        from fairway.storage.store import StoreOptions
        from fairway.world import service

        options = BrokerOptions(
            host=host,
            port=port,
            http_port=http_port,
            allow_remote=allow_remote,
            connections_max=_connections_max(),
            partial_bytes_max=buffer_mib * limits.MIB,
            waiting_bytes_max=buffer_mib * limits.MIB,
            unsent_bytes_max=buffer_mib * limits.MIB,
            store=StoreOptions(durability=flusher.Durability(durability.value)),
        )
        service.run(_serve(data, options))


def _connections_max() -> int:
    from fairway.broker.server import BrokerOptions
    from fairway.world import service

    return max(1, min(BrokerOptions().connections_max, service.raise_descriptor_limit() - _SPARE_DESCRIPTORS))


async def _serve(data: Path, options: BrokerOptions) -> None:
    """Start, say so, wait, stop. Raises the fault that ended it, if one did."""
    import asyncio

    from fairway.broker.server import Broker, BrokerWorld
    from fairway.world import service
    from fairway.world.clock import RealClock
    from fairway.world.net import RealNet
    from fairway.world.real_disk import RealDisk
    from fairway.world.rng import RealRng

    asked = service.asked_to_end()
    disk = RealDisk(data, post=asyncio.get_running_loop().call_soon_threadsafe)
    started = await Broker.start(BrokerWorld(RealClock(), disk, RealNet(), RealRng()), options)
    _say_ready(started, data)
    ending = [asyncio.ensure_future(asked.wait()), asyncio.ensure_future(started.failed())]
    await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
    for each in ending:
        each.cancel()
    await started.stop()


def _say_ready(started: Broker, data: Path) -> None:
    for finding in started.store.findings:
        span = f"{finding.damage.end - finding.damage.start:,} bytes at {finding.damage.start:,}"
        typer.echo(f"{finding.verdict.value}: {span}: {finding.damage.why}", err=True)
    for remark in started.store.remarks:
        typer.echo(f"remark: {remark}", err=True)
    http = f" and {started.http_url}" if started.http_url is not None else ""
    typer.echo(f"fairway broker: ready at {started.url}{http}, data in {data}")
