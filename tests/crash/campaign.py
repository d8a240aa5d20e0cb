"""`python -m tests.crash.campaign`: kill writers and brokers hundreds of times, cut their power, count what was lost.

    --kills N        rounds that end with SIGKILL: at random instants, at every named point of the disk, in recovery too
    --power-cuts N   rounds on an ext4 image whose power is cut; skipped, with a word, where it cannot be mounted
    --seed K         which instants, points and payloads (instants are those of a real machine: no two runs are alike)
    --broker-s N     so many seconds of a broker that is killed among clients that are processes too (`broker_rounds`)
    --clients-s N    the same with programs that use the public clients, and are killed too (`clients_rounds`)
    --away-s N       and a broker that does not return for so long, once
    --delay-s N      the same with delay servers, and messages that are due later (`delay_rounds`)
    --inbox-s N      programs that book payments into SQLite, PostgreSQL and MariaDB, killed with the broker
                     (`inbox_rounds`); then some of it without an inbox, which must show payments that are booked twice
    --spool-s N      producers that share a spool are killed, and a broker that stays away (`spool_rounds`)
    --career-s N     candidates for a career on ZooKeeper, killed, stopped and cut off (`career_rounds`); then some of
                     it without a fence, which must show what deposed leaders did
    --outbox-s N     programs that sell and say so through outboxes in the same databases, their relays and the broker,
                     all of them killed (`outbox_rounds`)
    --outbox-away-s N  for how long at most there is no broker, in every other run of these
    --minutes N      a broker group of two and of three copies on a real ZooKeeper, with programs that use it: killed,
                     stopped, cut off, wiped, restarted (`cluster_rounds`)
    --part P         storage, broker, clients, delay, inbox, spool, career, outbox or cluster: only this one
    --json           the counts for a program

After each round a copy of the directory is recovered and judged (`ledger`), every few rounds once more without its
views; the writer goes on with the original. Exit status 4: something was lost, invented, changed, or called rotten.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fairway.runtime.real_disk import POINTS
from fairway.storage import checkpoint, index_file
from tests.crash import (
    broker_rounds,
    career_rounds,
    clients_rounds,
    cluster_report,
    cluster_rounds,
    delay_pair,
    delay_rounds,
    inbox_rounds,
    outbox_rounds,
    residue,
    spool_rounds,
)
from tests.crash.career_rounds import CareerCounts
from tests.crash.inbox_rounds import InboxCounts
from tests.crash.ledger import Judgement, Ledger, judge
from tests.crash.outbox_rounds import OutboxCounts
from tests.crash.power import NotAllowed, Rack, rack
from tests.crash.streams import VISITORS_FROM
from tests.crash.writer import Doom, Orders
from tests.support.databases import mariadb, postgresql
from tests.support.namespaces import NamespaceWires
from tests.support.namespaces import NotAllowed as NoNamespaces
from tests.support.wires import ProxyWires
from tests.support.zookeeper import ensemble

KILLS = 400
POWER_CUTS = 40
BROKER_S = 180
BROKER_RUN_S = 30  # then a new directory, and new clients
CLIENTS_S = 120
AWAY_S = 60
DELAY_S = 150
SPOOL_S = 120
INBOX_S = 120
OUTBOX_S = 120
OUTBOX_AWAY_S = 10.0
CAREER_S = 180
CLUSTER_MINUTES = 6.0
CLUSTER_RUN_S = 100  # then another group, of two and of three copies in turn
UNFENCED_S = 30  # without a fence, to prove the instrument
BARE_S = 15  # without an inbox, to prove the instrument
UNSYNCED_CUTS = 6  # to prove the instrument
LIVES_PER_DIRECTORY = 20  # then a new one: the first start of a directory is a place to die too
REBUILD_EVERY = 4  # rounds
RUN_S_MAX = 0.25
START_S_MAX = 30.0
EXIT_DAMAGE = 4

REPOSITORY = Path(__file__).resolve().parents[2]
Tick = Callable[[], object]


@dataclass
class Counts:
    """What a campaign comes to."""

    rounds: int = 0
    random_kills: int = 0
    point_kills: int = 0
    recovery_kills: int = 0  # those of the kills that hit a store before it was open
    power_cuts: int = 0
    directories: int = 0
    lives: int = 0
    sent: int = 0
    acknowledged: int = 0
    originals: int = 0
    points: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    judgement: Judgement = field(default_factory=Judgement)

    @property
    def clean(self) -> bool:
        return self.judgement.clean and not self.failures

    def close(self, ledger: Ledger) -> None:
        """A directory has had its lives."""
        self.directories += 1
        self.lives += ledger.lives
        self.sent += len(ledger.sent) + len(ledger.acting)
        self.acknowledged += ledger.acknowledged
        self.originals += ledger.originals

    def figures(self) -> dict[str, Any]:
        found = self.judgement
        return {
            "rounds": self.rounds,
            "random kills": self.random_kills,
            "kills at named points": self.point_kills,
            "of them in recovery": self.recovery_kills,
            "power cuts": self.power_cuts,
            "directories": self.directories,
            "points reached": f"{len(self.points)} of {len(POINTS)}",
            "torn tails cut": found.torn,
            "batches read back": found.batches,
            "sent": self.sent,
            "answered with the original receipt": self.originals,
            "acknowledged": self.acknowledged,
            "lost": found.lost,
            "phantom": found.phantom,
            "corrupt": found.corrupt,
            "rotten": found.rotten,
            "failed": len(self.failures),
        }


class Life:
    """One process of the writer."""

    def __init__(self, orders: Orders, said: Path) -> None:
        self._said = said
        self._errors = said.with_suffix(".errors")
        command = [sys.executable, "-m", "tests.crash.writer", msgspec.json.encode(orders).decode()]
        environment = {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}", "PYTHONDONTWRITEBYTECODE": "1"}
        with said.open("wb") as out, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)

    def await_word(self, word: str) -> None:
        """Wait until the writer has said it, or has ended."""
        deadline = time.monotonic() + START_S_MAX
        while word not in self.lines() and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)

    def ended_by_itself(self, wait_s: float) -> bool:
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def lines(self) -> list[str]:
        return self._said.read_text().splitlines()

    @property
    def failure(self) -> str:
        """Why it ended, if not by a SIGKILL."""
        if self._process.returncode == -signal.SIGKILL:
            return ""
        return f"status {self._process.returncode}: {self._errors.read_text()[-2_000:]}"


class Directory:
    """A data directory, the writer's lives in it, and the ledger over all of them."""

    def __init__(self, root: Path, folder: Path, seed: int, counts: Counts, *, synced: bool = True) -> None:
        self.root = root
        self.ledger = Ledger(seed)
        self._folder = folder
        self._counts = counts
        self._synced = synced
        self._round = 0

    def start(self, doom: Doom | None = None) -> Life:
        self._round += 1
        self._counts.rounds += 1
        resume = self.ledger.resume() | {VISITORS_FROM + self._round: 0}
        next_action = max(self.ledger.acting, default=0) + 1
        orders = Orders(str(self.root), self.ledger.seed, self._round, resume, next_action, doom, self._synced)
        return Life(orders, self._folder / "said")

    def settle(self, life: Life, *, may_fail: bool = False) -> None:
        """The writer is dead: note what it said, and judge what it left."""
        lines = life.lines()
        self.ledger.take(lines)
        self._counts.recovery_kills += "open" not in lines
        if life.failure and not may_fail:
            self._counts.failures.append(f"the writer failed: {life.failure}")
        self._judge(without_views=False)
        if self._round % REBUILD_EVERY == 0:
            self._judge(without_views=True)

    def _judge(self, *, without_views: bool) -> None:
        copy = self._folder / "copy"
        shutil.copytree(self.root, copy) if self.root.exists() else copy.mkdir()
        try:
            if without_views:
                for view in (checkpoint.DIRECTORY, index_file.DIRECTORY):
                    shutil.rmtree(copy / view, ignore_errors=True)
            self._counts.judgement.add(judge(copy, self.ledger))
        except Exception as error:  # whatever it is, recovery must not end so
            self._counts.failures.append(f"recovery failed: {error!r}")
        finally:
            shutil.rmtree(copy)


