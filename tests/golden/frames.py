"""Golden frames: bytes of protocol version 1 that every later version must read, with what they say.

    python -m tests.golden.frames        writes those of CASES that have no file yet

A file that exists is never written again. `ASKED` and `ANSWERED` have one example of every message of the protocol; the
hex dumps in docs/internals/protocol.md are some of these cases.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from fairway.batch import encode
from fairway.errors import Code, Refused, StoredRange
from fairway.protocol import codec, frames, messages
from fairway.protocol.admin_messages import (ActorState, BrokerState, Configure, Configured, ConsumerState, Depth, Describe, Described, GroupDescription, Lever, Redrive, Redriven, Removed, RemoveGroup, RemoveSubject, Scan, Scanned, Seek, Sought, SubjectDescription, Switch, Switched, Weigh)
from fairway.protocol.delay_messages import (Cancel, Chronicle, Decided, Fate, History, HistoryPage, TransitReport, PastEvent, PastKind, PendingListed, DelayedBatch, PendingMessage, PendingPage, Reschedule, Resend, Resent, Stretch, Tallied, DelayTally, Which)
from fairway.protocol.frames import REFUSED, RESPONSE
from fairway.protocol.messages import (
    AttachedBatch,
    Done,
    Goodbye,
    Heartbeat,
    Hello,
    Join,
    Joined,
    Leave,
    WireLot,
    ControlMessage,
    Ping,
    Pong,
    Produce,
    Produced,
    Pull,
    Pulled,
    Renewed,
    Settle,
    SettleAll,
    Settled,
    Settlement,
    SequenceRange,
    Verb,
    Welcome,
    Whence,
)
from fairway.protocol.replication_messages import (Chunk, Compare, Compared, LogExtent, Fetch, Fetched, Follow, Followed, Give, Given, RecordMark, Mend, Mended, Replicate, Replicated, Snapshot, SnapshotFile, TakeSnapshot, Want)
from fairway.protocol.route_messages import (Act, ClientRole, RouteChange, Copy, Govern, Governed, GroupRoute, Register, Registered, Route, Routed, SubjectRoute)
from fairway.protocol.admin_messages import Index, Indexed, Named, Names, NumberedConsumer, Retrace, Retraced

FOLDER = Path(__file__).parent / "frame-v1"

BATCH = encode([b"paid"], producer_id=0x0123_4567_89AB_CDEF, first_sequence=0, created_ms=1_700_000_000_000)
APPENDED_MS = 1_700_000_000_123
DUE_MS = 1_750_000_000_000
STRETCH = bytes(range(20))  # of a log, between copies
CONFIG = b"\x80"
ID = "0000000000000G00000000000Z"
MEMBER = ("order.changed", "billing", "billing-1")

ASKED: list[ControlMessage] = [
    Hello(1, 1, [], "example 1.0", 69_206_016),
    Ping(),
    Produce("order.changed"),
    Join(*MEMBER, 0, 0, Whence.LATEST, True),
    Pull(*MEMBER, 1_000, 262_144, 30_000, 6),
    SettleAll(
        *MEMBER,
        [
            Settle(Settlement.ACK, 4_200, 1, [SequenceRange(4_200, 40), SequenceRange(4_241, 59)]),
            Settle(Settlement.RETRY, 4_200, 1, [SequenceRange(4_240, 1)], 60_000, "no stock", False, 3),
        ],
        7,
    ),
    Heartbeat(*MEMBER, 7),
    Leave(*MEMBER, 7),
    Seek("order.changed", "billing", Whence.TIME, APPENDED_MS),
    Scan("order.changed", Whence.SEQUENCE, 4_200, None, 1_048_576, 77),
    Describe(Depth.CONSUMERS, "order.changed", None, "billing", 100),
    Configure("order.changed", "billing", CONFIG, 2),
    Switch(Lever.PAUSE_CONSUMER, True, *MEMBER),
    Redrive("order.changed", "billing", [ID], 100),
    Weigh("order.changed", "billing", 2.5),
    RemoveSubject("order.changed", True, True),
    RemoveGroup("order.changed", "billing", True, True, True),
    Cancel("order.changed", None, "order-17"),
    Reschedule("", ID, None, DUE_MS),
    PendingListed(Which("order.changed", "order-", APPENDED_MS, DUE_MS + 1), "a;b", 100, True),
    DelayTally(Which(), 3_600_000),
    Resend("west"),
    Retrace(Whence.SEQUENCE, 4_200, 524_288, 78, 1_000),
    Names([1], [3], [NumberedConsumer(3, 7)]),
    Index("order.changed", Whence.SEQUENCE, 4_200, 5_000, 8_192, 77, True),
    History(Chronicle.DECIDED, Whence.SEQUENCE, 4_200, 5_000, 3, 700, 79),
    Route(ClientRole.PRODUCER, ["order.changed"], 7, 30_000, True, "order.cancelled"),
    Register(Act.CREATE, 77, "/fairway/metas/m", b"{}", 3, True, True, 30_000),
    Govern(RouteChange.EXTEND, "order.changed", ["east", "west"], 2, True, False, {"ordered": "true"}),
    Follow("east", 3, 161),
    Compare(0, [4_200, 8_400]),
    Replicate("east", 3, 161, 1, [8_400, 96], [8_400, 96], 1_000),
    Mend(1, 4_200, 80),
    Give(3, 161, 1, 4_200),
    TakeSnapshot("east", 3, 161),
    Fetch(1, 2, 4_096, 20),
]

CONSUMER = ConsumerState("billing-1", 100, 2, 7, 14_000, 3, False, "127.0.0.1:50000")
ACTOR = ActorState("ready", 2, 0, 1_000, 5_000_000, 0, 6_000_000)
GROUP = GroupDescription("billing", 4_300, 4_200, 12, 100, 0, 1, 0, 2, 0, 0, 2, 2.5, False, 3, 1, [CONSUMER], ACTOR)
BROKER = BrokerState("fairway 1.0", 77, 1, True, False, APPENDED_MS, 12)

ANSWERED: list[tuple[Verb, ControlMessage]] = [
    (Verb.HELLO, Welcome(1, [], "fairway 1.0", 69_206_016, 10_000, 1_024)),
    (Verb.PING, Pong()),
    (Verb.PRODUCE, Produced(4_200, 1, APPENDED_MS, False, 1)),
    (Verb.JOIN, Joined(CONFIG, 3, 15_000, True)),
    (Verb.PULL, Pulled(7, [WireLot(4_200, 1, [SequenceRange(4_200, 1)], 3)], [AttachedBatch(4_200, APPENDED_MS)], True)),
    (Verb.SETTLE, Settled(99, 1)),
    (Verb.HEARTBEAT, Renewed(15_000, 3, True)),
    (Verb.LEAVE, Done()),
    (Verb.SEEK, Sought(4_200, 4_300, 100, 1, 0)),
    (Verb.SCAN, Scanned([AttachedBatch(4_200, APPENDED_MS)], 4_201, 17, 4_312, 77, 1)),
    (Verb.DESCRIBE, Described(BROKER, [SubjectDescription("order.changed", 17, 4_312, False, 70, [GROUP])], "a;b")),
    (Verb.CONFIGURE, Configured(3)),
    (Verb.SWITCH, Switched(False)),
    (Verb.REDRIVE, Redriven(0, [ID])),
    (Verb.WEIGH, Done()),
    (Verb.REMOVE_SUBJECT, Removed(True, 3, 4_312, 79)),
    (Verb.REMOVE_GROUP, Removed(True, 1, 17, 0)),
    (Verb.CANCEL, Decided(Fate.CANCELLED, 3)),
    (Verb.RESCHEDULE, Decided(Fate.ALREADY_DISPATCHED, 0)),
    (
        Verb.PENDING,
        PendingPage(
            [PendingMessage("order.changed", ID, "order-17", DUE_MS, 4)], "a;c", [DelayedBatch("order.changed", 1)]
        ),
    ),
    (Verb.TALLY, Tallied(3, [Stretch(1_749_999_600_000, 3)])),
    (Verb.RESEND, Resent(5, 1)),
    (Verb.RETRACE, Retraced(b"FWR1", 4_200, 4_136, 4_204, 0, 4_204, 78, 1)),
    (Verb.NAMES, Named(["order.changed"], ["billing"], [""])),
    (Verb.INDEX, Indexed(b"", 3, 4_312, 17, 4_312, 77, 1)),
    (
        Verb.HISTORY,
        HistoryPage(
            [
                PastEvent(PastKind.SCHEDULED, "order.changed", 7, 1, APPENDED_MS, 4_200, DUE_MS, ID, "order-17"),
                PastEvent(PastKind.DISPATCHED, "order.changed", 7, 1, DUE_MS, 4_400, None, None, None, "here"),
            ],
            4_312,
            0,
            64,
            4_312,
            79,
        ),
    ),
]

BUCKET = "schedule/00000000000000000007.log"
COPY = Copy("00000000000000a1", "10.0.0.7:20880", "master", 3, [4_200, 96], True, "fairway 1.0", 9_090, {"x": 2.5}, 1)
EAST = GroupRoute("east", "broker", 3, "10.0.0.7:20880", ["10.0.0.8:20880"], False, "drained", True, 2, [COPY])
ORDERS = SubjectRoute("order.changed", ["east", "west"], ["west"], True, True, ["billing"], "closed", {"team": "shop"})
ANSWERED += [
    (Verb.ROUTE, Routed(9, [ORDERS], [EAST], True, ["10.0.0.9:20882"], True)),
    (Verb.REGISTER, Registered("stale", "/fairway/metas/m0000000003", b"{}", 4, 77, ["a", "b"], 5, True)),
    (Verb.GOVERN, Governed("subject order.changed is on east, west", ["east", "west"])),
    (Verb.FOLLOW, Followed(3, [LogExtent(77, 4_096, 8_400, 8_320), LogExtent(78, 0, 96, 96)])),
    (Verb.COMPARE, Compared([RecordMark(2, 3_735_928_559), RecordMark(0, 0)])),
    (Verb.REPLICATE, Replicated(3, [Chunk(0, 4_096, 8_400)], [8_400, 96], [4_096, 0])),
    (Verb.MEND, Mended(4_200)),
    (Verb.GIVE, Given(4_280)),
    (Verb.SNAPSHOT, Snapshot(3, 1, [SnapshotFile("schedule/manifest", 212), SnapshotFile(BUCKET, 4_116)])),
    (Verb.FETCH, Fetched(4_096, 3_430_542_310)),
]

# The same with the fields that were added later; what was written without them is still read.
TIMED = Described(
    msgspec.structs.replace(
        BROKER, now_ms=APPENDED_MS + 1, durability="sync", free_bytes=5_000_000_000, connections_max=10_000
    ),
    [SubjectDescription("order.changed", 17, 4_312, False, 70, [msgspec.structs.replace(GROUP, oldest_ms=APPENDED_MS)])],
)
WAITING = Scan("order.changed", Whence.SEQUENCE, 4_312, None, 1_048_576, 77, 1_000, ["paid"], True)
MEASURED = Scanned([AttachedBatch(4_200, APPENDED_MS)], 4_201, 17, 4_312, 77, 1, len(BATCH))
ORDERED = msgspec.structs.replace(
    GROUP,
    oldest_ms=APPENDED_MS,
    order="key",
    parked=17,
    is_full=True,
    halted=2,
    declined=3,
    coalesce="latest",
    rate_per_s=12.5,
    rate_per_key=0.5,
    active="billing-1",
    config=CONFIG,
)
DEEP = msgspec.structs.replace(
    TIMED, subjects=[SubjectDescription("order.changed", 17, 4_312, False, 70, [ORDERED])], next="a;b"
)
SPOILED = msgspec.structs.replace(DEEP, broker=msgspec.structs.replace(DEEP.broker, rotten_spans=2))
RUN = Pulled(7, [WireLot(4_200, 1, [SequenceRange(4_200, 1)], 3, True)], [AttachedBatch(4_200, APPENDED_MS)], True)
LED = Pulled(7, [WireLot(4_200, 1, [SequenceRange(4_200, 1)], 3, True)], [AttachedBatch(4_200, APPENDED_MS)], False, 5_500)
POLICIES = msgspec.msgpack.encode({"order": "key", "rate_per_s": 12.5})
OUTGROWN = frozenset(  # nobody writes these any more
    {
        "compare",
        "describe-answer",
        "describe-answer-ordered",
        "describe-answer-timed",
        "follow",
        "heartbeat-answer",
        "join",
        "join-answer",
        "join-policies",
        "produce",
        "produce-first",
        "produce-inbox",
        "produce-pinned",
        "produce-pinned-inbox",
        "produce-refused",
        "pull",
        "pull-answer",
        "pull-answer-runs",
        "pull-runs",
        "replicate-answer",
        "route",
        "route-answer",
        "scan",
        "scan-answer",
        "switch",
        "tally-answer",
    }
)

BUSY = Refused(Code.BUSY, "the disk is behind: too many bytes wait for their sync", retry_after_ms=50)
LEASED = Refused(
    Code.BUSY,
    "wait for the lease of consumer billing-1 to end, in 12.0 s unless it is renewed: another session has joined with this "
    "id, and this JOIN does not show its secret",
    retry_after_ms=1_000,
)
CONFLICT = Refused(
    Code.SEQUENCE_CONFLICT,
    "stream 00000000000004d2 already stored other bytes in 7+1",
    stored=(StoredRange(4, 10, 3_735_928_559),),
)
CORRELATION = 258  # 02 01 on the wire, so that the order of bytes shows


def _frame(verb: int, flags: int, message: ControlMessage) -> bytes:
    """What one side writes, before (HELLO) or after the handshake."""
    is_own = verb < messages.FIRST_REQUEST_VERB
    attachments = attached_to(message)
    parts = frames.write(
        verb, flags, int(verb != Verb.HELLO), 0 if is_own else CORRELATION, codec.encode(message), attachments
    )
    return b"".join(parts)


CASES: dict[str, tuple[int, int, ControlMessage]] = {
    **{f"{codec.REQUESTS[type(asked)].name.lower()}": (codec.REQUESTS[type(asked)], 0, asked) for asked in ASKED},
    **{f"{verb.name.lower()}-answer": (verb, RESPONSE, answered) for verb, answered in ANSWERED},
    "produce-refused": (Verb.PRODUCE, RESPONSE | REFUSED, codec.refusal_of(BUSY)),
    "describe-answer-timed": (Verb.DESCRIBE, RESPONSE, TIMED),
    "describe-answer-ordered": (Verb.DESCRIBE, RESPONSE, DEEP),
    "describe-answer-spoiled": (Verb.DESCRIBE, RESPONSE, SPOILED),
    "join-policies": (Verb.JOIN, 0, Join(*MEMBER, 3, 6, Whence.EARLIEST, False, POLICIES)),
    "join-secret": (Verb.JOIN, 0, Join(*MEMBER, 3, 6, Whence.EARLIEST, False, POLICIES, bytes(range(16)))),
    "join-first": (Verb.JOIN, 0, Join(*MEMBER, 0, 0, secret=bytes(range(16)))),
    "join-without-secret": (Verb.JOIN, 0, Join(*MEMBER, 0, 0)),
    "join-refused": (Verb.JOIN, RESPONSE | REFUSED, codec.refusal_of(LEASED)),
    "switch-key": (Verb.SWITCH, 0, Switch(Lever.HALT_KEY, False, "order.changed", "billing", "", "order-17")),
    "pull-runs": (Verb.PULL, 0, Pull(*MEMBER, 1_000, 262_144, 30_000, 6, 64)),
    "pull-runs-extended": (Verb.PULL, 0, Pull(*MEMBER, 1_000, 262_144, 30_000, 6, 128, True)),
    "pull-answer-runs": (Verb.PULL, RESPONSE, RUN),
    "join-answer-led": (Verb.JOIN, RESPONSE, Joined(CONFIG, 3, 15_000, False, 9, 5_500, 7)),
    "pull-answer-led": (Verb.PULL, RESPONSE, LED),
    "heartbeat-answer-led": (Verb.HEARTBEAT, RESPONSE, Renewed(15_000, 3, False, 5_500)),
    "hello-inbox": (Verb.HELLO, 0, Hello(1, 1, ["inbox"], "example 1.0", 69_206_016)),
    "hello-answer-inbox": (Verb.HELLO, RESPONSE, Welcome(1, ["inbox"], "fairway 1.0", 69_206_016, 10_000, 1_024)),
    "produce-inbox": (Verb.PRODUCE, 0, Produce("inbox:billing:order.changed")),
    "produce-first": (Verb.PRODUCE, 0, Produce("order.changed", is_pinned=False)),
    "produce-pinned": (Verb.PRODUCE, 0, Produce("order.changed", is_pinned=True)),
    "produce-pinned-inbox": (Verb.PRODUCE, 0, Produce("inbox:billing:order.changed", is_pinned=True)),
    "tally-answer-transit": (
        Verb.TALLY,
        RESPONSE,
        Tallied(3, [Stretch(1_749_999_600_000, 3)], [TransitReport("west", 5, is_reachable=False)]),
    ),
    "produce-secret": (Verb.PRODUCE, 0, Produce("order.changed", secret=bytes(range(16)))),
    "produce-inbox-secret": (Verb.PRODUCE, 0, Produce("inbox:billing:order.changed", is_pinned=True, secret=bytes(range(16)))),
    "produce-conflict": (Verb.PRODUCE, RESPONSE | REFUSED, codec.refusal_of(CONFLICT)),
    "replicate-answer-wanting": (
        Verb.REPLICATE,
        RESPONSE,
        Replicated(3, [Chunk(0, 4_096, 8_400)], [8_400, 96], [4_096, 0], [Want(1, 4_200, 80)]),
    ),
    "compare-rotten": (Verb.COMPARE, 0, Compare(0, [4_200, 8_400], True)),
    "compare-answer-rotten": (Verb.COMPARE, RESPONSE, Compared([RecordMark(2, 3_735_928_559), RecordMark(0, 1)])),
    "follow-secret": (Verb.FOLLOW, 0, Follow("east", 3, 161, bytes(range(16)))),
    "follow-without-secret": (Verb.FOLLOW, 0, Follow("east", 3, 161)),
    "route-joining": (Verb.ROUTE, 0, Route(ClientRole.PRODUCER, ["order.changed"], may_create=True, poll=2)),
    "route-polling": (Verb.ROUTE, 0, Route(ClientRole.CONSUMER, ["order.changed", "order.paid"], 9, 30_000, poll=2)),
    "route-answer-joined": (
        Verb.ROUTE,
        RESPONSE,
        Routed(9, [ORDERS], [EAST], True, ["10.0.0.9:20882"], True, joined=2, polls_max=256),
    ),
    "give-nothing": (Verb.GIVE, 0, Give(3, 161, 1, 4_200, "the record at position 4200 is damaged")),
    "scan-waiting": (Verb.SCAN, 0, WAITING),
    "scan-answer-measured": (Verb.SCAN, RESPONSE, MEASURED),
    "goodbye": (Verb.GOODBYE, 0, Goodbye("the server stops", None, 1_000)),
    "goodbye-accusing": (Verb.GOODBYE, 0, Goodbye("frame with a wrong checksum", "protocol_error")),
}


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, case in CASES.items():
        file = folder / f"{name}.bin"
        if file.exists():
            print(f"{name}: kept, golden files are never written again")
            continue
        file.write_bytes(_frame(*case))
        print(f"{name}: {file.stat().st_size} bytes written")


def attached_to(message: ControlMessage) -> list[bytes]:
    """A batch for each that goes with it, or a stretch of a log."""
    attached = frames.stretch(STRETCH) if isinstance(message, Replicated | Mended | Give | Fetched) else BATCH
    return [attached] * codec.attachments_of(message)


def encoded(name: str) -> bytes:
    """The case as this version writes it."""
    return _frame(*CASES[name])


if __name__ == "__main__":
    write(FOLDER)
