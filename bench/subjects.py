"""A meta server before a registry of many subjects: until it is ready, CPU of a creation, and how soon a pause is seen.

    python -m bench.subjects                0, 1,000, 10,000 and 50,000 subjects, about three minutes
    python -m bench.subjects --quick        up to 10,000
    python -m bench.subjects --json         the figures for a program
    python -m bench.subjects --holder       one client that sends to one new subject after another, and holds all
    python -m bench.subjects --broker       a broker's table instead: introduction and restart with 100,000 subjects

The meta server is a process of its own, before an SQLite registry and before a real ZooKeeper, with the session that it
asks for by default. At each size the bench measures the time from the start until the server is ready, and the
CPU-seconds of a creation, shown as each size ÷ the first; they should be flat. Where there are 10,000 subjects or more,
it also measures the time from a `subject pause` until a broker that serves 10,000 subjects knows of it.

With --holder it measures the CPU-seconds of the meta server, and of the client itself, for each subject that one client
makes by its first message. It shows the last part of the subjects ÷ the first part, which should be flat.

With --broker it measures the time to introduce a subject into an empty table and into one that is nearly full, which
should be the same. It also measures the time from opening the data directory to listening, of a broker with that many
subjects with a message each, after a clean stop and after a kill. The time is wall-clock; the CPU-seconds are beside
it, for noisy machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from bench import machine
from bench.cluster_groups import end, started
from bench.kernel_counters import cpu_s
from fairway import aio, batch, limits
from fairway.broker.broker_copy import GroupSwitches
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.errors import FairwayError
from fairway.lookup.registries import Inquirer, open_registry, parse_meta
from fairway.names import GroupName, Subject
from fairway.protocol.route_messages import Govern, Governed, RouteChange
from fairway.registry import layout
from fairway.registry.layout import MASTER, GroupRecord, RegisteredCopy, SubjectRecord
from fairway.registry.port import Exists, Registry
from fairway.registry.sqlite import SqliteRegistry
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from tests.support.ports import free_port
from tests.support.zookeeper import ensemble

READY_S_MAX = 10.0
FLAT = 1.5  # a creation at the largest size, of one at the smallest
SEEN_S_MAX = 2.0
GROUP = "east"
COPY = "00000000000000aa"
CREATIONS = 500
SERVED = 10_000
PAUSES = 5
ANSWER_S = 60.0
MEMORY = Path("/dev/shm")  # used where it is there

FULL = (0, 1_000, 10_000, 50_000)
QUICK = (0, 1_000, 10_000)
TINY = (0, 50)


class SqliteForm:
    """The registry in a file. Subjects are written on a file system that syncs for nothing, and then copied."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "registry"

    @property
    def url(self) -> str:
        return f"sqlite:{self._folder}"

    async def fill(self, first: int, after: int) -> None:
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:  # noqa: ASYNC240
            place = Path(name) / "registry"
            if self._folder.is_dir():
                shutil.copytree(self._folder, place)
            registry = await SqliteRegistry.open(str(place))
            try:
                await fill(registry, first, after)
            finally:
                await registry.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            shutil.copytree(place, self._folder)

    def registry_of_brokers(self, meta: str) -> str:
        return meta


class ZooKeeperForm:
    """The registry on a real ZooKeeper."""

    name = "zookeeper"

    def __init__(self, hosts: str) -> None:
        self.url = f"zookeeper://{hosts}"

    async def fill(self, first: int, after: int) -> None:
        registry = await open_registry(self.url, RealNet(), RealClock(), RealRng())
        try:
            await fill(registry, first, after)
        finally:
            await registry.close()

    def registry_of_brokers(self, meta: str) -> str:
        del meta
        return self.url


Form = SqliteForm | ZooKeeperForm


def name_of(number: int) -> str:
    return f"orders.{number:06d}"


async def fill(registry: Registry, first: int, after: int) -> None:
    """Subjects of these numbers, and the group that carries them."""
    record = GroupRecord("broker", 1, COPY, [COPY], members=[COPY])
    with suppress(Exists):
        await registry.create(layout.group_path(GROUP), layout.pack(record))
    value = layout.pack(SubjectRecord([GROUP], [GROUP]))
    for begin in range(first, after, 100):
        numbers = range(begin, min(begin + 100, after))
        await asyncio.gather(*(registry.create(layout.subject_path(name_of(each)), value) for each in numbers))