# A store that opens does not commit, and one that runs does not cut.
PLACES = [(phase, point) for point in POINTS for phase in ("run", "open")
          if (phase == "open" or "truncate" not in point) and (phase == "run" or point not in POINTS[:4])]  # fmt: skip


def dooms(rng: random.Random) -> Iterator[Doom]:
    """Every named point, while running and while opening, the first time and later ones, for ever."""
    for nth in itertools.chain((1, 2), iter(lambda: rng.randrange(1, 12), None)):
        for phase, point in PLACES:
            yield Doom(phase, point, nth if phase == "run" else min(nth, 3))


def kill_rounds(kills: int, seed: int, counts: Counts, tick: Tick, planned: Iterator[Doom] | None = None) -> None:
    """Rounds that end with SIGKILL; every other one at a point from `planned`."""
    rng = random.Random(f"kills/{seed}")
    planned = dooms(rng) if planned is None else planned
    with tempfile.TemporaryDirectory(prefix="fairway-crash-") as name:
        folder = Path(name)
        for first in range(0, kills, LIVES_PER_DIRECTORY):
            directory = Directory(folder / f"data-{first}", folder, seed + first, counts)
            for number in range(first, min(first + LIVES_PER_DIRECTORY, kills)):
                kill_round(directory, rng, counts, next(planned, None) if number % 2 else None)
                tick()
            counts.close(directory.ledger)
            shutil.rmtree(directory.root, ignore_errors=True)


