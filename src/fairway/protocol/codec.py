"""Which message goes with which verb, and how it becomes bytes: a literal table, and msgspec.

What comes from elsewhere is a message of the right type or a RemoteProtocolError. Unknown fields at the end are
ignored, so an older side understands a newer one; whatever is missing, of another type, negative or not UTF-8 is
refused. msgspec allocates in proportion to what it reads, never to what a length claims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from fairway import limits
from fairway.errors import Code, Misuse, Refused, RemoteProtocolError, StoredRange
from fairway.protocol import admin, delaying, messages, replicating, routing, tracing
from fairway.protocol.messages import ControlMessage, Verb

# verb: (what is asked, what is answered unless refused)
TABLE: Final[dict[Verb, tuple[type[ControlMessage], type[ControlMessage]]]] = {
    Verb.HELLO: (messages.Hello, messages.Welcome),
    Verb.PING: (messages.Ping, messages.Pong),
    Verb.PRODUCE: (messages.Produce, messages.Produced),
    Verb.JOIN: (messages.Join, messages.Joined),
    Verb.PULL: (messages.Pull, messages.Pulled),
    Verb.SETTLE: (messages.SettleAll, messages.Settled),
    Verb.HEARTBEAT: (messages.Heartbeat, messages.Renewed),
    Verb.LEAVE: (messages.Leave, messages.Done),
    Verb.SEEK: (admin.Seek, admin.Sought),
    Verb.SCAN: (admin.Scan, admin.Scanned),
    Verb.DESCRIBE: (admin.Describe, admin.Described),
    Verb.CONFIGURE: (admin.Configure, admin.Configured),
    Verb.SWITCH: (admin.Switch, admin.Switched),
    Verb.REDRIVE: (admin.Redrive, admin.Redriven),
    Verb.WEIGH: (admin.Weigh, messages.Done),
    Verb.CANCEL: (delaying.Cancel, delaying.Decided),
    Verb.RESCHEDULE: (delaying.Reschedule, delaying.Decided),
    Verb.PENDING: (delaying.PendingListed, delaying.PendingPage),
    Verb.TALLY: (delaying.DelayTally, delaying.Tallied),
    Verb.RETRACE: (tracing.Retrace, tracing.Retraced),
    Verb.NAMES: (tracing.Names, tracing.Named),
    Verb.INDEX: (tracing.Index, tracing.Indexed),
    Verb.HISTORY: (delaying.History, delaying.HistoryPage),
    Verb.ROUTE: (routing.Route, routing.Routed),
    Verb.REGISTER: (routing.Register, routing.Registered),
    Verb.FOLLOW: (replicating.Follow, replicating.Followed),
    Verb.COMPARE: (replicating.Compare, replicating.Compared),
    Verb.REPLICATE: (replicating.Replicate, replicating.Replicated),
    Verb.MEND: (replicating.Mend, replicating.Mended),
    Verb.GOVERN: (routing.Govern, routing.Governed),
    Verb.GIVE: (replicating.Give, replicating.Given),
    Verb.SNAPSHOT: (replicating.TakeSnapshot, replicating.Snapshot),
    Verb.FETCH: (replicating.Fetch, replicating.Fetched),
    Verb.RESEND: (delaying.Resend, delaying.Resent),
    Verb.REMOVE_SUBJECT: (admin.RemoveSubject, admin.Removed),
    Verb.REMOVE_GROUP: (admin.RemoveGroup, admin.Removed),
}

REQUESTS: Final[dict[type[ControlMessage], Verb]] = {asked: verb for verb, (asked, _) in TABLE.items()}
ANSWERS: Final[dict[int, type[ControlMessage]]] = {int(verb): answered for verb, (_, answered) in TABLE.items()}

# How many batches go with a message; none where it is not listed.
_ATTACHED: Final[dict[type[ControlMessage], Callable[[Any], int]]] = {
    messages.Produce: lambda _: 1,
    messages.Pulled: lambda pulled: len(pulled.batches),
    admin.Scanned: lambda scanned: len(scanned.batches),
    delaying.PendingPage: lambda page: len(page.batches),
    replicating.Replicated: lambda replicated: len(replicated.chunks),
    replicating.Mended: lambda _: 1,
    replicating.Give: lambda give: 0 if give.sentence else 1,
    replicating.Fetched: lambda _: 1,
}

Decode = Callable[[bytes], Any]

_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE_REQUEST: Final[dict[int, Decode]] = {
    int(verb): msgspec.msgpack.Decoder(asked).decode for verb, (asked, _) in TABLE.items()
}
_DECODE_ANSWER: Final[dict[int, Decode]] = {
    int(verb): msgspec.msgpack.Decoder(answered).decode for verb, (_, answered) in TABLE.items()
}
_DECODE_REFUSAL: Final[Decode] = msgspec.msgpack.Decoder(messages.Refusal).decode
_DECODE_GOODBYE: Final[Decode] = msgspec.msgpack.Decoder(messages.Goodbye).decode

# ValueError: msgspec's own errors, and text that is not UTF-8. RecursionError: nesting in fields to be ignored.
_UNREADABLE: Final = (ValueError, RecursionError)

_STORED_MAX: Final = 64  # batches that a conflict names; where there are more, none of them is the one that was sent

_CODES: Final = {code.value: code for code in Code}


def knows(verb: int) -> bool:
    return verb in _DECODE_REQUEST


def encode(message: ControlMessage) -> bytes:
    """The control message's bytes."""
    try:
        return _ENCODE(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise Misuse(f"a {type(message).__name__} that cannot be written: {error}") from error


def decode_request(verb: int, control: bytes) -> ControlMessage:
    """The request; the verb must be a known one."""
    try:
        request: ControlMessage = _DECODE_REQUEST[verb](control)
    except _UNREADABLE as error:
        raise _unreadable(verb, error) from None
    return request


def decode_answer(verb: int, control: bytes) -> ControlMessage:
    """The answer to a request of that verb."""
    try:
        answer: ControlMessage = _DECODE_ANSWER[verb](control)
    except _UNREADABLE as error:
        raise _unreadable(verb, error) from None
    return answer


def decode_refusal(verb: int, control: bytes) -> Refused:
    """A refusal, as the exception that it stands for on this side."""
    refusal: messages.Refusal = _decoded(_DECODE_REFUSAL, control, verb)
    stored = None
    if refusal.stored is not None:
        stored = tuple(StoredRange(each.first, each.count, each.crc) for each in refusal.stored)
    code = code_of(refusal.code)
    return Refused(code, refusal.sentence, retry_after_ms=refusal.retry_after_ms, stored=stored)


def decode_hello(control: bytes) -> messages.Hello:
    hello: messages.Hello = _decoded(_DECODE_REQUEST[Verb.HELLO], control, Verb.HELLO)
    return hello


def decode_welcome(control: bytes) -> messages.Welcome:
    welcome: messages.Welcome = _decoded(_DECODE_ANSWER[Verb.HELLO], control, Verb.HELLO)
    return welcome


def decode_goodbye(control: bytes) -> messages.Goodbye:
    goodbye: messages.Goodbye = _decoded(_DECODE_GOODBYE, control, Verb.GOODBYE)
    return goodbye


def code_of(text: str) -> Code:
    """A later version may refuse with codes that this one does not know: that is no reason to hang up."""
    return _CODES.get(text, Code.OTHER)


def refusal_of(refused: Refused) -> messages.Refusal:
    """What goes over the wire for a refusal."""
    stored = None
    if refused.stored is not None and len(refused.stored) <= _STORED_MAX:
        stored = [messages.StoredPart(*each) for each in refused.stored]
    return messages.Refusal(refused.code.value, shortened(refused.sentence), refused.retry_after_ms, stored)


def shortened(sentence: str) -> str:
    """A sentence may quote what somebody else sent, or a file's name: it is bounded, and UTF-8 can say it."""
    if len(sentence) > limits.SENTENCE_CHARS_MAX:
        sentence = sentence[: limits.SENTENCE_CHARS_MAX - 1] + "…"
    return sentence.encode("utf-8", "replace").decode()


def attachments_of(message: ControlMessage) -> int:
    """How many batches go with this message."""
    count = _ATTACHED.get(type(message))
    return count(message) if count else 0


def _decoded(decode: Decode, control: bytes, verb: int) -> Any:
    try:
        return decode(control)
    except _UNREADABLE as error:
        raise _unreadable(verb, error) from None


def _unreadable(verb: int, error: Exception) -> RemoteProtocolError:
    return RemoteProtocolError(f"control message of verb {verb} cannot be read: {shortened(str(error))}")
