"""The model of a broker, as its clients see it: simulated and real histories are compared with it.

Clients tell it what they are about to do and what they were answered, with the time. It knows nothing of the broker's
insides, so it serves a broker in another process as well.

A message that is handed out a second time needs a reason, and the reason must have arisen since the first:

    asked      its holder asked for a retry, released it, left, or came back as one that remembers nothing
    lease      its holder had been silent for a lease
    crash      the broker had crashed: a PULL is written and not awaited, so the crash may have taken it
    seek       somebody moved the group's cursor

A response that did not arrive was never handed out, as far as a client can tell. A message that was asked for before a
seek was known to be done may have been handed out before it, and have been on its way since. Then it says nothing about
what holds now, whichever consumer has had the message, or has acked it, since the seek.

So it is with an answer that the net has held up until its holder's lease had ended, or its broker had crashed, if the
message has reached another consumer since: it was handed out before that. A pull may be old because it waits, so it is
not enough that it was asked for a lease before the other had the message: it must be an earlier attempt, too.

A group's private inbox is an owner of its own, beside the one of the subject: its sequences are other ones, and so is
what it has acked. What becomes of dead letters is reckoned up in the end (`broker_reckoning`).
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

MS_NS = 1_000_000
FOR_EVER = 1 << 62


class Promise(enum.Enum):
    """The names by which a failure is reported."""

    LOST = "what was acknowledged reaches every group"
    PHANTOM = "nothing is delivered that was never sent"
    RENAMED = "a sequence names one payload for ever, bit for bit"
    ACKED_AGAIN = "an ack that was answered is never undone"
    DUPLICATE = "a message is handed out twice only for a reason"
    TWICE = "an at-most-once group is given a message at most once"
    RISEN = "what was rejected does not come back"
    ATTEMPTS = "nothing is handed out more often than the group allows"
    BURIED = "what died is in dead letter once, bit for bit, and was never acked"
    REDRIVEN = "what is redriven, or sent to one group alone, reaches that group once, and no other"
    PAUSED = "who is paused is handed nothing"
    EVICTED = "a consumer that speaks keeps its place"
    REPEATED = "a batch is stored once, and always answered with the same place"
    ANSWERED = "after a fault nothing is answered"
    ORDER = "messages of one key, or all of a group in strict order, are handed out one after another"
    MERGED = "what is declined is done by another of its key, begun later"
    EARLY = "a delayed message is not sent before its time"
    STUCK = "what can be handed out is handed out, promptly"
    RULED = "one copy of a group serves at a time, and one leads under an epoch"
    BOUND = "nothing grows beyond its bound"
    BROKE = "nothing raises what it should not"


def key_of(payload: bytes) -> str | None:
    """The key under which a producer sends it; a fifth have none."""
    number = int(payload.split(b"/")[1])
    return None if number % 5 == 4 else f"k{number * 7 % 3}"


@dataclass(frozen=True)
class Breach:
    promise: Promise
    sentence: str

    def __str__(self) -> str:
        return f"{self.promise.name} ({self.promise.value}): {self.sentence}"


@dataclass(slots=True, eq=False)
class Holder:
    """A consumer of a group, under its stable name."""

    name: str
    contact_ns: int = 0  # when it sent the last request that was answered
    lost_ns: int = -1  # when it last waited for a response in vain
    got_ns: int = -1  # when it last was given something
    attempts: dict[int, int] = field(default_factory=dict)  # of what it was given last, if it says so
    behind: set[int] = field(default_factory=set)  # of that: what it does not begin before others of the same key


@dataclass(slots=True, eq=False)
class Handed:
    """The last time that a message was handed out to a group."""

    holder: Holder
    asked_ns: int  # when the pull was sent
    reason: str = ""  # why it may be handed out again
    got_ns: int = 0  # when it arrived
    attempt: int = 0  # 0: nobody says


@dataclass(slots=True, eq=False)
class Owner:
    """A group on a subject: what it was given, and what it was told is settled."""

    group: str
    subject: str
    lease_ns: int
    from_ns: int | None = None  # it is owed what was sent later; None: nobody has joined yet
    has_joined: bool = False
    is_latest: bool = False  # where it begins, if it is new
    is_broadcast: bool = False
    is_at_most_once: bool = False
    attempts_max: int = 1_000
    order: str = ""  # key, strict, merged
    policies: bytes | None = None  # with which it is made
    begun_ns: dict[str, int] = field(default_factory=dict)  # by key: when a message first went out, the last time
    reached: dict[str, int] = field(default_factory=dict)  # by key: the highest sequence that went out
    main: Owner | None = None  # of an inbox
    inbox: Owner | None = None
    handed: dict[int, Handed] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    acked_at: dict[int, int] = field(default_factory=dict)  # the model's tick
    acked_after: dict[int, int] = field(default_factory=dict)  # how many seeks were known to be done
    acking: set[int] = field(default_factory=set)  # an ack is on its way, or was and is not known to have arrived
    doubted: set[int] = field(default_factory=set)  # an ack's outcome is unknown: settled, or to be handed out again
    rejected: set[int] = field(default_factory=set)  # somebody has asked for it
    rejecting: set[int] = field(default_factory=set)  # that is on its way
    condemned: set[int] = field(default_factory=set)  # and was told that it is so
    seeks: int = 0
    is_seeking: bool = False
    sought_ns: list[int] = field(default_factory=list)  # when each seek was known to be done
    floor: int = 0  # nothing below is owed: somebody has moved the cursor beyond it
    paused: dict[str, int] = field(default_factory=dict)  # consumers, or "" for all; since when that is known
    lost: int = 0  # messages that retention took from it, as the broker says in the end

    def private(self) -> Owner:
        """The group's inbox."""
        if self.inbox is None:
            name = f"inbox:{self.group}:{self.subject}"
            self.inbox = Owner(self.group, name, self.lease_ns, 0, main=self)
        return self.inbox

    @property
    def family(self) -> tuple[Owner, ...]:
        return (self,) if self.inbox is None else (self, self.inbox)

    def __str__(self) -> str:
        return f"{self.group} on {self.subject}"


