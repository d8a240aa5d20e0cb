"""The reckoning at the end of a history: every message that a group was owed is acked, or in dead letter, or counted as
lost; and what was redriven from there has reached that group, once.

Dead letters and inboxes are read by scans, as people would. A letter says where it comes from: its stream is the
group's own for the subject, or for the inbox, and its place in the stream is the sequence that it had there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairway import batch
from fairway.broker.dead_letters import HISTORY_ATTEMPTS, HISTORY_REASON
from fairway.broker.message_copies import stream_of
from fairway.errors import Code, Refused
from fairway.names import GroupName, Subject
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Scan, Scanned
from tests.simulation.broker_clients import REASON, Link
from tests.simulation.broker_truth import Owner, Promise, Truth

if TYPE_CHECKING:
    from tests.simulation.broker_history import History

PAGE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Letter:
    """A message as a scan finds it in a subject of the broker's own."""

    sequence: int  # in that subject
    stream: int
    origin: int  # its sequence where it was copied from
    payload: bytes
    headers: dict[str, str]


async def reckon(history: History) -> None:
    """Every group on its own."""
    link = Link(history.scene, history.scene.net("auditor"), history.world.rng.child("auditor"), history.truth)
    for owner in history.truth.owners.values():
        dead = [each async for each in _scan(link, f"dead:{owner.group}:{owner.subject}")]
        inbox = [each async for each in _scan(link, f"inbox:{owner.group}:{owner.subject}")]
        history.counts["buried"] += len(dead)
        if not history.flavour.is_retaining:
            _check_graves(history.truth, owner, dead)
            own = stream_of(
                Subject.dead_letters(GroupName(owner.group), Subject(owner.subject)), GroupName(owner.group)
            )
            _check_redriven(history.truth, owner, dead, [each for each in inbox if each.stream == own])
            _check_sent(history.truth, owner.private(), [each for each in inbox if each.stream != own])
            _check_inbox(history.truth, owner, dead, inbox)
        taken = await _ever(link, f"dead:{owner.group}:{owner.subject}") if history.flavour.is_retaining else 0
        _check_books(history.truth, owner, dead, taken)
    link.drop()


async def _scan(link: Link, subject: str) -> AsyncIterator[Letter]:
    at = 0
    while True:
        client, _ = await link.connected()
        scan = Scan(subject, m.Whence.SEQUENCE, at, None, PAGE_BYTES)
        try:
            (scanned, batches), _ = await link.ask("a scan", client.ask(scan, Scanned))
        except Refused as refused:
            if refused.code is not Code.NO_SUCH_SUBJECT:
                raise
            return
        for attached, data in zip(scanned.batches, batches, strict=True):
            opened = batch.decode(data)
            for index, payload in enumerate(opened.payloads):
                yield Letter(
                    attached.first_sequence + index,
                    opened.header.producer_id,
                    opened.header.first_sequence + index,
                    payload,
                    opened.headers(index),
                )
        at = scanned.next_sequence
        if not batches or at >= scanned.committed_end:
            return


async def _ever(link: Link, subject: str) -> int:
    """How many messages were ever in a subject, whatever retention has left."""
    client, _ = await link.connected()
    try:
        (scanned, _), _ = await link.ask("a look", client.ask(Scan(subject, m.Whence.LATEST, 0, None, 0), Scanned))
    except Refused as refused:
        if refused.code is not Code.NO_SUCH_SUBJECT:
            raise
        return 0
    return scanned.committed_end


