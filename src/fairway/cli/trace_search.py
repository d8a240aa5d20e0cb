"""Find a message by its ID: in the live log, among delayed messages, in an archive.

An ID is a producer stream and a sequence in it. The index of a subject says which sequences of which streams lie where,
so most messages are found without reading a batch. Messages with an ID of their own (delayed, replayed, written by
Spark) are not in the index under it: the search reads the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from fairway.batch import MessageId
from fairway.cli import consume, output
from fairway.cli.consume import ShownMessage
from fairway.errors import Code, FairwayError, InvariantViolated, Misuse, Refused, Unreachable
from fairway.protocol.admin_messages import Index, Indexed
from fairway.protocol.messages import ControlMessage, Whence
from fairway.storage.index_file import ENTRY, ENTRY_BYTES

if TYPE_CHECKING:
    from fairway import Client, DelayedMessage
    from fairway.cli.trace import Home, SearchScope
    from fairway.protocol.admin_messages import SubjectDescription
    from fairway.protocol.delivery import LazyBatch
    from fairway.spark.jobs.manifest import ArchiveState

AnswerT = TypeVar("AnswerT", bound=ControlMessage)
Advance = Callable[[int], None]
Look = Callable[["Client", MessageId, "SubjectDescription", Advance], ShownMessage | None]

_ENTRIES_MAX: Final = 8_192  # in one answer
_PRODUCER_AT: Final = 40  # in an entry: the stream of the batch
_PENDING_MAX: Final = (
    100_000  # delayed messages to look through: delay servers list them by page, and cannot search by ID
)


def ask(client: Client, message: ControlMessage, answer_type: type[AnswerT]) -> AnswerT:
    told = client.ask(message)
    if not isinstance(told, answer_type):
        raise InvariantViolated(f"{type(message).__name__} was answered with {told!r}")
    return told


class FoundMessage(NamedTuple):
    """A message, its broker group, and whether the group still has it.

    `home` is None for a message of an archive of another log: one that the broker had before it began anew.
    """

    message: ShownMessage
    home: Home | None
    is_live: bool = True

    @property
    def is_of_this_log(self) -> bool:
        return self.home is not None


def find(
    asked: SearchScope, id: MessageId, subject: str | None, archive: str | None
) -> list[FoundMessage] | DelayedMessage:
    """Search all places, the quick ones first; returns a find for each broker group that has the message.

    `subject` limits the search, in the archive, too.
    """
    found = _everywhere(asked.homes, id, "looking at the index", _in_index)
    if not found and archive is not None:
        archived = in_archive(archive, id, subject)
        if archived is not None:
            message, log_id = archived
            # The broker group with that log: an archive may name the group otherwise than the cluster does.
            home = next((each for each in asked.homes if each.has_log(log_id)), None)
            kept = None if home is None else _message(home.client, message.subject, message.sequence)
            return [FoundMessage(message, home, kept is not None and kept.id == message.id)]
    if not found:
        pending = _among_delayed(asked, id)
        if pending is not None:
            return pending
        found = _everywhere(asked.homes, id, "looking into messages", _in_batches)
    return found


def _everywhere(homes: Sequence[Home], id: MessageId, title: str, look: Look) -> list[FoundMessage]:
    """Look into every broker group, subject by subject, with a progress bar."""
    found: list[FoundMessage] = []
    total = sum(each.committed_end - each.first_sequence for home in homes for each in home.subjects)
    with output.slow_bar(title, total) as advance:
        done = 0
        for home in homes:
            shown: ShownMessage | None = None
            for each in home.subjects:
                if shown is None:
                    shown = look(home.client, id, each, lambda at, before=done: advance(before + at))  # type: ignore[misc]
                done += each.committed_end - each.first_sequence
            found += [] if shown is None else [FoundMessage(shown, home)]
    return found


def copies_of(client: Client, id: MessageId, subject: str) -> Iterator[ShownMessage]:
    """All messages of a subject that carry this ID; none if the subject does not exist."""
    for page in _pages(client, subject):
        for sequence in _carried(page, id):
            yield consume.of_page(subject, page, sequence)


def _pages(client: Client, subject: str, begin: int | None = None) -> Iterator[LazyBatch]:
    """The batches of a subject, or the one at a sequence; none if the subject does not exist."""
    try:
        yield from client.scan(subject) if begin is None else client.scan(subject, begin, begin + 1)
    except Refused as refused:
        if refused.code is not Code.NO_SUCH_SUBJECT:
            raise


def _among_delayed(asked: SearchScope, id: MessageId) -> DelayedMessage | None:
    """The pending delayed message with this ID, if a delay server has it."""
    try:
        pending = islice(asked.client.delayed.list(), _PENDING_MAX)
        return next((each for each in pending if each.id == str(id)), None)
    except Refused:
        return None
    except (Unreachable, TimeoutError) as error:
        asked.unasked["delay servers"] = str(error)
        return None


# --- the live log -----------------------------------------------------------------------------------------------------


def _in_index(client: Client, id: MessageId, subject: SubjectDescription, advance: Advance) -> ShownMessage | None:
    at = subject.first_sequence
    while at < subject.committed_end:
        asked = Index(subject.name, Whence.SEQUENCE, at, subject.committed_end, _ENTRIES_MAX)
        found = ask(client, asked, Indexed)
        for sequence in _born_in(found.data, id):
            shown = _message(client, subject.name, sequence)
            if shown is not None and shown.id == str(id):
                return shown
        if found.next_sequence <= at:
            break
        at = found.next_sequence
        advance(at - subject.first_sequence)
    return None


def _born_in(entries: bytes, id: MessageId) -> Iterator[int]:
    """Sequences where a message of this stream and place lies, unless the message carries another ID."""
    wanted = id.producer_id.to_bytes(8, "little")
    at = entries.find(wanted)
    while at >= 0:
        base, rest = divmod(at - _PRODUCER_AT, ENTRY_BYTES)
        if rest == 0:
            first, count, *_, place, _ = ENTRY.unpack_from(entries, base * ENTRY_BYTES)
            if place <= id.sequence < place + count:
                yield first + id.sequence - place
        at = entries.find(wanted, at + 1)


def _in_batches(client: Client, id: MessageId, subject: SubjectDescription, advance: Advance) -> ShownMessage | None:
    for page in client.scan(subject.name, end=subject.committed_end):
        for sequence in _carried(page, id):
            return consume.of_page(subject.name, page, sequence)
        advance(page.end_sequence - subject.first_sequence)
    return None


def _carried(page: LazyBatch, id: MessageId) -> Iterator[int]:
    if page.header.has_ids:
        yield from (page.first_sequence + index for index, each in enumerate(page.batch.ids()) if each == id)


def _message(client: Client, subject: str, sequence: int) -> ShownMessage | None:
    """The message at a sequence; None if it is no longer there."""
    pages = (each for each in _pages(client, subject, sequence) if each.first_sequence <= sequence < each.end_sequence)
    return next((consume.of_page(subject, page, sequence) for page in pages), None)


# --- an archive -------------------------------------------------------------------------------------------------------


def in_archive(path: str, id: MessageId, subject: str | None) -> tuple[ShownMessage, str] | None:
    """The message, and the ID of its log. Reads with pyarrow alone; statistics of the files exclude most of them."""
    if "://" in path:
        raise Misuse(
            f"{path} is not on a local disk, where `fairway trace` reads archives: "
            f"""`fairway pipeline trace SUBJECT --archive {path} --where "id = '{id}'"` reads it with Spark"""
        )
    import pyarrow.dataset as ds

    root = Path(path)
    try:
        state = _state(root)
        files = [each for each in state.files.values() if subject in {None, each.subject}]
        with output.slow_bar("looking into the archive", sum(each.rows for each in files)) as advance:
            done = 0
            for each in sorted(files, key=lambda file: (file.date, file.first), reverse=True):
                rows = ds.dataset(str(root / each.path), format="parquet").to_table(filter=ds.field("id") == str(id))
                for row in rows.to_pylist():
                    text, coded = consume.of_payload(row["payload"])
                    shown = {name: row[name] for name in ("sequence", "id", "created_at", "appended_at", "key")}
                    more = {"tags": row["tags"] or [], "headers": dict(row["headers"] or ())}
                    found = msgspec.convert(
                        {"subject": each.subject, **shown, **more, "payload": text, "payload_base64": coded},
                        ShownMessage,
                    )
                    spans = state.ranges_of(each.subject, each.broker_group)
                    logs = [span.log_id for span in spans if span.first <= found.sequence < span.end]
                    return found, logs[0] if logs else ""
                done += each.rows
                advance(done)
        return None
    except OSError as error:  # errors of pyarrow are such, too
        raise FairwayError(f"the archive {path} cannot be read: {error}") from error


def _state(root: Path) -> ArchiveState:
    from fairway.spark.jobs import manifest

    mark = root / manifest.MARK
    if not mark.is_file():
        raise manifest.NotAnArchive(f"{root} is not an archive of fairway: it has no {manifest.MARK}")
    manifest.check_mark(mark.read_bytes(), str(mark))
    state = manifest.ArchiveState()
    for number in manifest.wanted(each.name for each in (root / manifest.COMMITS).iterdir()):
        path = root / manifest.name_of(number)
        manifest.decode(path.read_bytes(), str(path), state)
    return state