def kill_round(directory: Directory, rng: random.Random, counts: Counts, doom: Doom | None) -> None:
    if rng.randrange(3) == 0 or (doom is not None and doom.phase == "open"):
        residue.plant(directory.root, rng)
    life = directory.start(doom)
    life.await_word("begin" if rng.randrange(3) == 0 else "open")
    if life.ended_by_itself(rng.random() * RUN_S_MAX if doom is None else 4 * RUN_S_MAX) and doom is not None:
        counts.point_kills += 1
        counts.points.add(doom.point)
    else:
        life.kill()
        counts.random_kills += 1
    directory.settle(life)


def power_rounds(cuts: int, seed: int, counts: Counts, tick: Tick, *, synced: bool = True) -> None:
    """Rounds that end with a power cut; `NotAllowed` where the machine has none to cut."""
    rng = random.Random(f"power/{seed}")
    lives = LIVES_PER_DIRECTORY if synced else 1  # what lost something cannot be gone on with
    with rack() as machine, tempfile.TemporaryDirectory(prefix="fairway-crash-") as name:
        for first in range(0, cuts, lives):
            directory = Directory(machine.root, Path(name), seed + first, counts, synced=synced)
            for _ in range(first, min(first + lives, cuts)):
                power_round(directory, machine, rng)
                counts.power_cuts += 1
                tick()
            counts.close(directory.ledger)
            shutil.rmtree(directory.root, ignore_errors=True)


def power_round(directory: Directory, machine: Rack, rng: random.Random) -> None:
    life = directory.start()
    life.await_word("begin" if rng.randrange(5) == 0 else "open")
    time.sleep(rng.random() * 2 * RUN_S_MAX)
    machine.cut()
    life.ended_by_itself(0.02)  # whether it notices or not, it is not to answer any more
    life.kill()
    machine.restore()
    directory.settle(life, may_fail=True)


def _shown(figures: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in figures.items()
    )


@contextlib.contextmanager
def _progress(title: str, total: int, quiet: bool) -> Iterator[Tick]:
    if quiet or not total:
        yield lambda: None
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


