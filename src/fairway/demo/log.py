"""`fairway demo log`: crash recovery and damage detection of the log.

A child process appends batches to a real store and prints the number of each confirmed batch. The demo kills the child
with SIGKILL. Then it opens the directory as a broker does after a crash, and compares: every confirmed message must be
there, and no message that was never sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway import batch, demo, limits
from fairway.cli import directory, output
from fairway.cli.directory import look
from fairway.errors import FairwayError, Misuse, StorageFault
from fairway.group_events import ActionKind, GroupEvent
from fairway.names import Subject
from fairway.runtime import terminal
from fairway.runtime.clock import RealClock
from fairway.runtime.rng import RealRng

if TYPE_CHECKING:
    from rich.console import Console

    from fairway.storage.store import Store

_SUBJECTS = (Subject("order.changed"), Subject("stock.moved"), Subject("invoice.sent"))
_BATCH_MESSAGES = 100
_IN_FLIGHT_MAX = 8  # batches that the child has appended, and the store has not confirmed
_GROUP_ID = 7  # the consumer group whose acks the child writes
_KILL_AFTER = 400  # confirmed batches, and up to as many more by chance: a second or two, and several segments
_SILENCE_S = 30.0  # the child speaks within milliseconds; a machine that swaps may need longer
_CREATED_MS = 1_700_000_000_000

DataDirectory = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Use and keep this directory; it must be new or empty.")
]
IsWriter = Annotated[bool, typer.Option("--writer", hidden=True, help="The child that is killed.")]


def log(data: DataDirectory = None, writer: IsWriter = False) -> None:
    """Show crash recovery: append, kill the writer, recover, flip a bit, verify, inspect."""
    with output.failures("demo log"):
        if writer and data is not None:
            asyncio.run(_write(data))
            return
        with _place(data) as root:
            is_right = _LogDemo(terminal.console(), root).run()
    if not is_right:
        raise typer.Exit(output.Exit.DAMAGE)


def _place(data: Path | None) -> AbstractContextManager[Path]:
    if data is not None and data.exists() and (not data.is_dir() or any(data.iterdir())):
        raise Misuse(f"{data} is not empty: the demonstration damages what it finds there, so name a new directory")
    return demo.directory(data)


# --- the child --------------------------------------------------------------------------------------------------------


def _batch(number: int) -> tuple[Subject, bytes]:
    """The batch that the child appends as its `number`-th: both processes can make it."""
    subject = number % len(_SUBJECTS)
    first = number // len(_SUBJECTS) * _BATCH_MESSAGES
    payloads = [f"{_SUBJECTS[subject]} {first + index}".encode().ljust(100, b".") for index in range(_BATCH_MESSAGES)]
    data = batch.encode(payloads, producer_id=subject + 1, first_sequence=first, created_ms=_CREATED_MS + number)
    return _SUBJECTS[subject], data


def _open(root: Path) -> Store:
    from fairway.runtime.real_disk import RealDisk
    from fairway.storage.store import Store, StoreOptions

    loop = asyncio.get_running_loop()
    disk = RealDisk(root, post=loop.call_soon_threadsafe)
    options = StoreOptions(  # small, so that a short run has several segments and needs little room
        segment_bytes=limits.MIB, action_segment_bytes=64 * limits.KIB, low_water_bytes=8 * limits.MIB
    )
    try:
        return Store.open(disk, RealClock(), RealRng(), defer=loop.call_soon, options=options)
    except FairwayError:
        disk.close()
        raise


async def _write(root: Path) -> None:
    """Append until killed, or until the parent closes the pipe. Print the number of each batch once it is durable."""
    from fairway.storage.action_log import Action

    store = _open(root)
    try:
        clock = RealClock()
        waiting: deque[tuple[int, asyncio.Task[None]]] = deque()
        number = 0
        while True:
            subject, data = _batch(number)
            receipt = store.produce(subject, data)
            waiting.append((number, asyncio.ensure_future(store.durable(receipt))))
            span = (receipt.first_sequence, receipt.count)
            store.act(
                [Action(_GROUP_ID, receipt.subject_id, GroupEvent(ActionKind.ACK, clock.wall_ms(), ranges=(span,)))]
            )
            number += 1
            while len(waiting) >= _IN_FLIGHT_MAX:
                confirmed, durable = waiting.popleft()
                await durable
                terminal.say(str(confirmed))
    except BrokenPipeError:
        pass
    finally:
        await store.close()


# --- the show ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """The batches of a store by number, and how many messages differ from those sent."""

    numbers: set[int]
    phantom: int

    @property
    def messages(self) -> int:
        return len(self.numbers) * _BATCH_MESSAGES


class _LogDemo:
    """The acts, in order."""

    def __init__(self, out: Console, root: Path) -> None:
        self._out = out
        self._root = root

    def run(self) -> bool:
        """Run all acts; returns whether every check passed."""
        from rich.text import Text

        confirmed = self._append_and_crash()
        self._act("Recover: open the directory as a broker would after the crash")
        recovered = asyncio.run(self._recover())
        lost = len(confirmed - recovered.numbers) * _BATCH_MESSAGES
        counts = f"acknowledged {len(confirmed) * _BATCH_MESSAGES:,}, recovered {recovered.messages:,}"
        verdict = Text(f"lost {lost:,}, phantom {recovered.phantom:,}", "bold")
        self._out.print(f"  {counts},", verdict, soft_wrap=True)
        self._say("(what was recovered beyond the acknowledged had reached the disk, but not its acknowledgement)")
        is_found = self._rot()
        self._act("Open it once more: the rest is served")
        served = asyncio.run(self._recover())
        self._say(
            f"{served.messages:,} of {recovered.messages:,} messages served, {served.phantom} of them wrong: "
            "the damaged batch is held back, not guessed at"
        )
        self._act("fairway inspect")
        directory.show_survey(self._out, self._root.name, look(self._root, verify=False))
        is_served = len(recovered.numbers - served.numbers) == 1
        return not lost and not recovered.phantom and not served.phantom and is_found and is_served

    def _act(self, title: str) -> None:
        self._out.print()
        from rich.text import Text

        self._out.rule(Text(title, "bold"), align="left", characters="─")

    def _say(self, sentence: str) -> None:
        self._out.print(f"  {sentence}", soft_wrap=True)

    def _append_and_crash(self) -> set[int]:
        from fairway.runtime.process import Child

        enough = _KILL_AFTER + RealRng().below(_KILL_AFTER)
        self._act("Append, then kill -9")
        confirmed: set[int] = set()
        with (
            self._out.status("a child process appends batches of 100 messages, synced") as status,
            Child("fairway", "demo", "log", "--writer", "--data", str(self._root)) as child,
        ):
            while len(confirmed) < enough:
                line = child.line(timeout_s=_SILENCE_S)
                if line is None:
                    raise StorageFault(f"the writing process {child.pid} ended by itself: see its message above")
                confirmed.add(int(line))
                if not len(confirmed) % 20:
                    status.update(f"process {child.pid}: {len(confirmed) * _BATCH_MESSAGES:,} messages acknowledged")
            child.kill()
            while (line := child.line(timeout_s=_SILENCE_S)) is not None:  # lines that the child printed before it died
                confirmed.add(int(line))
            self._say(f"process {child.pid} killed in the middle of its work: {len(confirmed):,} batches acknowledged")
        return confirmed

    async def _recover(self) -> _Found:
        """Open, read everything back, compare with what was sent, close."""
        store = _open(self._root)
        for each in store.findings:
            size = each.damage.end - each.damage.start
            kept = f", kept in {each.aside}" if each.aside else ""
            self._say(f"{each.verdict.value}: {output.size(size)} at {each.damage.start:,} ({each.damage.why}){kept}")
        if not store.findings:
            self._say("both logs are whole up to their last record: nothing to cut")
        found: set[int] = set()
        phantom = 0
        for subject in _SUBJECTS:
            for number, data in _stored(store, subject):
                if data == _batch(number)[1]:
                    found.add(number)
                else:
                    phantom += _BATCH_MESSAGES
        await store.close()
        return _Found(found, phantom)

    def _rot(self) -> bool:
        """Flip a bit of a batch in the middle of the log; returns whether verify finds exactly that batch."""
        self._act("Rot: flip one bit in the middle of the log, then fairway verify")
        before = look(self._root, verify=False, records_max=_KILL_AFTER)
        batches = [each for each in before.records if each.kind == "DATA"]
        victim = batches[len(batches) // 2]
        home = max((each for each in before.messages.segments if each.base <= victim.position), key=lambda s: s.base)
        path = self._root / home.file
        data = bytearray(path.read_bytes())
        data[victim.position - home.base + victim.bytes // 2] ^= 1
        path.write_bytes(data)
        self._say(f"one bit of {home.file}, in the batch of {victim.subject} from sequence {victim.first_sequence:,}")
        self._out.print()
        found = look(self._root, verify=True)
        directory.show_verified(self._out, self._root.name, found)
        return [(each.start, each.verdict) for each in found.damages] == [(victim.position, "rotten")]


def _stored(store: Store, subject: Subject) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of every batch of a subject that the store serves."""
    state = store.messages.views.subjects.find(subject)
    sequence = 0
    while state is not None and sequence < state.next_sequence:
        read = store.messages.read(state.id, sequence, messages_max=10_000, bytes_max=4 * limits.MIB)
        for stored in read:
            batches_before = stored.entry.first_sequence // _BATCH_MESSAGES
            yield batches_before * len(_SUBJECTS) + _SUBJECTS.index(subject), stored.data
        sequence += _BATCH_MESSAGES  # past a batch that the store withholds
        if read:
            sequence = read[-1].entry.end_sequence
