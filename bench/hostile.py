"""A good client beside bad ones: how long does send, pull and ack take, alone and under each attack of tests/hostile?

Three rounds in turn, so that all see the same machine:

    alone       nobody else is there
    control     the attack goes to another broker: what the attacker takes from the machine, and nothing else
    attacked    the attack goes to the good client's broker

Brokers, attacker and good client are a process each. Attacker and second broker yield to the other two, in the control
as under attack, so that they take little from the machine. On a machine with other work, client and broker ask for a
higher priority than that work. If this user may not have it, attacker and second broker take the lowest priority. The
attack is repeated without a pause until its round is over; how often it came to its end is shown, for an attacker that
finds no time is none.

The figure is the median of the rounds' p99. The ratio to the control is what the broker is to blame for, and should
stay within 2; the ratio to alone is what the good client sees on a machine that attacker and broker have to share.

The last column is the most memory that the attacked broker had under the attack; it should stay below its ceiling
(`--memory-mib`).

`back in s` is the longest time, over the rounds, from the end of an attack until a message takes no longer than twice
the p99 alone.

The data lies in memory where there is such a directory, so that a slow disk cannot hide what an attack costs; `--data`
names another place.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from fairway.errors import Refused
from fairway.limits import MIB
from fairway.runtime.process import Child, ChildSilent
from tests.hostile.broker_attacks import ATTACKS, client, forget_peak, give_way, peak_bytes
from tests.support.client import Client, Stream

T = TypeVar("T")

ROUND_S = 3.0
RATIO_MAX = 2.0
RECOVERY_S_GOAL = 1.0
RECOVERY_S_MAX = 30.0
MEMORY_MIB = 1_536  # with the default buffers
IN_MEMORY = Path("/dev/shm")
GOOD_NICE, BAD_NICE = -10, 0
LOWEST_NICE = 19


class Good:
    """A client that sends, pulls and acks, one after the other, and looks at the clock."""

    def __init__(self, one: Client) -> None:
        self._one = one
        self._stream = Stream(77)
        self._arrived = 0

    async def p99_ms(self, seconds: float) -> float:
        """Of the time from a send to the answer to its ack."""
        took_ms: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            begun = time.perf_counter()
            await self._once()
            took_ms.append((time.perf_counter() - begun) * 1_000)
            await asyncio.sleep(0.001)
        return statistics.quantiles(took_ms, n=100)[98]

    async def recovery_s(self, bound_ms: float) -> float:
        """How long until a message takes no longer than the bound, from now on."""
        begun = time.perf_counter()
        while (sent := time.perf_counter()) < begun + RECOVERY_S_MAX:
            await self._once()
            if (time.perf_counter() - sent) * 1_000 <= bound_ms:
                break
        return time.perf_counter() - begun

    async def _once(self) -> None:
        data = self._stream.batch([b"x" * 100])
        await _patient(lambda: self._one.produce("good", data))
        got = await _patient(lambda: self._one.pull("good", "group", "ann", arrived=self._arrived, wait_ms=1_000))
        await self._one.settle("good", "group", "ann", got.lots, arrived=got.number)
        self._arrived = got.number


async def _patient(ask: Callable[[], Awaitable[T]]) -> T:
    """As every client does: where the broker says when to ask again, then."""
    while True:
        try:
            return await ask()
        except Refused as refused:
            if refused.retry_after_ms is None:
                raise
            await asyncio.sleep(refused.retry_after_ms / 1_000)


@contextmanager
def _attacking(attack: str, port: int, nice: int, tally: list[int]) -> Iterator[None]:
    """While this attack goes on, again and again; how often it came to its end is noted."""
    with Child("tests.hostile.broker_attacks", attack, str(port), str(nice)) as attacker:
        attacker.line(timeout_s=60)
        yield
        done = 0
        with suppress(ChildSilent):
            while attacker.line(timeout_s=0) is not None:
                done += 1
            raise SystemExit(f"the attacker gave up: {attack}")
        tally.append(done)


async def _measure(attacks: Sequence[str], port: int, pid: int, other_port: int, nice: int, rounds: int) -> None:
    one = await client(port)
    await one.join("good", "group", "ann")
    good = Good(one)
    await good.p99_ms(1)
    ratios = f"{'/ control':>11}{'/ alone':>9}"
    print(
        f"{'p99 in ms':<20}{'alone':>9}{'control':>9}{'attacked':>9}{ratios}{'attacks':>9}{'MiB':>7}{'back in s':>11}"
    )
    for attack in attacks:
        alone: list[float] = []
        control: list[float] = []
        attacked: list[float] = []
        tally: list[int] = []
        recoveries_s: list[float] = []
        forget_peak(pid)
        for _ in range(rounds):
            alone.append(await good.p99_ms(ROUND_S))
            with _attacking(attack, other_port, nice, []):
                control.append(await good.p99_ms(ROUND_S))
            with _attacking(attack, port, nice, tally):
                attacked.append(await good.p99_ms(ROUND_S))
            recoveries_s.append(await good.recovery_s(RATIO_MAX * alone[-1]))
        medians = (statistics.median(alone), statistics.median(control), statistics.median(attacked))
        peak_mib = peak_bytes(pid) // MIB
        _report(attack, *medians, attacks=sum(tally), peak_mib=peak_mib, recovery_s=max(recoveries_s))
    one.abort()
    await asyncio.sleep(0.1)


def _report(
    attack: str, alone: float, control: float, attacked: float, *, attacks: int, peak_mib: int, recovery_s: float
) -> None:
    verdict = "" if attacked <= RATIO_MAX * control else f"   more than {RATIO_MAX:g}"
    verdict += "" if peak_mib <= MEMORY_MIB else f"   more than {MEMORY_MIB} MiB"
    verdict += "" if recovery_s <= RECOVERY_S_GOAL else f"   back after more than {RECOVERY_S_GOAL:g} s"
    figures = f"{alone:>9.2f}{control:>9.2f}{attacked:>9.2f}{attacked / control:>11.2f}{attacked / alone:>9.2f}"
    print(f"{attack:<20}{figures}{attacks:>9}{peak_mib:>7}{recovery_s:>11.2f}{verdict}", flush=True)


@contextmanager
def _broker(data: Path) -> Iterator[tuple[int, int]]:
    """Its port and process."""
    memory = ("--memory-mib", str(MEMORY_MIB))
    with Child("fairway", "broker", "--data", str(data), "--port", "0", *memory) as broker:
        ready = broker.line(timeout_s=60) or ""
        yield int(ready.split(",")[0].rsplit(":", 1)[1]), broker.pid


def _nice_of_the_bad(*good_pids: int) -> int:
    """Let the good ones go first; how nice the bad ones must then be."""
    try:
        for pid in good_pids:
            give_way(pid, GOOD_NICE)
    except PermissionError:
        return LOWEST_NICE
    return BAD_NICE


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench hostile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [attack.__name__ for attack in ATTACKS]
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attack", choices=names, action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--data", type=Path, default=IN_MEMORY if IN_MEMORY.is_dir() else None, help="where to put data"
    )
    chosen = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory(prefix="fairway-bench-", dir=chosen.data) as folder,
        _broker(Path(folder) / "attacked") as (port, pid),
        _broker(Path(folder) / "other") as (other_port, other_pid),
    ):
        nice = _nice_of_the_bad(pid, os.getpid())
        give_way(other_pid, nice)
        print(f"control: the same attack, on another broker; memory ceiling {MEMORY_MIB} MiB")
        print(f"nice values: attacker and other broker {nice}, good client and its broker {os.nice(0)}")
        asyncio.run(_measure(chosen.attack or names, port, pid, other_port, nice, chosen.rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
