"""From the answer to a pull to messages that can be handed out.

Batches come whole and the lots say what is meant of them. Three kinds of messages that are meant are not handed out:
those that the user holds already (see `lots`), those without the tags that the group wants, and those that no attached
batch has (the log has a hole there). The last two are acked. And some are not handed out yet: see `behind`.

Batches stay compressed here (`page`), but for those of a group that filters by tags, which are decoded one after
another within the consumer's budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from fairway.batch import peek
from fairway.errors import RemoteProtocolError
from fairway.protocol.lots import ACK, LINKED, WAITING, ConsumerLot, SettlementQueue, UnackedLots
from fairway.protocol.messages import Pulled
from fairway.protocol.page import DecodedBatches, LazyBatch
from fairway.protocol.terms import Terms
from fairway.world.buffers import Bytes


class MessageRun(NamedTuple):
    """Messages next to one another, in one lot and one batch; `first` and `end` are sequences."""

    lot: ConsumerLot
    page: LazyBatch
    first: int
    end: int


class Unpacked(NamedTuple):
    runs: list[MessageRun]
    repeated: int = 0
    filtered: int = 0
    absent: int = 0
    behind: Sequence[MessageRun] = ()  # of lots whose messages wait for others of their keys
    linked: Sequence[
        tuple[ConsumerLot, LazyBatch, int]
    ] = ()  # where there are any of those: what the user holds, or failed at


class Unpacker:
    """Remembers the last page: a batch of more messages than one lot may have comes with several answers."""

    def __init__(self, ledger: SettlementQueue, shelf: UnackedLots, decoded: DecodedBatches) -> None:
        self._ledger = ledger
        self._shelf = shelf
        self._decoded = decoded
        self._last: tuple[bool, LazyBatch] | None = None

    def unpack(self, pulled: Pulled, attachments: Sequence[Bytes], terms: Terms) -> Unpacked:
        """RemoteProtocolError leaves everything as it was."""
        if len(pulled.batches) != len(attachments):
            raise RemoteProtocolError(f"{len(attachments)} batches attached, {len(pulled.batches)} announced")
        pages = [
            self._page(pulled.is_inbox, told.first_sequence, told.appended_ms, data)
            for told, data in zip(pulled.batches, attachments, strict=True)
        ]
        pages.sort(key=lambda page: page.first_sequence)
        is_final = terms.is_at_most_once
        lots = [
            ConsumerLot(self._ledger, told, is_inbox=pulled.is_inbox, is_final=is_final, number=pulled.number)
            for told in pulled.lots
        ]
        overlaps = [self._shelve(lot, pages) for lot in lots]
        runs: list[MessageRun] = []
        behind: list[MessageRun] = []
        filtered = absent = 0
        for told, lot in zip(pulled.lots, lots, strict=True):
            of_lot, lot_absent = _runs(lot, pages)
            if terms.tags.tags and not pulled.is_inbox:  # what is in the inbox had been wanted
                wanted = [part for run in of_lot for part in _wanted(run, terms)]
                filtered += _length(of_lot) - _length(wanted)
                of_lot = wanted
            absent += lot_absent
            if told.is_behind:
                behind += of_lot
            else:
                runs += of_lot
            if not lot.is_dirty and ACK in lot.state:
                lot.touch()
        if any(overlap is not None for overlap in overlaps):
            self._shelf.recount()
        linked = _linked(lots, pages) if behind else ()
        return Unpacked(runs, sum(overlap or 0 for overlap in overlaps), filtered, absent, behind, linked)

    def _page(self, is_inbox: bool, first_sequence: int, appended_ms: int, data: Bytes) -> LazyBatch:
        if self._last is not None:
            was_inbox, page = self._last
            is_same = was_inbox == is_inbox and page.first_sequence == first_sequence
            if is_same and page.header == peek(data):
                return page
        page = LazyBatch(data, first_sequence, appended_ms, self._decoded)
        self._last = is_inbox, page
        return page

    def _shelve(self, lot: ConsumerLot, pages: Sequence[LazyBatch]) -> int | None:
        """How many of its messages the user has or has settled already; None: it touches no other lot."""
        older = self._shelf.overlapping(lot)
        for each in older:
            lot.inherit(each)
        lot.bytes_each = sum(page.raw_bytes for page in pages) // max(sum(map(len, pages)), 1)
        self._shelf.add(lot)
        return lot.state.count(LINKED) + lot.state.count(ACK) if older else None


def _runs(lot: ConsumerLot, pages: Sequence[LazyBatch]) -> tuple[list[MessageRun], int]:
    """Where its waiting messages are; those that are nowhere are acked, and counted."""
    runs = []
    absent = 0
    firsts = [page.first_sequence for page in pages]
    for start, end in lot.runs(WAITING):
        at, stop = lot.first + start, lot.first + end
        for page in pages[max(bisect_right(firsts, at) - 1, 0) :]:
            if page.first_sequence >= stop:
                break
            if page.end_sequence <= at:
                continue
            if page.first_sequence > at:
                absent += _ack(lot, at, page.first_sequence)
                at = page.first_sequence
            upto = min(stop, page.end_sequence)
            runs.append(MessageRun(lot, page, at, upto))
            at = upto
        if at < stop:
            absent += _ack(lot, at, stop)
    return runs, absent


def _linked(lots: Sequence[ConsumerLot], pages: Sequence[LazyBatch]) -> list[tuple[ConsumerLot, LazyBatch, int]]:
    """What came before and is not to be passed: it is with the user, or its failure has not been sent yet."""
    return [
        (lot, page, lot.first + index)
        for lot in lots
        for index in (*lot.failed, *(each for start, end in lot.runs(LINKED) for each in range(start, end)))
        for page in pages
        if page.first_sequence <= lot.first + index < page.end_sequence
    ]


def _wanted(run: MessageRun, terms: Terms) -> list[MessageRun]:
    """The parts with messages that the group wants; the rest is acked."""
    tag_lists = run.page.tag_lists()
    parts: list[MessageRun] = []
    at = run.first
    for sequence in range(run.first, run.end):
        if not terms.tags.accepts(tag_lists[sequence - run.page.first_sequence]):
            if sequence > at:
                parts.append(run._replace(first=at, end=sequence))
            _ack(run.lot, sequence, sequence + 1)
            at = sequence + 1
    if run.end > at:
        parts.append(run._replace(first=at))
    return parts


def _ack(lot: ConsumerLot, first: int, end: int) -> int:
    lot.fill(first - lot.first, end - lot.first, ACK)
    return end - first


def _length(runs: Sequence[MessageRun]) -> int:
    return sum(run.end - run.first for run in runs)
