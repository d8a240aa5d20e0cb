"""`make run`, `fairway demo`: a broker, a shop and a stream of orders, with a live table and things to try.

The broker (`fairway up`) and the shop (`fairway demo shop`) are separate processes. The shop has three groups, written
as a user writes a program: `billing` is quick, `mailer` slow, and `fraud` fails now and then. It runs until SIGTERM,
and then prints a report of each group.

The demo restarts a killed broker on the same port and directory and tells nobody: the clients wait and go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

import fairway
from fairway import Client
from fairway.cli import output, top
from fairway.cli.arguments import KeptDirectory, Seconds
from fairway.cli.connections import describe
from fairway.cli.top import GroupRow, RateMeter
from fairway.client.sync.connection import PendingMany
from fairway.demo import TICK_S, cluster, directory, log, rounds, say_tries, screen
from fairway.errors import FairwayError, StorageFault
from fairway.protocol.admin_messages import Depth
from fairway.runtime import host, terminal
from fairway.runtime.clock import RealClock
from fairway.runtime.host import Ending
from fairway.runtime.rng import RealRng

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from fairway.runtime.process import Child

app = typer.Typer(invoke_without_command=True)
app.command("log")(log.log)
app.command("cluster")(cluster.cluster)

_ORDERS_PER_S = 300
_LOOK_S = 1.0
_ANSWER_S = 2.0  # before the screen shows the broker as down
_DRAIN_S = 10.0  # for the quick groups to finish what was sent
_END_S = 30.0


@app.callback()
def demo(context: typer.Context, seconds: Seconds = None, data: KeptDirectory = None) -> None:
    """Run a demo: a broker, a stream of orders, three consumer groups and a live table.

    One group is slow, and one fails now and then. Exit status 0: every order
    that was stored reached the group `billing`.
    """
    if context.invoked_subcommand is not None:
        return
    with output.failures("demo"), directory(data) as root, host.asked_to_end() as ending:
        is_whole = _Demo(terminal.console(), root, ending).run(seconds)
    if not is_whole:
        raise typer.Exit(output.Exit.DAMAGE)


@app.command("shop", hidden=True)
def shop(url: str) -> None:
    """Run the three consumer groups of the demo."""
    with output.failures("demo shop"):
        output.write_json_line(run_shop(url))


# --- the shop ---------------------------------------------------------------------------------------------------------

SUBJECT = "order.changed"
BILLING, MAILER, FRAUD = "billing", "mailer", "fraud"
GROUPS = (BILLING, MAILER, FRAUD)

_MAIL_S = 0.05  # four at a time: 80 a second, fewer than the orders
_MAILS_AT_ONCE = 4
_BUSY_ONE_IN = 40
_STOLEN_ONE_IN = 500  # orders, by number, that fail at every attempt
_LATENCIES = 20_000  # the latest that are kept


class ShopGroupReport(msgspec.Struct):
    """What a group did. `seen` are messages, each counted once however often it came."""

    handled: int = 0
    seen: int = 0
    retried: int = 0
    rejected: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class _Tally:
    """Written by one thread."""

    def __init__(self) -> None:
        self.report = ShopGroupReport()
        self._seen = bytearray()  # one byte for each sequence: an hour of the demo takes a megabyte
        self._latencies_ms: deque[float] = deque(maxlen=_LATENCIES)
        self._clock = RealClock()

    def note(self, message: fairway.Message) -> None:
        self.report.handled += 1
        missing = message.sequence + 1 - len(self._seen)
        if missing > 0:
            self._seen.extend(bytes(missing))
        self._seen[message.sequence] = 1
        self._latencies_ms.append(self._clock.wall_ms() - message.created_at.timestamp() * 1_000)

    def close(self) -> ShopGroupReport:
        ordered = sorted(self._latencies_ms) or [0.0]
        self.report.seen = sum(self._seen)
        self.report.p50_ms = ordered[len(ordered) // 2]
        self.report.p99_ms = ordered[len(ordered) * 99 // 100]
        return self.report


def run_shop(url: str) -> dict[str, ShopGroupReport]:
    """Handle orders until SIGTERM or Ctrl-C; what was done."""
    logging.getLogger("fairway.app").setLevel(logging.ERROR)  # the demo has its own screen
    app, rng = fairway.App(url), RealRng()
    tallies = {group: _Tally() for group in GROUPS}

    @app.listener(SUBJECT, group=BILLING)
    def bill(message: fairway.Message) -> None:
        tallies[BILLING].note(message)

    @app.listener(SUBJECT, group=MAILER, concurrency=_MAILS_AT_ONCE)
    async def mail(message: fairway.Message) -> None:
        await asyncio.sleep(_MAIL_S)
        tallies[MAILER].note(message)

    @app.listener(SUBJECT, group=FRAUD)
    def check(message: fairway.Message) -> None:
        tally = tallies[FRAUD]
        if msgspec.json.decode(message.payload)["order"] % _STOLEN_ONE_IN == 0:
            tally.report.rejected += 1
            raise fairway.Reject("a stolen card")
        if rng.below(_BUSY_ONE_IN) == 0:
            tally.report.retried += 1
            raise fairway.Retry("the model is busy", after=1)
        tally.note(message)

    app.run()
    return {group: tally.close() for group, tally in tallies.items()}


def order(number: int) -> bytes:
    """The payload of an order."""
    return msgspec.json.encode({"order": number, "total": number % 97 + 0.5})


# --- the show ---------------------------------------------------------------------------------------------------------


def _end(child: Child) -> list[str]:
    """Ask the process to end; returns its last output."""
    child.terminate()
    words = []
    while (line := child.line(timeout_s=_END_S)) is not None:
        words.append(line)
    child.wait(timeout_s=_END_S)
    return words


class _Demo:
    """Starts the processes, sends orders, shows the groups, stops all and sums up."""

    def __init__(self, out: Console, root: Path, ending: Ending) -> None:
        self._out = out
        self._ending = ending
        self._root = root
        self._clock = RealClock()
        self._watch = RateMeter()
        self._pending: list[PendingMany] = []
        self._sent = 0
        self._stored = 0
        self._failed = 0

    def run(self, seconds: float | None) -> bool:
        """Run the demo; returns whether every stored order reached `billing`."""
        from fairway.runtime.process import Child

        # Restarted at once after a kill, on the same port and directory.
        self._server = cluster.DemoServer("the broker", "", None, "up", "--data", str(self._root), away_s=0.0)
        self._url = f"fairway://{self._server.address}"
        try:
            self._server.start()
            self._server.await_ready()
            with (
                Child("fairway", "demo", "shop", self._url) as shop,
                fairway.Client(self._url) as client,  # connects in the background: the broker may be dead by now
            ):
                self._say_what_to_try()
                self._show(client, seconds)
                self._drain(client)
                words = _end(shop)
                if not words:
                    raise StorageFault("the shop has said nothing: see its message above")
                reports = msgspec.json.decode(words[-1], type=dict[str, ShopGroupReport])
                rows = self._look(client)
                self._collect(is_final=True)
            return self._sum_up(reports, rows)
        finally:
            self._server.ask_to_end()
            self._server.stop()

    # --- live --------------------------------------------------------------------------------------------------------

    def _show(self, client: Client, seconds: float | None) -> None:
        with screen(self._out) as update:
            for elapsed_s, is_look, is_due in rounds(self._ending, seconds, _LOOK_S):
                self._send(client, elapsed_s)
                if self._revive():
                    self._out.print(f"the broker was gone; it is process {self._server.pid} now")
                if is_look:
                    update(self._view(client), is_due)

    def _revive(self) -> bool:
        is_back = self._server.revive()
        if is_back:
            self._server.await_ready()
        return is_back

    def _send(self, client: Client, elapsed_s: float) -> None:
        """Send the orders that are due by now; those of a time without a broker follow when it is back."""
        due = min(round(elapsed_s * _ORDERS_PER_S) - self._sent, _ORDERS_PER_S)
        if due > 0:
            numbers = range(self._sent + 1, self._sent + 1 + due)
            keys = [f"o-{number}" for number in numbers]
            self._pending.append(client.send_many(SUBJECT, [order(number) for number in numbers], keys=keys))
            self._sent += due
        self._collect(is_final=False)

    def _collect(self, *, is_final: bool) -> None:
        """Count the stored orders; at the end, an order without a receipt is not expected to arrive."""
        waiting = []
        for many in self._pending:
            if not many.done():
                waiting.append(many)
                continue
            for batch in many.batches:
                if batch.exception() is None:
                    self._stored += batch.receipt().count
                else:
                    self._failed += batch.count
        self._pending = [] if is_final else waiting

    def _look(self, client: Client) -> list[GroupRow]:
        self._broker, subjects = describe(client, Depth.CONSUMERS, timeout_s=_ANSWER_S)
        rows = self._watch.look(subjects, now_ns=self._clock.monotonic_ns(), now_ms=self._clock.wall_ms())
        return sorted((row for row in rows if ":" not in row.subject), key=lambda row: row.group)

    def _view(self, client: Client) -> RenderableType:
        try:
            rows = self._look(client)
        except (TimeoutError, FairwayError) as error:
            return f"the broker is away, everybody waits: {error}"
        return top.table(top.title(self._broker, self._clock.wall_ms()), rows, self._out.width)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _drain(self, client: Client) -> None:
        """Wait until all orders are stored and the quick groups have them, or until a timeout."""
        end_ns = self._clock.monotonic_ns() + int(_DRAIN_S * 1e9)
        while self._clock.monotonic_ns() < end_ns:
            self._revive()
            self._collect(is_final=False)
            try:
                rows = [row for row in self._look(client) if row.group != MAILER]
            except TimeoutError:
                continue
            has_begun = len(rows) == len(GROUPS) - 1
            if has_begun and not self._pending and not any(row.lag + row.in_flight + row.waiting for row in rows):
                return
            host.sleep(TICK_S)

    def _sum_up(self, reports: dict[str, ShopGroupReport], rows: list[GroupRow]) -> bool:
        from rich.text import Text

        left = {row.group: row for row in rows}
        columns = ("orders>", "handled>", "retried>", "dead>", "still waiting>", "send to handler, median>", "99 %>")
        table = output.table("what the groups did", "group", *columns)
        for group, each in reports.items():
            row = left.get(group)
            table.add_row(
                group,
                f"{each.seen:,}",
                f"{each.handled:,}",
                f"{each.retried:,}",
                f"{row.dead if row else 0:,}",
                f"{row.lag + row.in_flight + row.waiting if row else 0:,}",
                output.age(each.p50_ms / 1_000) if each.p50_ms >= 1_000 else f"{each.p50_ms:.0f} ms",
                output.age(each.p99_ms / 1_000) if each.p99_ms >= 1_000 else f"{each.p99_ms:.0f} ms",
            )
        self._out.print(table)
        missing = max(self._stored - reports[BILLING].seen, 0)
        deaths = self._server.lives - 1
        killed = f", and the broker died {'once' if deaths == 1 else f'{deaths} times'} meanwhile" if deaths else ""
        failed = f", {self._failed:,} were refused" if self._failed else ""
        self._out.print(
            f"{self._stored:,} orders stored{failed}{killed};",
            Text(f"{missing:,} lost on the way to billing", "bold"),
            soft_wrap=True,
        )
        return not missing

    def _say_what_to_try(self) -> None:
        tries = {
            f"export FAIRWAY_URL={self._url} PATH=.venv/bin:$PATH": "",
            "fairway top": "who gets what",
            "fairway tail order.changed --json": "what is sent",
            "fairway dead list order.changed fraud": "what fraud has given up",
            "fairway dead redrive order.changed fraud --all": "and to it again",
            "fairway pause order.changed billing": "and resume: it catches up",
            "fairway doctor": "",
            f"kill -9 {self._server.pid}": "the broker: it comes back, nothing is lost",
        }
        who = "billing is quick, mailer is slow, fraud fails now and then"
        say_tries(self._out, f"{_ORDERS_PER_S} orders a second; {who}.", tries)