@dataclass
class Report:
    seed: int
    counts: Counts = field(default_factory=Counts)
    unsynced: Counts = field(default_factory=Counts)
    skipped: str = ""  # why there were no power cuts

    @property
    def proven(self) -> bool:
        """Whether the same power cuts show losses where nothing is synced."""
        return bool(self.skipped) or not self.unsynced.rounds or self.unsynced.judgement.lost > 0

    @property
    def clean(self) -> bool:
        return self.counts.clean and self.proven


def run(kills: int, power_cuts: int, seed: int, *, quiet: bool = True) -> Report:
    report = Report(seed)
    with _progress("kills", kills, quiet) as tick:
        kill_rounds(kills, seed, report.counts, tick)
    unsynced_cuts = min(power_cuts, UNSYNCED_CUTS)
    try:
        with _progress("power cuts", power_cuts, quiet) as tick:
            power_rounds(power_cuts, seed, report.counts, tick)
        with _progress("power cuts, nothing synced", unsynced_cuts, quiet) as tick:
            power_rounds(unsynced_cuts, seed, report.unsynced, tick, synced=False)
    except NotAllowed as reason:
        report.skipped = str(reason)
    return report


def show(report: Report) -> None:
    print(f"seed {report.seed}: {_shown(report.counts.figures())}")
    if report.skipped:
        print(f"power cuts skipped: {report.skipped}")
    elif report.unsynced.rounds:
        lost, acknowledged = report.unsynced.judgement.lost, report.unsynced.acknowledged
        word = "the instrument works" if report.proven else "THE INSTRUMENT SHOWS NOTHING"
        print(
            f"with syncing switched off: {report.unsynced.rounds} power cuts lost {lost:,} of {acknowledged:,}: {word}"
        )
    for sentence in [*report.counts.judgement.sentences, *report.counts.failures[:5]]:
        print(sentence, file=sys.stderr)


def run_broker(seconds: float, seed: int, *, quiet: bool = True) -> broker_rounds.Counts:
    """Runs of half a minute each, until the time is used up."""
    counts = broker_rounds.Counts()
    runs = max(1, round(seconds / BROKER_RUN_S))
    with _progress("broker runs", runs, quiet) as tick:
        for number in range(runs):
            broker_rounds.run(seconds / runs, seed + number, counts)
            tick()
    return counts


def run_clients(seconds: float, away_s: float, seed: int, *, quiet: bool = True) -> clients_rounds.ClientCounts:
    """The same through the public clients; then once without a broker for long."""
    counts = clients_rounds.ClientCounts()
    runs = max(1, round(seconds / BROKER_RUN_S)) if seconds > 0 else 0
    with _progress("client runs", runs + (away_s > 0), quiet) as tick:
        for number in range(runs):
            clients_rounds.run(seconds / runs, seed + number, counts)
            tick()
        if away_s > 0:
            clients_rounds.run_away(away_s, seed, counts)
            tick()
    return counts


def run_delay(seconds: float, seed: int, *, quiet: bool = True) -> delay_rounds.DelayCounts:
    """As commands, as one process and as a pair, killed at random instants; then at every named place."""
    counts = delay_rounds.DelayCounts()
    planned = delay_rounds.dooms(random.Random(f"dooms/{seed}"))
    plan = [("serve", False), ("up", True), ("places", False), ("pair", False), ("places", True)]
    runs = max(len(plan), round(seconds / BROKER_RUN_S))
    with _progress("delay runs", runs, quiet) as tick:
        for number, (form, is_embedded) in zip(range(runs), itertools.cycle(plan), strict=False):
            made = delay_pair.PairStage if form == "pair" else delay_rounds.DelayStage
            delay_rounds.run(
                form, seconds / runs, seed + number, counts, is_embedded=is_embedded, planned=planned, made=made
            )
            tick()
    return counts