def _check_graves(truth: Truth, owner: Owner, dead: list[Letter]) -> None:
    """Each died for a reason, once; what is in its grave is what was sent."""
    main = stream_of(Subject(owner.subject), GroupName(owner.group))
    names = {main: truth.names.get(owner.subject, {}), None: truth.names.get(owner.private().subject, {})}
    of = {main: owner, None: owner.private()}
    counts = Counter((each.stream, each.origin) for each in dead)
    for each in dead:
        where = main if each.stream == main else None
        whose, known = of[where], names[where].get(each.origin)
        if known not in (None, each.payload) or each.payload not in truth.sent:
            truth.blame(
                Promise.BURIED, f"{each.origin} of {whose} is {each.payload[:24]!r} in dead letter, not {known!r}"
            )
        if counts[each.stream, each.origin] > 1 + whose.seeks:
            truth.blame(Promise.BURIED, f"{each.origin} of {whose} is in dead letter more than once")
        if not whose.seeks and each.origin in whose.acked:
            truth.blame(Promise.BURIED, f"{each.origin} of {whose} was acked, and is in dead letter")
        if each.headers[HISTORY_REASON] == REASON and each.origin in whose.rejected:
            continue
        if int(each.headers[HISTORY_ATTEMPTS]) < owner.attempts_max:
            truth.blame(Promise.BURIED, f"{each.origin} of {whose} died too early: {each.headers}")
    for whose in (owner, owner.private()):
        stream = main if whose is owner else stream_of(Subject(whose.subject), GroupName(owner.group))
        absent = sorted(whose.condemned - {each.origin for each in dead if each.stream == stream})
        if absent:
            truth.blame(Promise.BURIED, f"{absent[:5]} of {whose} were rejected, and are not in dead letter")


def _check_redriven(truth: Truth, owner: Owner, dead: list[Letter], redriven: list[Letter]) -> None:
    """All dead letters have been redriven by now."""
    letters = {each.sequence: each.payload for each in dead}
    counts = Counter(each.origin for each in redriven)
    for each in redriven:
        if letters.get(each.origin) != each.payload:
            truth.blame(Promise.REDRIVEN, f"{each.payload[:24]!r} in {owner.private()} is no dead letter of the group")
        if counts[each.origin] > 1:
            truth.blame(
                Promise.REDRIVEN, f"dead letter {each.origin} of {owner} was redriven {counts[each.origin]} times"
            )
    absent = sorted(letters.keys() - counts.keys())
    if absent:
        truth.blame(Promise.REDRIVEN, f"dead letters {absent[:5]} of {owner} were not redriven")


def _check_sent(truth: Truth, private: Owner, found: list[Letter]) -> None:
    """What somebody wrote to the group alone."""
    payloads = Counter(each.payload for each in found)
    meant = {payload: sent for payload, sent in truth.sent.items() if sent.subject == private.subject}
    for payload, count in payloads.items():
        if payload not in meant:
            truth.blame(Promise.REDRIVEN, f"{payload[:24]!r} in {private} was sent to others")
        if count > 1:
            truth.blame(Promise.REPEATED, f"{payload[:24]!r} is in {private} {count} times")
    absent = [payload for payload, sent in meant.items() if sent.is_acknowledged and payload not in payloads]
    if absent:
        truth.blame(Promise.LOST, f"{len(absent)} messages that were sent to {private} are not there: {absent[:5]}")


def _check_inbox(truth: Truth, owner: Owner, dead: list[Letter], inbox: list[Letter]) -> None:
    """All that lies there has reached its end."""
    private = owner.private()
    again = {each.origin for each in dead if each.stream == stream_of(Subject(private.subject), GroupName(owner.group))}
    missing = sorted({each.sequence for each in inbox} - private.acked - private.doubted - again)
    if missing:
        truth.blame(Promise.REDRIVEN, f"{missing[:5]} of {private} are neither acked nor dead")


def _check_books(truth: Truth, owner: Owner, dead: list[Letter], taken: int) -> None:
    """`taken`: how many have died, where retention may have taken their dead letters, too."""
    main = stream_of(Subject(owner.subject), GroupName(owner.group))
    owed = truth.owed(owner)
    missing = sorted(owed - owner.acked - owner.doubted - {each.origin for each in dead if each.stream == main})
    if len(missing) > owner.lost + taken:
        counted = f"{owner.lost} are counted as lost, {taken} have died"
        truth.blame(Promise.LOST, f"{len(missing)} of {len(owed)} in {owner} are not acked, {counted}: {missing[:5]}")
