"""Candidates for one career that are killed, stopped and cut off, and the judgement of what they wrote down.

A real ZooKeeper, a real database, candidates in processes of their own (`career_worker`), each with a cable of its own
to ZooKeeper. Whoever rules is disturbed, again and again:

    kill       SIGKILL; another takes its place in the line later
    stop       SIGSTOP for longer than its session lasts, then SIGCONT: it goes on as if nothing had happened
    nap        SIGSTOP for less than that: nobody else may rule
    cut        its connections to ZooKeeper break, and none can be made, until another one rules
    freeze     the same, and it can only notice by waiting; the database stays within reach
    term       SIGTERM: it hands over, and ends

Then another one must rule and write. In the end the rows of the database say whether anything that a deposed leader did
was accepted: they are numbered in the order of their transactions, and their tokens must never decrease.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from fairway.errors import FairwayError
from fairway.sql import Fence
from tests.crash.broker_rounds import Process
from tests.crash.career_worker import EFFECTS, METADATA, Orders
from tests.support.cable import Cable
from tests.support.databases import fresh
from tests.support.zookeeper import Ensemble

CANDIDATES = 3
SESSION_MS = 1_500
PATIENCE_S = 60.0  # for another one to rule
PAUSE_S = 1.0  # between two looks that are 10 ms apart: the machine did nothing, or something else
ABRUPT = ("kill", "stop", "cut", "freeze")
DEEDS = (*ABRUPT, "nap", "term")


class Line(NamedTuple):
    """What a candidate said."""

    at_ms: int
    what: str
    token: int
    who: str


class Row(NamedTuple):
    number: int
    token: int
    who: str


@dataclass
class CareerCounts:
    """What the rounds came to."""

    deeds: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    abrupt_ms: list[int] = field(default_factory=list)  # from the deed to the next leader's first row
    graceful_ms: list[int] = field(default_factory=list)
    pauses: int = 0  # of the whole machine: what was measured meanwhile does not count
    rows: int = 0
    reigns: int = 0
    breaches: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.breaches and not self.failures

    def figures(self) -> dict[str, Any]:
        return {
            **{f"{deed}s": self.deeds[deed] for deed in DEEDS},
            "reigns": self.reigns,
            "rows": self.rows,
            "refused to deposed leaders": self.told["refused"],
            "handed over in office": self.told["handed over"],
            "handed over deposed": self.told["handed over late"],
            "session ms": SESSION_MS,
            "takeovers": len(self.abrupt_ms) + len(self.graceful_ms),
            "disturbed by a pause of the machine": self.pauses,
            "abrupt takeover p50 ms": percentile(self.abrupt_ms, 50),
            "p99 ms": percentile(self.abrupt_ms, 99),
            "graceful takeover p50 ms": percentile(self.graceful_ms, 50),
            "graceful p99 ms": percentile(self.graceful_ms, 99),
            "accepted from deposed leaders": len(self.breaches),
            "failed": len(self.failures),
        }


def percentile(samples: Sequence[int], percent: int) -> int:
    """With few samples, the worst of them."""
    if len(samples) < 2:
        return samples[0] if samples else 0
    return round(statistics.quantiles(samples, n=100, method="inclusive")[percent - 1])


def judge(rows: Sequence[Row], lines: Sequence[Line]) -> list[str]:
    """What must not be, one sentence each."""
    found = []
    largest, owners = 0, dict[int, str]()
    for row in rows:
        if row.token < largest:
            found.append(f"row {row.number} of token {row.token} was accepted after token {largest}")
        largest = max(largest, row.token)
        if owners.setdefault(row.token, row.who) != row.who:
            found.append(f"token {row.token} is of {owners[row.token]} and of {row.who}")
    written = Counter(row.token for row in rows)
    for token, count in Counter(line.token for line in lines if line.what == "wrote").items():
        if count > written[token]:
            found.append(f"token {token} wrote {count} rows, and {written[token]} are there")
    for left in lines:
        early = (line for line in lines if line.what == "inaugurated" and line.token > left.token)
        if left.what == "handed over" and any(line.at_ms < left.at_ms for line in early):
            found.append(f"token {left.token} was in office and handing over when a later one was inaugurated")
    return found


class Candidate:
    """One place among the candidates, through as many lives as it takes."""

    def __init__(self, name: str, folder: Path, orders: Callable[[str, int], Orders], zookeeper_port: int) -> None:
        self.name = name
        self.cable = Cable(zookeeper_port)
        self._folder = folder
        self._orders = orders
        self._lives = 0
        self.process = self._start()
        self.lines: list[Line] = []
        self._read_bytes = 0

    def _start(self) -> Process:
        self._lives += 1
        self._read_bytes = 0
        name = f"{self.name}.{self._lives}"
        orders = msgspec.json.encode(self._orders(name, self.cable.port)).decode()
        return Process(self._folder, name, "tests.crash.career_worker", orders)

    def restart(self) -> None:
        self.read()
        self.process = self._start()

    def read(self) -> list[Line]:
        """All that it has said in all its lives; half a line is for later."""
        with self.process.said.open("rb") as said:
            said.seek(self._read_bytes)
            whole, newline, _ = said.read().rpartition(b"\n")
        if newline:
            self._read_bytes += len(whole) + 1
            for at_ms, what, token in map(json.loads, whole.splitlines()):
                self.lines.append(Line(at_ms, what, token, self.process.name))
        return self.lines


class CareerStage:
    """The candidates of one career."""

    def __init__(
        self,
        folder: Path,
        ensemble: Ensemble,
        database: str,
        seed: int,
        counts: CareerCounts,
        *,
        is_fenced: bool = True,
    ) -> None:
        self._rng = random.Random(f"career/{seed}")
        self._counts = counts
        self._longest_poll_s = 0.0
        self._engine = sa.create_engine(database)
        METADATA.create_all(self._engine)
        Fence(self._engine).create()

        def orders(name: str, port: int) -> Orders:
            return Orders(
                name=name,
                hosts=f"127.0.0.1:{port}",
                path=f"/career-{seed}-{folder.name}",
                session_ms=SESSION_MS,
                database=database,
                seed=f"{seed}/{name}",
                in_hand=self._rng.choice(("finish", "abort")) if is_fenced else "finish",
                is_fenced=is_fenced,
            )

        servers = ensemble.servers
        self._everybody = [
            Candidate(f"c{number}", folder, orders, servers[number % len(servers)].port) for number in range(CANDIDATES)
        ]

    # --- what is seen ------------------------------------------------------------------------------------------------

    def _lines(self) -> list[Line]:
        return [line for candidate in self._everybody for line in candidate.read()]

    def _await_row(self, after_token: int, *, after_ms: int = 0) -> Line:
        """The first row that is written by a later reign, or by this one after that time; whose it is."""
        deadline = time.monotonic() + PATIENCE_S
        self._longest_poll_s = 0.0
        while (began := time.monotonic()) < deadline:
            written = [line for line in self._lines() if line.what == "wrote" and line.token >= after_token]
            found = [line for line in written if line.token > after_token or (after_ms and line.at_ms > after_ms)]
            if found:
                return min(found)
            self._check_lives()
            time.sleep(0.01)
            self._longest_poll_s = max(self._longest_poll_s, time.monotonic() - began)
        raise FairwayError(f"nobody has written anything since token {after_token}, for {PATIENCE_S:g} s")

    def _check_lives(self) -> None:
        for candidate in self._everybody:
            if not candidate.process.is_alive and candidate.process.failure:
                raise FairwayError(candidate.process.failure)

    def _ruler(self) -> tuple[Candidate, int]:
        """Who wrote last under the largest token."""
        newest = max(self._lines(), key=lambda line: (line.token, line.what == "wrote"))
        return next(each for each in self._everybody if each.process.name == newest.who), newest.token

    # --- what is done ------------------------------------------------------------------------------------------------

    def play(self, seconds: float, deeds: Iterator[str]) -> None:
        self._await_row(0)
        deadline = time.monotonic() + seconds
        for deed in deeds:
            if time.monotonic() > deadline:
                break
            time.sleep(self._rng.random() * 0.3)
            ruler, token = self._ruler()
            if not ruler.process.is_alive:
                continue
            self._counts.deeds[deed] += 1
            getattr(self, f"_{deed}")(ruler, token)

    def _note(self, times: list[int], token: int, began_ms: int) -> None:
        """How long it took until somebody else wrote. One that had let another one have its turn anyway is no case."""
        taken_ms = self._await_row(token).at_ms - began_ms
        if self._longest_poll_s > PAUSE_S:
            self._counts.pauses += 1
        elif taken_ms >= 0:
            times.append(taken_ms)

    def _kill(self, ruler: Candidate, token: int) -> None:
        began_ms = _now_ms()
        ruler.process.kill()
        self._note(self._counts.abrupt_ms, token, began_ms)
        ruler.restart()

    def _stop(self, ruler: Candidate, token: int) -> None:
        began_ms = _now_ms()
        ruler.process.send(signal.SIGSTOP)
        try:
            self._note(self._counts.abrupt_ms, token, began_ms)
            time.sleep(self._rng.random() * 0.5)
        finally:
            ruler.process.send(signal.SIGCONT)

    def _nap(self, ruler: Candidate, token: int) -> None:
        ruler.process.send(signal.SIGSTOP)
        time.sleep(self._rng.random() * SESSION_MS / 3_000)
        ruler.process.send(signal.SIGCONT)
        self._await_row(token, after_ms=_now_ms())

    def _cut(self, ruler: Candidate, token: int) -> None:
        began_ms = _now_ms()
        ruler.cable.cut()
        try:
            self._note(self._counts.abrupt_ms, token, began_ms)
        finally:
            ruler.cable.mend()

    def _freeze(self, ruler: Candidate, token: int) -> None:
        began_ms = _now_ms()
        ruler.cable.freeze()
        try:
            self._note(self._counts.abrupt_ms, token, began_ms)
        finally:
            ruler.cable.mend()

    def _term(self, ruler: Candidate, token: int) -> None:
        began_ms = _now_ms()
        ruler.process.send(signal.SIGTERM)
        self._note(self._counts.graceful_ms, token, began_ms)
        if not ruler.process.wait(PATIENCE_S):
            raise FairwayError(f"{ruler.process.name} does not end")
        self._check_lives()
        ruler.restart()

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everybody ends in order, and what they have done is judged."""
        for candidate in self._everybody:
            candidate.process.send(signal.SIGTERM)
        for candidate in self._everybody:
            if not candidate.process.wait(PATIENCE_S):
                self._counts.failures.append(f"{candidate.process.name} does not end")
            elif candidate.process.failure:
                self._counts.failures.append(candidate.process.failure)
        with self._engine.connect() as connection:
            rows = [Row(*row) for row in connection.execute(sa.select(EFFECTS).order_by(EFFECTS.c.number))]
        lines = self._lines()
        self._counts.breaches += judge(rows, lines)
        self._counts.rows += len(rows)
        self._counts.reigns += len({row.token for row in rows})
        self._counts.told.update(line.what for line in lines)

    def close(self) -> None:
        for candidate in self._everybody:
            if candidate.process.is_alive:
                candidate.process.kill()
            candidate.cable.close()
        self._engine.dispose()


def deeds(rng: random.Random) -> Iterator[str]:
    """Every kind in every round, for ever."""
    while True:
        yield from rng.sample(DEEDS, len(DEEDS))


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def run(
    seconds: float,
    seed: int,
    counts: CareerCounts,
    ensemble: Ensemble,
    database_url: str,
    *,
    planned: Iterator[str] | None = None,
    is_fenced: bool = True,
) -> CareerCounts:
    """One run of so many seconds, judged."""
    planned = deeds(random.Random(f"deeds/{seed}")) if planned is None else planned
    with tempfile.TemporaryDirectory(prefix="fairway-career-") as name:
        stage = CareerStage(Path(name), ensemble, fresh(database_url), seed, counts, is_fenced=is_fenced)
        try:
            stage.play(seconds, planned)
            stage.finish()
        except FairwayError as error:
            counts.failures.append(f"given up: {error}")
        finally:
            stage.close()
    return counts