def run_inbox(seconds: float, seed: int, *, quiet: bool = True) -> tuple[InboxCounts, InboxCounts]:
    """With an inbox, and for a while without; on servers whose commits are durable."""
    counts, bare = InboxCounts(), InboxCounts()
    runs = max(1, round(seconds / BROKER_RUN_S))
    with postgresql() as one, mariadb() as other, _progress("inbox runs", runs + 1, quiet) as tick:
        servers = [("postgresql", one), ("mariadb", other)]
        for number in range(runs):
            inbox_rounds.run(seconds / runs, seed + number, counts, servers)
            tick()
        inbox_rounds.run(min(seconds, BARE_S), seed, bare, servers, is_idempotent=False)
        tick()
    return counts, bare


def run_outbox(seconds: float, away_s: float, seed: int, *, quiet: bool = True) -> OutboxCounts:
    """On servers whose commits are durable; the broker is back soon and late by turns."""
    counts = OutboxCounts()
    runs = max(1, round(seconds / BROKER_RUN_S))
    with postgresql() as one, mariadb() as other, _progress("outbox runs", runs, quiet) as tick:
        for number in range(runs):
            servers = [("postgresql", one), ("mariadb", other)]
            away_s_max = outbox_rounds.AWAY_S_MAX if number % 2 else away_s
            outbox_rounds.run(seconds / runs, seed + number, counts, servers, away_s_max=away_s_max)
            tick()
    return counts


def run_spool(seconds: float, seed: int, *, quiet: bool = True) -> spool_rounds.SpoolCounts:
    """Runs of half a minute each, until the time is used up."""
    counts = spool_rounds.SpoolCounts()
    runs = max(1, round(seconds / BROKER_RUN_S))
    with _progress("spool runs", runs, quiet) as tick:
        for number in range(runs):
            spool_rounds.run(seconds / runs, seed + number, counts)
            tick()
    return counts


def run_career(seconds: float, seed: int, *, quiet: bool = True) -> tuple[CareerCounts, CareerCounts]:
    """On three servers of ZooKeeper and a durable database; then for a while without a fence, where leaders stop."""
    counts, bare = CareerCounts(), CareerCounts()
    runs = max(1, round(seconds / BROKER_RUN_S / 2))
    with postgresql() as url, ensemble(3) as zookeeper, _progress("career runs", runs + 1, quiet) as tick:
        for number in range(runs):
            career_rounds.run(seconds / runs, seed + number, counts, zookeeper, url)
            tick()
        stops = itertools.repeat("stop")
        career_rounds.run(min(seconds, UNFENCED_S), seed, bare, zookeeper, url, planned=stops, is_fenced=False)
        tick()
    return counts, bare