@dataclass(slots=True)
class Sent:
    """A message that a producer means to have stored."""

    subject: str
    asked_ns: int
    sequence: int | None = None  # once acknowledged or seen
    is_acknowledged: bool = False


class Witness(Protocol):
    """What clients tell: to the model itself, or to whoever writes it down for the model."""

    def blame(self, promise: Promise, sentence: str) -> None: ...

    def note_answer(self, what: str, asked_ns: int) -> None: ...

    def note_sent(self, subject: str, payloads: Sequence[bytes], now_ns: int) -> None: ...

    def note_receipt(self, subject: str, first: int, payloads: Sequence[bytes]) -> None: ...

    def note_member(self, owner: Owner, now_ns: int) -> None: ...

    def note_contact(self, owner: Owner, holder: Holder, *, asked_ns: int, now_ns: int) -> None: ...

    def note_delivery(
        self, owner: Owner, holder: Holder, found: Mapping[int, bytes], *, asked_ns: int, now_ns: int
    ) -> None: ...

    def note_asked(self, owner: Owner, holder: Holder, sequences: Sequence[int] | None, reason: str) -> None: ...

    def note_acking(self, owner: Owner, sequences: Sequence[int]) -> None: ...

    def note_acked(self, owner: Owner, sequences: Sequence[int], *, stale: int = 0) -> None: ...

    def note_lost(self, holder: Holder, now_ns: int) -> None: ...

    def note_eviction(self, owner: Owner, holder: Holder, now_ns: int) -> None: ...

    def note_rejecting(self, owner: Owner, sequences: Sequence[int]) -> None: ...

    def note_rejected(self, owner: Owner, sequences: Sequence[int], *, stale: int = 0) -> None: ...


