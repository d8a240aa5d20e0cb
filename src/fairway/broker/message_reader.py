"""Reads for pulls and scans: finds the next wanted messages, and reads the batches that hold them.

The consume log finds the next messages without a read of any message. `fresh` skips batches whose tag filter rules them
out, and steps over holes (rot, retention). `batches` reads whole batches; the client picks its messages from them.

The loop reads what is in the page cache. `ColdReads` fetches the rest: the reader returns None, and the actor tries
again. After a first miss an actor fetches everything old without looking first, until it has caught up. A look that
misses costs the loop about 0.1 ms, because the kernel starts to read ahead. A pull does not use a part that is in
memory: a new decision for less costs the loop more than the thread's 0.1 ms cost the group. A scan does use it.

Where a group's batches are contiguous, a fetch reads ahead: a pull that waits for a fetch is decided twice. The actor's
`FetchCache` keeps these bytes, and the actor rests between two answers made from them.

`RecentReads` keeps batches that several groups read one after another. With 70 groups on one subject, the second group
reads and checks the batch for all that follow. It holds only committed batches, which never change. It does not keep a
batch that was read once: the only group of a subject would gain nothing. The oldest batches go first, by a bound on
their number and a bound on their bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial

from fairway.broker.cold_reads import ColdReads, FetchCache, FetchedRange
from fairway.errors import Refused
from fairway.groups import GroupConfig, Handout, Range
from fairway.limits import KIB, LOT_MESSAGES_MAX, MIB
from fairway.scheduling import Actor
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.log import Damaged
from fairway.storage.message_log import MessageLog, StoredBatch, side_by_side

BATCHES_MAX = 4_096  # known; the bytes of some are kept
BYTES_MAX = 4 * MIB
BATCH_BYTES_MAX = 64 * KIB  # a larger batch costs more to send than to read again


class RecentReads:
    """Batches by their position in the log; None for a batch that was read once."""

    def __init__(self) -> None:
        self._bytes = 0
        self._batches: OrderedDict[int, StoredBatch | None] = OrderedDict()

    def find(self, entries: Sequence[ConsumeLogEntry]) -> list[StoredBatch] | None:
        """All batches of the entries, or None."""
        found = []
        for entry in entries:
            batch = self._batches.get(entry.position)
            if batch is None:
                return None
            found.append(batch)
        return found

    def note(self, batches: Iterable[StoredBatch]) -> None:
        """Count a read of these sound batches. Keeps a batch from its second read on."""
        for batch in batches:
            position, size = batch.entry.position, len(batch.data)
            if position not in self._batches:
                self._batches[position] = None
            elif self._batches[position] is None and size <= BATCH_BYTES_MAX:
                self._batches[position] = batch
                self._bytes += size
        while self._bytes > BYTES_MAX or len(self._batches) > BATCHES_MAX:
            _, gone = self._batches.popitem(last=False)
            self._bytes -= 0 if gone is None else len(gone.data)


SKIPPED_BATCHES_MAX = 1_000  # entries that one read looks at for a group with a filter: about a slice's worth
RESPONSE_BYTES_MAX = 256 * KIB  # unless one batch is larger: more would overrun a slice too far
BEHIND_BYTES_MAX = 64 * KIB  # the same for a group that is behind: 0.2 ms of the loop instead of 0.5 (bench/fairness)
RECENT_BYTES = 16 * MIB  # of the log's end: written just now, so in memory unless the machine is short of memory
AHEAD_BYTES = 512 * KIB  # of one fetch for pulls: five to eight answers to a group that is behind
FETCH_BYTES_MAX = MIB  # in one read, unless a batch is larger: a scan may ask for 64 MiB while others wait
GAP_BYTES_MAX = 64 * KIB  # read over a gap this wide: another read would cost more
SHARED_BYTES = 2 * MIB  # of the log's end, where many groups read the same batches, one after another
ANSWERS_MAX = 1_000  # remembered until the next commit
ANSWER_BATCHES_MAX = 64  # a longer answer is for a group that is behind, and no other group asks for it
MANY_RANGES = 8  # of one lot: a look-up costs as much as a walk over dozens of entries
BEHIND_MAX = 10_000  # actors known to be behind; a forgotten actor misses once more

_Span = tuple[int, int]  # position and size
_EMPTY = FetchCache()


class MessageReader:
    """Reads for groups and scans. Without `fetches` the loop waits for the device: for comparison.

    The message log remembers damaged batches, so a read meets them once.
    """

    def __init__(self, messages: MessageLog, fetches: ColdReads | None) -> None:
        self._messages = messages
        self._fetches = fetches
        self._behind: OrderedDict[Hashable, None] = OrderedDict()
        self._chosen: tuple[int, list[ConsumeLogEntry]] = (
            0,
            [],
        )  # by the last `fresh`, contiguous; entries never change
        self._answers: dict[Hashable, tuple[Range | None, list[ConsumeLogEntry]]] = {}  # of `fresh`
        self._answers_as_of = (0, 0)
        self._recent = RecentReads()

    # --- looking up --------------------------------------------------------------------------------------------------

    def is_indexed(self, actor: Actor, subject_id: int, sequence: int) -> bool:
        """Whether the index from `sequence` on is in memory. If not, starts a fetch.

        With one message per batch a segment's index is 57 MiB: 60 ms of a loop that would wait for it.
        """
        if self._fetches is None:
            return True
        entries = self._messages.views.entries
        so_far = self._fetches.fetch_cache(actor)
        runs = [] if so_far is None else self._fetches.take_runs(actor)
        if runs:
            for of_subject, run, data in runs:
                entries.take_in(of_subject, run, data)
            return True  # also if the index was damaged: then the loop waits while the log rebuilds it
        absent = entries.absent(subject_id, sequence, LOT_MESSAGES_MAX)
        if not absent:
            return True
        so_far = so_far or _EMPTY
        fetch_cache = FetchCache(list(so_far.pieces), size_bytes=so_far.size_bytes)
        self._fetches.start(
            actor,
            fetch_cache,
            [(partial(entries.fetch, run), partial(fetch_cache.keep_run, subject_id, run)) for run in absent],
        )
        return False

    def response_bytes(self, actor: Actor, asked: int) -> int:
        """A bound on the bytes of one response: the loop makes it in one go, and others wait meanwhile."""
        return min(asked, BEHIND_BYTES_MAX if actor.key in self._behind else RESPONSE_BYTES_MAX)

    def fresh(
        self, subject_id: int, cursor: int, config: GroupConfig, messages_max: int, bytes_max: int
    ) -> Range | None:
        """The first contiguous wanted range at or above the cursor, as (first, count); a count of 0 only skips.

        Seventy groups at the end of one subject ask the same: the answer holds until the next commit.
        """
        log = self._messages.log
        as_of = (log.committed_end, log.segments[0].base if log.segments else 0)
        if as_of != self._answers_as_of or len(self._answers) >= ANSWERS_MAX:
            self._answers_as_of = as_of
            self._answers.clear()
        question = (subject_id, cursor, config.tags.tags, config.tags.is_all, messages_max, bytes_max)
        answer = self._answers.get(question)
        if answer is None:
            answer = self._find_fresh(subject_id, cursor, config, messages_max, bytes_max)
            if len(answer[1]) <= ANSWER_BATCHES_MAX and self._is_near_end(answer[1]):
                self._answers[question] = answer
        self._chosen = (subject_id, answer[1])
        return answer[0]

    def _find_fresh(
        self, subject_id: int, cursor: int, config: GroupConfig, messages_max: int, bytes_max: int
    ) -> tuple[Range | None, list[ConsumeLogEntry]]:
        first = cursor
        count = size = seen = 0
        chosen: list[ConsumeLogEntry] = []
        for entry in self._messages.readable(subject_id, cursor):
            seen += 1
            begin = max(entry.first_sequence, cursor)
            if not config.tags.may_match(entry.tag_filter):
                if count or seen > SKIPPED_BATCHES_MAX:
                    break
                first = entry.end_sequence
                continue
            if count and (begin != first + count or size + entry.size > bytes_max):
                break
            first = begin if not count else first
            count += entry.end_sequence - begin
            size += entry.size
            chosen.append(entry)
            if count >= messages_max:
                break
        is_cut_short = seen >= SKIPPED_BATCHES_MAX
        if not count and not is_cut_short and self._messages.next_sequence(subject_id) > first:
            # a hole up to the end, such as a power cut leaves
            first = max(first, self._messages.end_sequence(subject_id))
        return ((first, min(count, messages_max)) if count or first > cursor else None), chosen

    def hole(self, subject_id: int, first: int, count: int) -> Range:
        """The unreadable range from `first` up to the next readable message, or to the end of a lot."""
        entry = next(self._messages.readable(subject_id, first), None)
        end = first + LOT_MESSAGES_MAX if entry is None else min(entry.first_sequence, first + LOT_MESSAGES_MAX)
        return first, max(end - first, count)

    def entries(self, subject_id: int, lots: Sequence[Handout]) -> list[ConsumeLogEntry]:
        """The entries of the batches that hold the messages of these lots, in order."""
        wanted: dict[int, ConsumeLogEntry] = {}
        for lot in lots:
            if len(lot.ranges) > MANY_RANGES:
                wanted |= {entry.first_sequence: entry for entry in self._scattered(subject_id, lot.ranges)}
                continue
            for first, count in lot.ranges:
                for entry in self._entries_from(subject_id, first, first + count):
                    if entry.first_sequence >= first + count:
                        break
                    wanted[entry.first_sequence] = entry
        return [wanted[first] for first in sorted(wanted)]

    def _scattered(self, subject_id: int, ranges: Sequence[Range]) -> Iterator[ConsumeLogEntry]:
        """The entries that hold any of many short ranges in one lot. One walk past all entries costs less than a
        look-up for each range."""
        last, length = ranges[-1]
        left = iter(ranges)
        first, count = next(left)
        for entry in self._entries_from(subject_id, first, last + length):
            while first + count <= entry.first_sequence and first != last:
                first, count = next(left)
            if first + count <= entry.first_sequence:
                return
            if first < entry.end_sequence:
                yield entry

    def _entries_from(self, subject_id: int, first: int, end: int) -> Iterable[ConsumeLogEntry]:
        """Entries at least up to `end`. Usually reuses the entries that `fresh` has just found, which saves a third of
        a short pull's look-ups."""
        of_subject, chosen = self._chosen
        if of_subject == subject_id and chosen and chosen[0].first_sequence <= first and end <= chosen[-1].end_sequence:
            return (entry for entry in chosen if entry.end_sequence > first)
        return self._messages.readable(subject_id, first)

    # --- the bytes ---------------------------------------------------------------------------------------------------

    def batches(self, actor: Actor, subject_id: int, lots: Sequence[Handout]) -> list[StoredBatch] | None:
        """The batches that hold the messages of these lots, in order, each once. None: a fetch is under way."""
        entries = self.entries(subject_id, lots)
        if self._fetches is None:
            return self._messages.read_entries(subject_id, entries)
        recent = self._recent.find(entries)
        if recent is not None:
            self._fetches.clear(actor)
            return recent
        fetch_cache = self._fetches.fetch_cache(actor) or _EMPTY
        found: list[FetchedRange] = []
        absent: list[_Span] = []
        for position, size in map(_span, side_by_side(entries)):
            piece = self._look(actor, fetch_cache, position, size)
            if piece.size < size:
                absent.append((position, size))
            else:
                found.append(piece)
        if absent:
            spans = self._merge(absent)
            self._fetch(actor, [self._with_ahead(*spans[0])] if _is_one(spans, entries) else spans, found)
            return None
        batches = self._parse(actor, subject_id, entries, found)
        if fetch_cache is not _EMPTY:
            if not fetch_cache.reaches_beyond(entries[-1].position + entries[-1].size):
                self._fetches.clear(actor)
        elif self._is_near_end(entries):
            self._recent.note(batches)
        return batches

    def rest(self, actor: Actor) -> None:
        """Let an actor that is behind rest after an answer: its next answer can wait for others."""
        if self._fetches is not None and actor.key in self._behind:
            self._fetches.rest(actor)

    def _is_near_end(self, entries: Sequence[ConsumeLogEntry]) -> bool:
        """Whether the entries are near the log's end, where groups follow one another closely. Farther back each group
        pays for its own reads. Otherwise the group that comes second is charged less for the same batch, and with few
        pulls in flight it falls short of its share (bench/fairness)."""
        return not entries or entries[0].position >= self._messages.log.committed_end - SHARED_BYTES

    def prefix(
        self, actor: Actor, subject_id: int, entries: Sequence[ConsumeLogEntry]
    ) -> tuple[Sequence[ConsumeLogEntry], list[StoredBatch]] | None:
        """The entries from the first on that are in memory, with their batches. None: a fetch of the first is under
        way."""
        if self._fetches is None:
            return entries, self._messages.read_entries(subject_id, entries)
        fetch_cache = self._fetches.fetch_cache(actor) or _EMPTY
        found: list[FetchedRange] = []
        present: list[ConsumeLogEntry] = []
        for stretch in side_by_side(entries):
            piece = self._look(actor, fetch_cache, *_span(stretch))
            whole = [entry for entry in stretch if entry.position + entry.size <= piece.position + piece.size]
            found.append(piece)
            present += whole
            if len(whole) < len(stretch):
                break
        if entries and not present:
            self._fetch(actor, [_first_span(entries)], [])
            return None
        self._fetches.clear(actor)
        return present, self._parse(actor, subject_id, present, found)

    def _look(self, actor: Actor, fetch_cache: FetchCache, position: int, size: int) -> FetchedRange:
        """The part of that span that is in memory."""
        piece = fetch_cache.piece(position, size)
        if piece is not None:
            return piece
        log = self._messages.log
        is_recent = position >= log.committed_end - RECENT_BYTES
        if is_recent:
            self._behind.pop(actor.key, None)
            actor.is_background = False
        elif actor.key in self._behind:
            return FetchedRange(position, 0, b"")
        try:
            data = log.read_recent(position, size) if is_recent else log.read_cached(position, size)
        except Damaged:
            return FetchedRange(position, size, b"")  # the segment is missing: the read reports that
        if data is None or len(data) < size:
            self._behind[actor.key] = None
            if len(self._behind) > BEHIND_MAX:
                self._behind.popitem(last=False)
        return FetchedRange(position, len(data), data) if data is not None else FetchedRange(position, 0, b"")

    def _parse(
        self, actor: Actor, subject_id: int, entries: Iterable[ConsumeLogEntry], found: Iterable[FetchedRange]
    ) -> list[StoredBatch]:
        at_hand = {piece.position: piece.data for piece in found}
        log = self._messages.log
        wanted = list(entries)
        try:
            batches = self._messages.read_entries(
                subject_id, wanted, lambda position, size: at_hand[position] or log.read(position, size)
            )
        except Refused:  # damage that is about to be repaired makes fetched bytes useless
            if self._fetches is not None:
                self._fetches.clear(actor)
            raise
        if len(batches) < len(wanted):
            self._answers.clear()  # a batch is damaged, and cached answers may hold it
        return batches

    def _fetch(self, actor: Actor, spans: Iterable[_Span], found: Iterable[FetchedRange]) -> None:
        if self._fetches is not None:
            fetch_cache = FetchCache()
            for piece in found:
                fetch_cache.keep(piece.position, piece.size, piece.data)
            fetch = self._messages.log.fetch
            self._fetches.start(
                actor,
                fetch_cache,
                [(partial(fetch, at, size), partial(fetch_cache.keep, at, size)) for at, size in spans],
            )

    def _with_ahead(self, position: int, size: int) -> _Span:
        """The span, extended by what follows in the segment, up to the recent end of the log."""
        log, fetches = self._messages.log, self._fetches
        ahead_bytes = fetches.ahead_bytes(AHEAD_BYTES) if fetches is not None else 0
        end = min(position + ahead_bytes, log.segment_at(position).end, log.committed_end - RECENT_BYTES)
        return position, max(size, end - position)

    def _merge(self, spans: Iterable[_Span]) -> list[_Span]:
        """Join spans that are close together in one segment into one read."""
        merged: list[_Span] = []
        segment_end = 0
        for position, size in spans:
            first, so_far = merged[-1] if merged else (0, 0)
            end = position + size
            is_near = position - (first + so_far) <= GAP_BYTES_MAX and end - first <= FETCH_BYTES_MAX
            if merged and is_near and end <= segment_end:
                merged[-1] = (first, end - first)
            else:
                merged.append((position, size))
                segment_end = self._messages.log.segment_at(position).end
        return merged


def _span(stretch: Sequence[ConsumeLogEntry]) -> _Span:
    first, last = stretch[0], stretch[-1]
    return first.position, last.position + last.size - first.position


def _is_one(spans: Sequence[_Span], entries: Sequence[ConsumeLogEntry]) -> bool:
    """Whether the entries are contiguous and none is in memory. Then the entries that follow are likely contiguous,
    too."""
    return len(spans) == 1 and spans[0][1] == sum(entry.size for entry in entries)


def _first_span(entries: Sequence[ConsumeLogEntry]) -> _Span:
    """The first contiguous entries, at least one, up to the bytes that one fetch should read."""
    stretch = side_by_side(entries)[0]
    start = stretch[0].position
    return _span([stretch[0], *(e for e in stretch[1:] if e.position + e.size - start <= FETCH_BYTES_MAX)])
