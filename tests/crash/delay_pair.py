"""Two copies of a delay server in a cluster, killed and stopped by turns, and the same judgement.

A meta server keeps the registry; the broker is a group of one. Of the pair one copy dies, or both: with its master away
for longer than a session the other one takes over, with a shorter absence it is often the same one again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.crash.broker_rounds import START_S_MAX
from tests.crash.delay_rounds import DRAIN_S_MAX, LIFE_S_MAX, STOPS_ONE_IN, DelayCounts, DelayStage
from tests.crash.delay_server import Doom
from tests.support.ports import free_port

COPIES = ("delay-a", "delay-b")
SESSION_MS = 1_000
PAIR_AWAY_S_MAX = 3.0
BOTH_ONE_IN = 6
BROKER_ONE_IN = 6
TAKEOVER_S = 4.0  # of a session, and of a start


class PairStage(DelayStage):
    """The processes of one run."""

    def __init__(self, folder: Path, form: str, seed: int, counts: DelayCounts, *, is_embedded: bool = False) -> None:
        super().__init__(folder, form, seed, counts, is_embedded=is_embedded)
        self._ports = {name: free_port() for name in ("meta", "broker", *COPIES)}

    @property
    def _url(self) -> str:
        return f"meta://127.0.0.1:{self._ports['meta']}"

    def _command(self, name: str, doom: Doom | None) -> list[str]:
        del doom
        port = ("--port", str(self._ports[name]))
        if name == "meta":
            return ["fairway", "meta", *port, "--registry", f"sqlite:{self._folder / 'registry'}"]
        verb, group = (("broker",), "east") if name == "broker" else (("delay", "serve"), "d1")
        data = ("--data", str(self._folder / f"data-{name}"))
        member = ("--registry", self._url, "--group", group, "--session-ms", str(SESSION_MS))
        return ["fairway", *verb, *data, *port, *member]

    def play(self, seconds: float, dooms: Iterator[Doom]) -> None:
        del dooms
        for name in ("meta", "broker", *COPIES):
            self.start(name)
        self.start_programs()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._life()

    def _life(self) -> None:
        time.sleep(self._rng.random() * LIFE_S_MAX)
        names = [*COPIES] if self._rng.randrange(BOTH_ONE_IN) == 0 else [self._rng.choice(COPIES)]
        if self._rng.randrange(BROKER_ONE_IN) == 0:
            names.append("broker")
        for name in names:
            self.end(name, is_clean=self._rng.randrange(STOPS_ONE_IN) == 0)
        time.sleep(self._rng.random() * PAIR_AWAY_S_MAX)
        for name in names:
            self.start(name)

    def drain(self) -> None:
        """Producers finish, everything comes due and arrives; then both copies are killed once more."""
        *producers, consumer = self._programs
        for process in producers:
            process.send(signal.SIGUSR1)
        for process in producers:
            if not process.wait(DRAIN_S_MAX):
                self._counts.failures.append(f"{process.name} cannot get rid of its messages")
        deadline = time.monotonic() + DRAIN_S_MAX
        while self._read().missing() and time.monotonic() < deadline:
            time.sleep(0.2)
        for name in COPIES:
            self.end(name)
        for name in COPIES:
            self.start(name)
        time.sleep(TAKEOVER_S)
        consumer.send(signal.SIGTERM)
        for process in self._programs:
            if not process.wait(START_S_MAX):
                self._counts.failures.append(f"{process.name} does not end")
            elif process.failure:
                self._counts.failures.append(process.failure)