def run_cluster(minutes: float, seed: int, *, quiet: bool = True) -> cluster_rounds.ClusterCounts:
    """On three servers of ZooKeeper, which all share; in namespaces, where the machine allows that, or with proxies."""
    counts = cluster_rounds.ClusterCounts()
    runs = max(1, round(minutes * 60 / CLUSTER_RUN_S))
    with ensemble(3) as zookeeper, _progress("cluster runs", runs, quiet) as tick:
        for number in range(runs):
            copies, lay = 2 + number % 2, (NamespaceWires, ProxyWires)[number // 2 % 2]
            try:
                cluster_rounds.run(minutes * 60 / runs, seed + number, counts, zookeeper, copies=copies, lay=lay)
            except NoNamespaces as reason:
                counts.wires[f"proxies: {reason}"] += 1
                cluster_rounds.run(minutes * 60 / runs, seed + number, counts, zookeeper, copies=copies)
            tick()
    return counts


def show_unfenced(bare: CareerCounts) -> None:
    word = "the instrument works" if bare.breaches else "THE INSTRUMENT SHOWS NOTHING"
    print(f"without a fence: {len(bare.breaches)} deeds of deposed leaders in {bare.rows} rows: {word}")
    for sentence in bare.failures[:5]:
        print(sentence, file=sys.stderr)


def show_bare(bare: InboxCounts) -> None:
    word = "the instrument works" if bare.twice_by_crash else "THE INSTRUMENT SHOWS NOTHING"
    print(f"without an inbox: {bare.twice_by_crash} of {bare.payments} booked twice by crashes: {word}")


Reckoning: TypeAlias = broker_rounds.Counts | delay_rounds.DelayCounts | spool_rounds.SpoolCounts | CareerCounts


def show_broker(what: str, counts: Reckoning) -> None:
    print(f"{what}: {_shown(counts.figures())}")
    details = counts.details[:5] if isinstance(counts, OutboxCounts) else []
    for sentence in [*map(str, counts.breaches[:5]), *counts.failures[:5], *details]:
        print(sentence, file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="real crashes of real processes: what is lost? nothing")
    parts = ["storage", "broker", "clients", "delay", "inbox", "spool", "career", "outbox", "cluster"]
    parser.add_argument("--part", choices=parts, help="only this one")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--power-cuts", type=int, default=POWER_CUTS)
    parser.add_argument("--broker-s", type=float, default=BROKER_S)
    parser.add_argument("--clients-s", type=float, default=CLIENTS_S)
    parser.add_argument("--away-s", type=float, default=AWAY_S)
    parser.add_argument("--delay-s", type=float, default=DELAY_S)
    parser.add_argument("--inbox-s", type=float, default=INBOX_S)
    parser.add_argument("--outbox-s", type=float, default=OUTBOX_S)
    parser.add_argument("--outbox-away-s", type=float, default=OUTBOX_AWAY_S)
    parser.add_argument("--spool-s", type=float, default=SPOOL_S)
    parser.add_argument("--career-s", type=float, default=CAREER_S)
    parser.add_argument("--minutes", type=float, default=CLUSTER_MINUTES, help="of the part cluster; %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON, without a progress bar")
    return parser.parse_args(argv)


def simple_parts(options: argparse.Namespace) -> dict[str, Callable[[], Reckoning]]:
    """Those that come to nothing but their counts."""
    seed, quiet = options.seed, options.json
    return {
        "broker": lambda: run_broker(options.broker_s, seed, quiet=quiet),
        "clients": lambda: run_clients(options.clients_s, options.away_s, seed, quiet=quiet),
        "delay": lambda: run_delay(options.delay_s, seed, quiet=quiet),
        "spool": lambda: run_spool(options.spool_s, seed, quiet=quiet),
        "outbox": lambda: run_outbox(options.outbox_s, options.outbox_away_s, seed, quiet=quiet),
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that mounts are cleared away then too
    told: dict[str, Any] = {"seed": options.seed}
    is_clean = True
    if options.part in (None, "storage"):
        report = run(options.kills, options.power_cuts, options.seed, quiet=options.json)
        told |= {**report.counts.figures(), "skipped": report.skipped, "unsynced": report.unsynced.figures()}
        is_clean = report.clean
        if not options.json:
            show(report)
    for name, play in simple_parts(options).items():
        if options.part in (None, name):
            counts = play()
            told[name] = counts.figures()
            is_clean = is_clean and counts.clean
            if not options.json:
                show_broker(name, counts)
    if options.part in (None, "inbox"):
        inbox, bare = run_inbox(options.inbox_s, options.seed, quiet=options.json)
        told["inbox"] = {**inbox.figures(), "without": bare.figures()}
        is_clean = is_clean and inbox.clean and bare.twice_by_crash > 0
        if not options.json:
            show_broker("inbox", inbox)
            show_bare(bare)
    if options.part in (None, "career"):
        career, unfenced = run_career(options.career_s, options.seed, quiet=options.json)
        told["career"] = {**career.figures(), "without": unfenced.figures()}
        is_clean = is_clean and career.clean and bool(unfenced.breaches)
        if not options.json:
            show_broker("career", career)
            show_unfenced(unfenced)
    if options.part in (None, "cluster"):
        cluster = run_cluster(options.minutes, options.seed, quiet=options.json)
        told["cluster"] = cluster.figures()
        is_clean = is_clean and cluster.clean
        if not options.json:
            cluster_report.show(cluster)
    if options.json:
        print(json.dumps({**told, "clean": is_clean}))
    return 0 if is_clean else EXIT_DAMAGE


if __name__ == "__main__":
    sys.exit(main())
