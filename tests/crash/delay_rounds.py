"""Delay servers and brokers that are killed for a while, programs that schedule, and the judgement of what arrived.

There are three forms, and a fourth in `delay_pair`. `serve`: the commands `fairway broker` and `fairway delay serve`,
both killed at random instants. `up`: the command `fairway up`. `places`: a delay server that dies at one named place
after the other (`delay_server`), by itself and with its broker in the same process by turns. Its clock jumps by days
between its lives.

In the end all that is pending comes due and arrives, the delay server is killed once more, and nothing more may come.
"""

from __future__ import annotations

import itertools
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fairway.errors import FairwayError
from tests.crash import delay_server
from tests.crash.broker_rounds import START_S_MAX, Process
from tests.crash.delay_ledger import Breach, DelayLedger, Promise, Shifts
from tests.crash.delay_server import PLACES, Doom
from tests.crash.delay_worker import FAR_MS, Orders
from tests.support.ports import free_port

FORMS = ("serve", "up", "places")
SUBJECTS = ("remind", "close")
LIFE_S_MAX = 1.5
DOOMED_S_MAX = 2.0
AWAY_S_MAX = 0.3
STOPS_ONE_IN = 6
BROKER_KILLS_ONE_IN = 3  # lives that end are a broker's
JUMP_MS_MAX = 6 * 86_400_000  # a stream that nobody uses is forgotten after a week
DRAIN_S_MAX = 60.0
AFTERMATH_S = 0.7


@dataclass
class DelayCounts:
    """What the rounds came to."""

    delay_kills: int = 0
    broker_kills: int = 0
    up_kills: int = 0
    place_kills: int = 0
    stops: int = 0
    places: set[str] = field(default_factory=set)
    told: Counter[str] = field(default_factory=Counter)
    breaches: list[Breach] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.breaches and not self.failures

    @property
    def kills(self) -> int:
        return self.delay_kills + self.broker_kills + self.up_kills + self.place_kills

    def figures(self) -> dict[str, Any]:
        found = Counter(each.promise for each in self.breaches)
        return {
            "delay server kills": self.delay_kills,
            "broker kills": self.broker_kills,
            "kills of both in one": self.up_kills,
            "kills at named places": self.place_kills,
            "places reached": f"{len(self.places)} of {len(PLACES)}",
            "clean stops": self.stops,
            **self.told,
            **{each.name.lower(): found[each] for each in Promise},
            "failed": len(self.failures),
        }


