"""How many Python calls of the broker one produce and one pull take, file by file.

    python -m bench.calls            both, with the calls of each file
    python -m bench.calls --json     the same figures for a program
    python -m bench.calls --rounds N

A broker runs on the loop of this process, with a real disk and a real connection; `sys.setprofile` counts the calls of
functions in `src/fairway` on that thread alone. The client runs on a thread of its own and is not counted. Each
request is alone: the next one leaves when the broker has been quiet for a while. A round sends one message, pulls it
and acks it. The figures are those of the round with the median number of calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import fairway
from bench.machine import describe
from fairway import batch
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.protocol import Connection, ControlMessage, HandshakeDone, RefusalReceived, ResponseReceived, Role
from fairway.protocol import messages as m
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from fairway.runtime.service import run

SOURCE = f"{Path(fairway.__file__).parent}/"
SUBJECT, GROUP, CONSUMER = "bench", "bench", "ann"
QUIET_S = 0.03  # after an answer: what the broker still does for the request
BYTES_MAX = 1 << 20
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})

Calls = dict[str, int]


class CallCounter:
    """A profile function: calls of functions below `SOURCE`, by file. Comprehensions do not count."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_name not in _COMPREHENSIONS:
            self.calls[code.co_filename.removeprefix(SOURCE)] += 1


class BlockingClient:
    """One connection, one request at a time."""

    def __init__(self, port: int) -> None:
        self._connection = Connection(Role.CLIENT, time.monotonic_ns())
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._until(HandshakeDone)

    def ask(self, message: ControlMessage, attachments: Sequence[bytes] = ()) -> ControlMessage:
        self._connection.request(message, attachments)
        answer = self._until(ResponseReceived)
        return answer.message  # type: ignore[no-any-return,attr-defined]

    def close(self) -> None:
        self._socket.close()

    def _until(self, kind: type) -> object:
        while True:
            if parts := self._connection.take():
                self._socket.sendall(b"".join(parts))  # in one packet, as asyncio's `writelines` does
            for event in self._connection.feed(self._socket.recv(65_536), time.monotonic_ns()):
                if isinstance(event, RefusalReceived):
                    raise event.refused
                if isinstance(event, kind):
                    return event


def rounds_of(port: int, counter: CallCounter, rounds: int) -> dict[str, list[Calls]]:
    """The calls of each produce and each pull, by file."""
    client = BlockingClient(port)
    found: dict[str, list[Calls]] = {"produce": [], "pull": []}

    def counted(kind: str, message: ControlMessage, attachments: Sequence[bytes] = ()) -> ControlMessage:
        time.sleep(QUIET_S)
        before = counter.calls.copy()
        answer = client.ask(message, attachments)
        time.sleep(QUIET_S)
        found[kind].append(dict(counter.calls - before))
        return answer

    client.ask(m.Join(SUBJECT, GROUP, CONSUMER, 0, 0))
    arrived = 0
    for number in range(rounds + 1):
        data = batch.encode([b"x" * 100], producer_id=7, first_sequence=number, created_ms=1)
        counted("produce", m.Produce(SUBJECT), [data])
        pulled = counted("pull", m.Pull(SUBJECT, GROUP, CONSUMER, 1_000, BYTES_MAX, 0, arrived))
        assert isinstance(pulled, m.Pulled)
        arrived = pulled.number
        outcomes = [m.Settle(m.Settlement.ACK, lot.first, lot.attempt, lot.spans) for lot in pulled.lots]
        client.ask(m.SettleAll(SUBJECT, GROUP, CONSUMER, outcomes, arrived))
    client.close()
    return {kind: each[1:] for kind, each in found.items()}  # the first round makes the subject and the actors


async def _measure(root: str, rounds: int) -> dict[str, list[Calls]]:
    loop = asyncio.get_running_loop()
    world = BrokerWorld(RealClock(), RealDisk(root, post=loop.call_soon_threadsafe), RealNet(), RealRng())
    broker = await Broker.start(world, BrokerOptions(port=0))
    counter = CallCounter()
    sys.setprofile(counter)
    try:
        return await asyncio.to_thread(rounds_of, broker.port, counter, rounds)
    finally:
        sys.setprofile(None)
        await broker.stop()


def measure(rounds: int) -> dict[str, Calls]:
    """The calls of the median produce and the median pull, by file."""
    found: dict[str, list[Calls]] = {}

    async def serve(root: str) -> None:
        found.update(await _measure(root, rounds))

    with tempfile.TemporaryDirectory(prefix="fairway-calls-") as root:
        run(serve(root))
    return {kind: sorted(each, key=lambda calls: sum(calls.values()))[len(each) // 2] for kind, each in found.items()}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench calls", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    found = measure(asked.rounds)
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    print(describe(Path.cwd()))
    for kind, calls in found.items():
        print(f"one {kind}: {sum(calls.values())} calls in {len(calls)} files")
        for file, count in sorted(calls.items(), key=lambda each: (-each[1], each[0])):
            print(f"  {count:>4}  {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