@dataclass
class Truth:
    """The model, and what was found to contradict it."""

    sent: dict[bytes, Sent] = field(default_factory=dict)  # by payload, and no two are alike
    names: dict[str, dict[int, bytes]] = field(default_factory=dict)  # by subject: payloads, acknowledged or seen
    owners: dict[tuple[str, str], Owner] = field(default_factory=dict)
    breaches: list[Breach] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # of second deliveries
    acknowledged: int = 0
    delivered: int = 0
    crashed_ns: int = -1  # the last time
    faulty_ns: int | None = None  # since when the broker that runs has been known to have a fault
    tick: int = 0  # a coarse clock for what a power cut may take where durability is `memory`
    loss_ns: int = -1  # the last time that it may have taken something
    gone: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # by subject: from, to; perhaps taken

    def blame(self, promise: Promise, sentence: str) -> None:
        self.breaches.append(Breach(promise, sentence))

    @property
    def is_refuted(self) -> bool:
        return bool(self.breaches)

    def owner(self, group: str, subject: str, lease_ms: int, *, from_ns: int | None = 0) -> Owner:
        """The group on the subject; the first to ask says where it begins."""
        fresh = Owner(group, subject, lease_ms * MS_NS, from_ns)
        return self.owners.setdefault((group, subject), fresh)

    def note_crash(self, now_ns: int) -> None:
        self.crashed_ns = now_ns

    def note_loss(self, unsynced_from: Mapping[str, int], safe_tick: int, now_ns: int) -> None:
        """The power went, and answers had not meant synced: messages from these sequences on may be gone, and acks
        that were answered from that tick on."""
        self.loss_ns = now_ns
        for subject, first in unsynced_from.items():
            self.gone.setdefault(subject, []).append((first, FOR_EVER))
        for owner in self.owners.values():
            undone = {each for each in owner.acked if owner.acked_at[each] >= safe_tick}
            owner.acked -= undone
            owner.doubted |= undone
            owner.acking.clear()  # an answer may still be on its way from the dead

    def note_life(self, next_sequences: Mapping[str, int]) -> None:
        """A broker has begun to live, and gives out sequences from these on."""
        for subject, spans in self.gone.items():
            end = next_sequences.get(subject, 0)
            self.gone[subject] = [(first, end if until == FOR_EVER else until) for first, until in spans]

    def is_gone(self, subject: str, sequence: int | None) -> bool:
        return sequence is not None and any(first <= sequence < end for first, end in self.gone.get(subject, ()))

    def note_answer(self, what: str, asked_ns: int) -> None:
        if self.faulty_ns is not None and asked_ns > self.faulty_ns:
            late_ms = (asked_ns - self.faulty_ns) / MS_NS
            self.blame(Promise.ANSWERED, f"{what}, asked for {late_ms:.1f} ms after the fault")

    # --- producing ---------------------------------------------------------------------------------------------------

    def note_sent(self, subject: str, payloads: Sequence[bytes], now_ns: int) -> None:
        """About to be sent; the first time counts."""
        for payload in payloads:
            self.sent.setdefault(payload, Sent(subject, now_ns))

    def note_receipt(self, subject: str, first: int, payloads: Sequence[bytes]) -> None:
        for sequence, payload in enumerate(payloads, first):
            sent = self.sent[payload]
            if not sent.is_acknowledged:
                sent.is_acknowledged = True
                self.acknowledged += 1
            self._name(subject, sequence, payload, sent)

    def _name(self, subject: str, sequence: int, payload: bytes, sent: Sent) -> None:
        if sent.sequence not in (None, sequence) and not self.is_gone(subject, sent.sequence):
            self.blame(Promise.REPEATED, f"{payload[:24]!r} was at {sent.sequence} of {subject}, now at {sequence}")
        sent.sequence = sequence
        known = self.names.setdefault(subject, {}).setdefault(sequence, payload)
        if known != payload:
            self.blame(Promise.RENAMED, f"{sequence} of {subject} was {known[:24]!r}, now {payload[:24]!r}")

    # --- consuming ---------------------------------------------------------------------------------------------------

    def note_delivery(
        self, owner: Owner, holder: Holder, found: Mapping[int, bytes], *, asked_ns: int, now_ns: int
    ) -> None:
        """These messages have reached this consumer."""
        may_be_again = holder.lost_ns > holder.got_ns  # what did not arrive went out before
        if found:
            self._check_paused(owner, holder, asked_ns, now_ns)
            holder.got_ns = now_ns
        seeks = bisect_left(owner.sought_ns, asked_ns)  # so many were over
        is_old = owner.is_seeking or seeks < len(owner.sought_ns)  # perhaps
        news: dict[int, bytes] = {}
        for sequence, payload in found.items():
            self.delivered += 1
            if not self._is_known(owner, sequence, payload):
                continue
            attempt = holder.attempts.get(sequence, 0)
            if self._is_overtaken(owner, sequence, holder, asked_ns, attempt):
                self.reasons["overtaken"] += 1
                continue
            news[sequence] = payload
            if sequence in owner.acked and owner.acked_after[sequence] <= seeks:
                self.blame(Promise.ACKED_AGAIN, f"{sequence} is handed out to {owner} again, {holder.name} gets it")
            if sequence in owner.condemned and not is_old:  # all of these were rejected since the last seek
                self.blame(Promise.RISEN, f"{sequence} of {owner} was rejected, {holder.name} gets it")
            before = owner.handed.get(sequence)
            if before is not None and not self._justify(owner, sequence, before, holder, now_ns, is_old=is_old):
                continue
            if before is None and owner.order == "merged":
                owner.begun_ns[key_of(payload) or ""] = now_ns
            owner.handed[sequence] = Handed(holder, asked_ns, "seek" if is_old else "", now_ns, attempt)
            if not is_old:
                owner.doubted.discard(sequence)
                owner.acking.discard(sequence)
        if owner.order and not (may_be_again and owner.order == "strict"):
            self._check_order(owner, holder, news)

    def _is_overtaken(self, owner: Owner, sequence: int, holder: Holder, asked_ns: int, attempt: int) -> bool:
        """Whether it was handed out before the last handout that is known, and has been on its way since."""
        last = owner.handed.get(sequence)
        if last is None or last.holder is holder or owner.is_at_most_once or not attempt:
            return False
        is_blamed = sequence in owner.acked or not last.reason
        if asked_ns <= self.crashed_ns < last.asked_ns and is_blamed:  # answers come from the life that was asked
            return True
        return attempt < last.attempt and asked_ns + owner.lease_ns <= last.got_ns

    def _check_order(self, owner: Owner, holder: Holder, found: Mapping[int, bytes]) -> None:
        """Nothing goes out while something that comes before it is not over."""
        names = self.names.get(owner.subject, {})
        over = owner.acked | owner.doubted | owner.acking
        for sequence in sorted(found):
            key = key_of(found[sequence]) if owner.order != "strict" else ""
            if key is None:
                continue
            is_behind = sequence in holder.behind
            if sequence < owner.reached.get(key, -1) and owner.order != "strict":  # there many are out at once
                self.blame(Promise.ORDER, f"{sequence} of {owner} comes after {owner.reached[key]}, {key!r}")
            if not is_behind:  # or it may come back before it is begun
                owner.reached[key] = max(sequence, owner.reached.get(key, -1))
            for earlier, payload in names.items():
                if earlier >= sequence or earlier in over or (owner.order == "key" and key_of(payload) != key):
                    continue
                if is_behind and earlier in found:  # and with it
                    continue
                handed = owner.handed.get(earlier)
                is_its = handed is not None and handed.holder is holder and handed.reason not in ("retry", "release")
                if (owner.order == "strict" or is_behind) and is_its:  # so far as is known
                    continue
                if owner.order == "merged":
                    continue
                self.blame(Promise.ORDER, f"{sequence} of {owner} goes to {holder.name} before {earlier}, {key!r}")

    def _undone(self, owner: Owner) -> list[str]:
        """Keys of which the last message was sent after the last that anybody began."""
        last: dict[str, int] = {}
        for payload in self.names.get(owner.subject, {}).values():
            key = key_of(payload) or ""
            last[key] = max(last.get(key, 0), self.sent[payload].asked_ns)
        return sorted(key for key, sent_ns in last.items() if key and owner.begun_ns.get(key, -1) < sent_ns)

    def _is_known(self, owner: Owner, sequence: int, payload: bytes) -> bool:
        sent = self.sent.get(payload)
        homes = {each.subject for each in (owner, owner.main) if each is not None}
        if sent is None or sent.subject not in homes:
            self.blame(Promise.PHANTOM, f"{payload[:24]!r} at {sequence} of {owner.subject} was never sent")
            return False
        if owner.main is None:
            self._name(owner.subject, sequence, payload, sent)
            return True
        known = self.names.setdefault(owner.subject, {}).setdefault(sequence, payload)
        if known != payload:
            self.blame(Promise.RENAMED, f"{sequence} of {owner.subject} was {known[:24]!r}, now {payload[:24]!r}")
        return True

    def _check_paused(self, owner: Owner, holder: Holder, asked_ns: int, now_ns: int) -> None:
        """What did not arrive is sent again all the same: it was handed out before."""
        of = owner.main or owner
        for name in ("", holder.name):
            since_ns = of.paused.get(name)
            if since_ns is not None and asked_ns > since_ns and holder.lost_ns <= holder.got_ns:
                since_ms = (now_ns - since_ns) / MS_NS
                self.blame(Promise.PAUSED, f"{holder.name} of {owner} is given messages, paused for {since_ms:.1f} ms")

    def _justify(
        self, owner: Owner, sequence: int, before: Handed, holder: Holder, now_ns: int, *, is_old: bool
    ) -> bool:
        """Whether this is the last time that the message was handed out, so far as is known; no: the time before is."""
        if owner.is_at_most_once:
            self.blame(Promise.TWICE, f"{sequence} of {owner} goes to {holder.name}, {before.holder.name} had it")
            return True
        reason = before.reason
        if not reason and now_ns - before.holder.contact_ns >= owner.lease_ns:
            reason = "lease"
        if not reason and self.crashed_ns >= before.asked_ns:
            reason = "crash"
        self.reasons[reason or ("seek" if is_old else "")] += 1
        if not reason and not is_old:
            silent_ms = (now_ns - before.holder.contact_ns) / MS_NS
            self.blame(
                Promise.DUPLICATE,
                f"{sequence} of {owner} goes to {holder.name}, but {before.holder.name} has it"
                f" and spoke {silent_ms:.1f} ms ago",
            )
        return bool(reason) or not is_old

    def note_member(self, owner: Owner, now_ns: int) -> None:
        """Somebody has joined: a group that began at the latest message is owed what is sent from now on."""
        owner.has_joined = True
        if owner.from_ns is None:
            owner.from_ns = now_ns

    def note_contact(self, owner: Owner, holder: Holder, *, asked_ns: int, now_ns: int) -> None:
        """A request of this consumer was answered: its lease runs at least from when it was sent. It may have ended
        before that, and the consumer have come back as a new member without being told."""
        if now_ns - holder.contact_ns >= owner.lease_ns:
            self.note_asked(owner, holder, None, "lease")
        holder.contact_ns = max(holder.contact_ns, asked_ns)

    def note_asked(self, owner: Owner, holder: Holder, sequences: Sequence[int] | None, reason: str) -> None:
        """It is about to hand these back (None: all that it has, of the inbox too)."""
        for each in owner.family if sequences is None else (owner,):
            for sequence in list(each.handed) if sequences is None else sequences:
                handed = each.handed.get(sequence)
                if handed is not None and handed.holder is holder:
                    handed.reason = reason

    def note_acking(self, owner: Owner, sequences: Sequence[int]) -> None:
        """About to be acked; whether the answer comes or not, they may be settled from now on."""
        owner.doubted.update(set(sequences) - owner.acked)
        owner.acking.update(sequences)

    def note_acked(self, owner: Owner, sequences: Sequence[int], *, stale: int = 0) -> None:
        """The answer says that all of these are settled by this ack; or that some had been before, or are others'.

        Where somebody moved the cursor meanwhile, nobody knows which came first."""
        if stale or owner.is_seeking:
            return
        for sequence in sequences:
            if sequence in owner.acking or not (owner.seeks or self.loss_ns >= 0):
                owner.acked.add(sequence)
                owner.acked_at[sequence] = self.tick
                owner.acked_after[sequence] = len(owner.sought_ns)
                owner.acking.discard(sequence)

    def note_rejecting(self, owner: Owner, sequences: Sequence[int]) -> None:
        owner.rejected.update(sequences)
        owner.rejecting.update(sequences)

    def note_rejected(self, owner: Owner, sequences: Sequence[int], *, stale: int = 0) -> None:
        if not stale and not owner.is_seeking:
            owner.condemned.update(set(sequences) & owner.rejecting)

    def note_lost(self, holder: Holder, now_ns: int) -> None:
        """It waited for a response, and the connection ended."""
        holder.lost_ns = now_ns

    def note_eviction(self, owner: Owner, holder: Holder, now_ns: int) -> None:
        """A consumer that had joined, and did not leave, is no member any more."""
        silent_ns = now_ns - holder.contact_ns
        if silent_ns < owner.lease_ns and self.loss_ns < holder.contact_ns:
            self.blame(Promise.EVICTED, f"{holder.name} of {owner} spoke {silent_ns / MS_NS:.1f} ms ago")
        self.note_asked(owner, holder, None, "lease")

    # --- steering ----------------------------------------------------------------------------------------------------

    def note_seeking(self, owner: Owner, to: int) -> None:
        """The cursor is about to be moved; from now on anything may be handed out again."""
        owner.seeks += 1
        owner.is_seeking = True
        back = {each for each in owner.acked if each >= to}
        owner.acked -= back
        owner.doubted |= back
        owner.condemned.clear()
        owner.rejecting.clear()
        self._mark_sought(owner)

    def note_sought(self, owner: Owner, to: int, now_ns: int) -> None:
        """It is done: all from there on is owed again, but for what was acked meanwhile. Below nothing is."""
        owner.is_seeking = False
        owner.sought_ns.append(now_ns)
        owner.floor = to
        owner.doubted -= {each for each in owner.doubted if each >= to and each not in owner.acking}
        owner.acking.clear()  # those that are still on their way may have come before
        owner.rejecting.clear()
        self._mark_sought(owner)

    def _mark_sought(self, owner: Owner) -> None:
        for handed in owner.handed.values():
            handed.reason = "seek"

    def note_paused(self, owner: Owner, consumer: str, now_ns: int) -> None:
        """It is known to be; `consumer` is empty where it is the whole group."""
        owner.paused[consumer] = now_ns

    def note_resuming(self, owner: Owner, consumer: str) -> None:
        owner.paused.pop(consumer, None)

    # --- the end -----------------------------------------------------------------------------------------------------

    def owed(self, owner: Owner) -> set[int]:
        """All that this group must have been given in the end."""
        if owner.from_ns is None or owner.is_at_most_once or owner.order == "merged":
            return set()
        return {
            sequence
            for sequence, payload in self.names.get(owner.subject, {}).items()
            if sequence >= owner.floor
            and self.sent[payload].asked_ns >= owner.from_ns
            and not self.is_gone(owner.subject, sequence)
        }

    def is_drained(self) -> bool:
        merged = [owner for owner in self.owners.values() if owner.order == "merged"]
        if any(self._undone(owner) for owner in merged):
            return False
        return all(owner.acked | owner.doubted >= self.owed(owner) for owner in self.owners.values())

    def check_drained(self) -> None:
        for owner in self.owners.values():
            if owner.order == "merged" and (undone := self._undone(owner)):
                self.blame(Promise.MERGED, f"nobody did what was asked for last of {undone} in {owner}")
            owed = self.owed(owner)
            if missing := sorted(owed - owner.handed.keys()):
                self.blame(Promise.LOST, f"{len(missing)} of {len(owed)} never reached {owner}: {missing[:5]}")
            elif unacked := sorted(owed - owner.acked - owner.doubted):
                self.blame(Promise.STUCK, f"{len(unacked)} of {len(owed)} cannot be settled in {owner}: {unacked[:5]}")
        for payload, sent in self.sent.items():
            if sent.is_acknowledged and sent.sequence is None:
                self.blame(Promise.LOST, f"{payload[:24]!r} was acknowledged")