@asynccontextmanager
async def living(url: str) -> AsyncIterator[Registry]:
    """A session whose node says that the group has a master."""
    registry = await open_registry(url, RealNet(), RealClock(), RealRng())
    member = RegisteredCopy(COPY, "127.0.0.1", 1, MASTER, 1)
    path = layout.member_path(GROUP, layout.place_name(COPY, registry.session_id))
    try:
        await registry.create(path, layout.pack(member), is_ephemeral=True)
        yield registry
    finally:
        await registry.close()


async def create(inquirer: Inquirer, label: str, number: int) -> None:
    """So many subjects, one after the other; the first may find the group without a master."""
    for each in range(number):
        await inquirer.ask(Govern(RouteChange.CREATE, f"new.{label}.{each}"), Governed, ANSWER_S)


async def until_led(inquirer: Inquirer, label: str) -> None:
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        with suppress(FairwayError):
            await inquirer.ask(Govern(RouteChange.CREATE, f"first.{label}"), Governed, ANSWER_S)
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("the meta server makes no subject")


async def seen_s(inquirer: Inquirer, registry: Registry, served: int) -> float:
    """The longest time from the order to pause until a broker of so many subjects knows of it."""
    switches = GroupSwitches(registry, RealClock(), lambda _: None)
    subjects = [Subject.parse(name_of(number)) for number in range(served)]
    group = GroupName.parse("all")
    task = asyncio.ensure_future(switches.run())
    longest = 0.0
    try:
        for subject in subjects:
            switches.is_off(subject, group)
        await asyncio.sleep(SEEN_S_MAX)
        for subject in subjects[:: max(served // PAUSES, 1)]:
            began = time.monotonic()
            await inquirer.ask(Govern(RouteChange.PAUSE, str(subject), ["all"]), Governed, ANSWER_S)
            while not switches.is_off(subject, group) and time.monotonic() - began < ANSWER_S:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - began)
    finally:
        task.cancel()
        await asyncio.wait([task])
    return longest


async def at_size(form: Form, size: int) -> dict[str, float]:
    port = free_port()
    url = f"meta://127.0.0.1:{port}"
    began = time.monotonic()
    child = started("meta", "--registry", form.url, "--port", str(port))
    told = {"ready_s": time.monotonic() - began}
    inquirer = Inquirer(RealNet(), RealClock(), RealRng(), parse_meta(url))
    try:
        async with living(form.registry_of_brokers(url)) as registry:
            await until_led(inquirer, str(size))
            before_s = cpu_s(child.pid)
            await create(inquirer, str(size), CREATIONS)
            told["create_cpu_ms"] = (cpu_s(child.pid) - before_s) / CREATIONS * 1e3
            if size >= SERVED:
                told["pause_seen_s"] = await seen_s(inquirer, registry, SERVED)
    finally:
        inquirer.abort()
        end(child)
    return told


def measure(sizes: Sequence[int], folder: Path) -> dict[str, dict[int, dict[str, float]]]:
    found: dict[str, dict[int, dict[str, float]]] = {}
    with ExitStack() as running:
        zookeeper = running.enter_context(ensemble(1, tick_ms=500))  # grants the default session of 10 s
        for form in (SqliteForm(folder), ZooKeeperForm(zookeeper.hosts)):
            filled = 0
            for size in sizes:
                asyncio.run(form.fill(filled, size))
                filled = size
                found.setdefault(form.name, {})[size] = asyncio.run(at_size(form, size))
    return found


def summarise(found: dict[str, dict[int, dict[str, float]]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for form, sizes in found.items():
        first, last = min(sizes), max(sizes)
        growth = sizes[last]["create_cpu_ms"] / max(sizes[first]["create_cpu_ms"], 1e-9)
        seen = max((each.get("pause_seen_s", 0.0) for each in sizes.values()), default=0.0)
        ready = max(each["ready_s"] for each in sizes.values())
        told[form] = {
            "sizes": {str(size): figures for size, figures in sizes.items()},
            "create_growth": growth,
            "ready_s": ready,
            "pause_seen_s": seen,
            "met": growth <= FLAT and ready <= READY_S_MAX and seen <= SEEN_S_MAX,
        }
    return told


def show(told: dict[str, Any]) -> None:
    for form, figures in told.items():
        for size, row in figures["sizes"].items():
            seen = f", pause seen in {row['pause_seen_s']:.2f} s" if "pause_seen_s" in row else ""
            print(
                f"{form}: {int(size):>6,} subjects: ready in {row['ready_s']:.2f} s, "
                f"{row['create_cpu_ms']:.2f} ms of CPU per creation{seen}"
            )
        verdict = "met" if figures["met"] else "not met"
        print(
            f"{form}: creation at the largest ÷ at the smallest {figures['create_growth']:.2f} (at most {FLAT}), "
            f"ready in {READY_S_MAX:g} s, pause seen in {SEEN_S_MAX:g} s: {verdict}"
        )


# --- one client that makes and holds many ----------------------------------------------------------------------------

HELD = 4_000
HELD_TINY = 60
HELD_PARTS = 8  # the second and the last are compared: all but the first are made at the rate that creation has


async def held_figures(folder: Path, number: int) -> dict[str, float]:
    """CPU of the meta server and of the client for each subject that the client makes, at the start and at the end."""
    meta_port = free_port()
    url = f"meta://127.0.0.1:{meta_port}"
    meta = started("meta", "--registry", f"sqlite:{folder / 'registry'}", "--port", str(meta_port))
    broker = None
    try:
        broker = started(
            "broker", "--data", str(folder / "data"), "--port", str(free_port()), "--registry", url, "--group", GROUP
        )
        async with aio.connect(url) as client:
            for each in range(min(number, limits.SUBJECTS_CREATED_BURST // 2) + 1):
                await client.send(f"first.{each}", b"x")  # faster than all others, which creation has a rate for
            costs: list[tuple[float, float]] = []
            for part in range(HELD_PARTS):
                before_s = (cpu_s(meta.pid), time.process_time())
                for each in range(number // HELD_PARTS):
                    await client.send(f"held.{part}.{each}", b"x")
                after_s = (cpu_s(meta.pid), time.process_time())
                costs.append(((after_s[0] - before_s[0]), (after_s[1] - before_s[1])))
    finally:
        if broker is not None:
            end(broker)
        end(meta)
    per_ms = 1e3 / (number // HELD_PARTS)
    (first_meta, first_client), (last_meta, last_client) = costs[1], costs[-1]
    return {
        "meta_first_ms": first_meta * per_ms,
        "meta_last_ms": last_meta * per_ms,
        "client_first_ms": first_client * per_ms,
        "client_last_ms": last_client * per_ms,
    }


def summarise_held(told: dict[str, float]) -> dict[str, Any]:
    growth = told["meta_last_ms"] / max(told["meta_first_ms"], 1e-9)
    client_growth = told["client_last_ms"] / max(told["client_first_ms"], 1e-9)
    return {**told, "meta_growth": growth, "client_growth": client_growth, "met": max(growth, client_growth) <= FLAT}


def show_held(told: dict[str, Any], number: int) -> None:
    for who in ("meta", "client"):
        print(
            f"one client with {number:,} subjects, {who}: {told[f'{who}_first_ms']:.2f} ms of CPU for one of the first,"
            f" {told[f'{who}_last_ms']:.2f} for one of the last: ÷ {told[f'{who}_growth']:.2f} (at most {FLAT})"
        )
    print("met" if told["met"] else "not met")


# --- a broker --------------------------------------------------------------------------------------------------------

BROKER_SUBJECTS = 100_000
BROKER_TINY = 300
BROKER_STEP = 500
RESTART_S_MAX = 3.0


async def _started(folder: Path) -> tuple[Broker, float, float]:
    """A broker, and how long its start took: by the wall, and of CPU."""
    loop = asyncio.get_running_loop()
    disk = RealDisk(folder, post=loop.call_soon_threadsafe)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    broker = await Broker.start(BrokerWorld(RealClock(), disk, RealNet(), RealRng()), BrokerOptions(port=0))
    return broker, time.monotonic() - began_s, time.process_time() - began_cpu_s


async def broker_figures(folder: Path, number: int) -> dict[str, float]:
    """Of a broker with that many subjects, each with one message."""
    broker, _, _ = await _started(folder)
    store, costs = broker.store, list[float]()
    for first in range(0, number, BROKER_STEP):
        began_s = time.perf_counter()
        for each in range(first, min(first + BROKER_STEP, number)):
            store.ensure_subject(Subject.parse(name_of(each)))
        costs.append((time.perf_counter() - began_s) / min(BROKER_STEP, number - first))
        for each in range(first, min(first + BROKER_STEP, number)):
            data = batch.encode([b"x"], producer_id=each + 1, first_sequence=0, created_ms=1)
            store.produce(Subject.parse(name_of(each)), data)
        await store.messages.log.flusher.durable(store.messages.log.end)
    few = max(len(costs) // 10, 1)
    told = {"first_us": sorted(costs[:few])[few // 2] * 1e6, "last_us": sorted(costs[-few:])[few // 2] * 1e6}
    broker.abandon()
    broker, told["killed_s"], told["killed_cpu_s"] = await _started(folder)
    await broker.stop()
    broker, told["restart_s"], told["restart_cpu_s"] = await _started(folder)
    assert len(broker.store.messages.views.subjects) == number
    await broker.stop()
    return told


def summarise_broker(told: dict[str, float]) -> dict[str, Any]:
    growth = told["last_us"] / max(told["first_us"], 1e-9)
    slowest = max(told["restart_cpu_s"], told["killed_cpu_s"])
    return {**told, "growth": growth, "met": growth <= FLAT and slowest <= RESTART_S_MAX}


def show_broker(told: dict[str, Any], number: int) -> None:
    print(
        f"broker: introduction {told['first_us']:.1f} µs in an empty table, {told['last_us']:.1f} µs near {number:,} "
        f"subjects: ÷ {told['growth']:.2f} (at most {FLAT})"
    )
    print(
        f"broker: restart with {number:,} subjects {told['restart_s']:.2f} s ({told['restart_cpu_s']:.2f} s of CPU), "
        f"after a kill {told['killed_s']:.2f} s ({told['killed_cpu_s']:.2f} s of CPU), at most {RESTART_S_MAX:g} s: "
        f"{'met' if told['met'] else 'not met'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.subjects", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer subjects")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--sizes", type=int, nargs="+", help="numbers of subjects, ascending")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()), help="where; default: %(default)s")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--holder", action="store_true", help="one client that makes and holds many, instead")
    parser.add_argument("--broker", action="store_true", help="a broker's table instead of a meta server")
    options = parser.parse_args(argv)
    if options.holder:
        number = HELD_TINY if options.tiny else HELD // 2 if options.quick else HELD
        with tempfile.TemporaryDirectory(prefix="fairway-subjects-", dir=options.data) as name:
            held = summarise_held(asyncio.run(held_figures(Path(name), number)))
        if options.json:
            print(json.dumps({"holder": held, "machine": machine.describe(options.data)}))
        else:
            show_held(held, number)
            print(machine.describe(options.data))
        return 0
    if options.broker:
        number = BROKER_TINY if options.tiny else BROKER_SUBJECTS // 10 if options.quick else BROKER_SUBJECTS
        with tempfile.TemporaryDirectory(prefix="fairway-subjects-", dir=options.data) as name:
            figures = summarise_broker(asyncio.run(broker_figures(Path(name) / "data", number)))
        if options.json:
            print(json.dumps({"broker": figures, "machine": machine.describe(options.data)}))
        else:
            show_broker(figures, number)
            print(machine.describe(options.data))
        return 0
    sizes = options.sizes or (TINY if options.tiny else QUICK if options.quick else FULL)
    with tempfile.TemporaryDirectory(prefix="fairway-subjects-", dir=options.data) as name:
        told = summarise(measure(sizes, Path(name)))
    if options.json:
        print(json.dumps(told | {"machine": machine.describe(options.data)}))
    else:
        show(told)
        print(machine.describe(options.data))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped then too
    sys.exit(main())