class DelayStage:
    """The processes of one run in one folder."""

    def __init__(self, folder: Path, form: str, seed: int, counts: DelayCounts, *, is_embedded: bool = False) -> None:
        self._folder = folder
        self._form = form
        self._seed = seed
        self._counts = counts
        self._is_embedded = is_embedded or form == "up"
        self._rng = random.Random(f"delay/{form}/{seed}")
        self._broker_port, self._delay_port = free_port(), free_port()
        self._shifts = Shifts()
        self._shift_ms = 0
        self._lives = 0
        self._servers: dict[str, Process] = {}
        self._programs: list[Process] = []
        self._tell_shift()

    # --- servers -----------------------------------------------------------------------------------------------------

    @property
    def _server(self) -> str:
        """The process that the delayed messages are in."""
        return "up" if self._is_embedded else "delay"

    def start(self, name: str, doom: Doom | None = None) -> bool:
        """Whether it came up: a doomed one may die before."""
        self._lives += 1
        if name == self._server:
            self._shifts.note(time.time_ns() // 1_000_000, self._shift_ms)
        process = Process(self._folder, f"{name}-{self._lives}", *self._command(name, doom))
        self._servers[name] = process
        deadline = time.monotonic() + START_S_MAX
        while b"ready" not in process.said.read_bytes() and process.is_alive and time.monotonic() < deadline:
            time.sleep(0.005)
        is_up = b"ready" in process.said.read_bytes()
        if not is_up and doom is None:
            raise FairwayError(f"{name} does not start: {process.failure}")
        return is_up

    def _command(self, name: str, doom: Doom | None) -> list[str]:
        data = str(self._folder / f"data-{name}")
        if name == self._server and self._form == "places":
            port, broker_port = self._delay_port, self._broker_port
            if self._is_embedded:
                port, broker_port = self._broker_port, 0
            orders = delay_server.Orders(data, port, broker_port, self._shift_ms, doom)
            return ["tests.crash.delay_server", msgspec.json.encode(orders).decode()]
        command = ["fairway", *{"delay": ["delay", "serve"]}.get(name, [name]), "--data", data]
        if name == "delay":
            return [*command, "--port", str(self._delay_port), "--broker", f"east=127.0.0.1:{self._broker_port}"]
        return [*command, "--port", str(self._broker_port)]

    def end(self, name: str, *, is_clean: bool = False) -> None:
        process = self._servers.pop(name)
        if is_clean:
            process.send(signal.SIGTERM)
            if not process.wait(START_S_MAX):
                self._counts.failures.append(f"{name} does not stop")
                process.kill()
            self._counts.stops += 1
        else:
            process.kill()
            kind = {"broker": "broker_kills", "up": "up_kills", "delay": "delay_kills"}[name.partition("-")[0]]
            setattr(self._counts, kind, getattr(self._counts, kind) + 1)
        if process.failure:
            self._counts.failures.append(process.failure)

    def _tell_shift(self) -> None:
        path = self._folder / "shift"
        path.with_suffix(".new").write_text(str(self._shift_ms))
        path.with_suffix(".new").rename(path)

    def _jump(self, by_ms: int) -> None:
        """Between two lives: so much time has passed."""
        self._shift_ms += by_ms
        self._tell_shift()

    # --- programs ----------------------------------------------------------------------------------------------------

    @property
    def _url(self) -> str:
        url = f"fairway://127.0.0.1:{self._broker_port}"
        return url if self._is_embedded else f"{url}?delay=127.0.0.1:{self._delay_port}"

    def start_programs(self) -> None:
        for name in ("p0", "p1", "witness"):
            orders = Orders(
                name,
                f"{self._seed}/{name}",
                self._url,
                SUBJECTS,
                str(self._folder / "shift"),
                is_consumer=name == "witness",
                has_far=self._form == "places",
            )
            text = msgspec.json.encode(orders).decode()
            self._programs.append(Process(self._folder, name, "tests.crash.delay_worker", text))
        deadline = time.monotonic() + START_S_MAX
        for process in self._programs:
            while not process.said.stat().st_size and process.is_alive and time.monotonic() < deadline:
                time.sleep(0.01)

    def close(self) -> None:
        for process in [*self._programs, *self._servers.values()]:
            if process.is_alive:
                process.kill()

    # --- the run -----------------------------------------------------------------------------------------------------

    def play(self, seconds: float, dooms: Iterator[Doom]) -> None:
        for name in () if self._is_embedded else ("broker",):
            self.start(name)
        self.start(self._server)
        self.start_programs()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._form == "places":
                self._doomed_life(next(dooms))
            else:
                self._life()

    def _life(self) -> None:
        time.sleep(self._rng.random() * LIFE_S_MAX)
        names = [self._server]
        if not self._is_embedded and self._rng.randrange(BROKER_KILLS_ONE_IN) == 0:
            names = self._rng.choice((["broker"], ["broker", "delay"]))
        for name in names:
            self.end(name, is_clean=self._rng.randrange(STOPS_ONE_IN) == 0)
        time.sleep(self._rng.random() * AWAY_S_MAX)
        for name in names:
            self.start(name)

    def _doomed_life(self, doom: Doom) -> None:
        """One that is alive is ended, one that is doomed takes its place."""
        if self._server in self._servers:
            self.end(self._server, is_clean=self._rng.randrange(STOPS_ONE_IN) == 0)
        if self._rng.randrange(2):
            self._jump(self._rng.randrange(JUMP_MS_MAX))
        self.start(self._server, doom)
        process = self._servers[self._server]
        if process.wait(DOOMED_S_MAX):
            del self._servers[self._server]
            self._counts.place_kills += 1
            self._counts.places.add(doom.place)
            if process.failure:
                self._counts.failures.append(process.failure)

    # --- the end -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Producers finish, everything comes due and arrives; then the delay server is killed once more."""
        if self._server not in self._servers:
            self.start(self._server)
        *producers, consumer = self._programs
        for process in producers:
            process.send(signal.SIGUSR1)
        for process in producers:
            if not process.wait(DRAIN_S_MAX):
                self._counts.failures.append(f"{process.name} cannot get rid of its messages")
        if self._form == "places":
            self.end(self._server)
            self._jump(2 * FAR_MS)
            self.start(self._server)
        deadline = time.monotonic() + DRAIN_S_MAX
        while self._read().missing() and time.monotonic() < deadline:
            time.sleep(0.2)
        self.end(self._server)
        self.start(self._server)
        time.sleep(AFTERMATH_S)
        consumer.send(signal.SIGTERM)
        for process in self._programs:
            if not process.wait(START_S_MAX):
                self._counts.failures.append(f"{process.name} does not end")
            elif process.failure:
                self._counts.failures.append(process.failure)

    def _read(self) -> DelayLedger:
        ledger = DelayLedger(self._shifts)
        ledger.read(process.said for process in self._programs)
        return ledger

    def judge(self) -> None:
        ledger = self._read()
        self._counts.breaches += ledger.judge()
        self._counts.told.update(ledger.figures())


def dooms(rng: random.Random) -> Iterator[Doom]:
    """Every named place, the first time and later ones, for ever."""
    for nth in itertools.chain((1, 2), iter(lambda: rng.randrange(1, 12), None)):
        for place in rng.sample(PLACES, len(PLACES)):
            yield Doom(place, nth)


def run(
    form: str,
    seconds: float,
    seed: int,
    counts: DelayCounts,
    *,
    is_embedded: bool = False,
    planned: Iterator[Doom] | None = None,
    made: type[DelayStage] = DelayStage,
) -> DelayCounts:
    """One run of so many seconds, drained and judged."""
    planned = dooms(random.Random(f"dooms/{seed}")) if planned is None else planned
    with tempfile.TemporaryDirectory(prefix="fairway-delay-") as name:
        stage = made(Path(name), form, seed, counts, is_embedded=is_embedded)
        try:
            stage.play(seconds, planned)
            stage.drain()
            stage.judge()
        except FairwayError as error:
            counts.failures.append(f"given up: {error}")
        finally:
            stage.close()
    return counts
