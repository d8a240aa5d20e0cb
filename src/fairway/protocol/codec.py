"""The codec: which message goes with which verb (a literal table), and its bytes (msgspec).

Bytes from the peer become a message of the right type or a RemoteProtocolError. Unknown fields at the end are ignored,
so an older side understands a newer one. A field that is missing, of another type, negative or not UTF-8 is refused.
msgspec allocates in proportion to the bytes that it reads, never to a length that they claim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from fairway import limits
from fairway.errors import Code, Misuse, Refused, RemoteProtocolError, StoredRange
from fairway.protocol import admin_messages, delay_messages, messages, replication_messages, route_messages
from fairway.protocol.messages import ControlMessage, Verb

# verb: (request, answer unless refused)
TABLE: Final[dict[Verb, tuple[type[ControlMessage], type[ControlMessage]]]] = {
    Verb.HELLO: (messages.Hello, messages.Welcome),
    Verb.PING: (messages.Ping, messages.Pong),
    Verb.PRODUCE: (messages.Produce, messages.Produced),
    Verb.JOIN: (messages.Join, messages.Joined),
    Verb.PULL: (messages.Pull, messages.Pulled),
    Verb.SETTLE: (messages.SettleAll, messages.Settled),
    Verb.HEARTBEAT: (messages.Heartbeat, messages.Renewed),
    Verb.LEAVE: (messages.Leave, messages.Done),
    Verb.SEEK: (admin_messages.Seek, admin_messages.Sought),
    Verb.SCAN: (admin_messages.Scan, admin_messages.Scanned),
    Verb.DESCRIBE: (admin_messages.Describe, admin_messages.Described),
    Verb.CONFIGURE: (admin_messages.Configure, admin_messages.Configured),
    Verb.SWITCH: (admin_messages.Switch, admin_messages.Switched),
    Verb.REDRIVE: (admin_messages.Redrive, admin_messages.Redriven),
    Verb.WEIGH: (admin_messages.Weigh, messages.Done),
    Verb.CANCEL: (delay_messages.Cancel, delay_messages.Decided),
    Verb.RESCHEDULE: (delay_messages.Reschedule, delay_messages.Decided),
    Verb.PENDING: (delay_messages.PendingListed, delay_messages.PendingPage),
    Verb.TALLY: (delay_messages.DelayTally, delay_messages.Tallied),
    Verb.RETRACE: (admin_messages.Retrace, admin_messages.Retraced),
    Verb.NAMES: (admin_messages.Names, admin_messages.Named),
    Verb.INDEX: (admin_messages.Index, admin_messages.Indexed),
    Verb.HISTORY: (delay_messages.History, delay_messages.HistoryPage),
    Verb.ROUTE: (route_messages.Route, route_messages.Routed),
    Verb.REGISTER: (route_messages.Register, route_messages.Registered),
    Verb.FOLLOW: (replication_messages.Follow, replication_messages.Followed),
    Verb.COMPARE: (replication_messages.Compare, replication_messages.Compared),
    Verb.REPLICATE: (replication_messages.Replicate, replication_messages.Replicated),
    Verb.MEND: (replication_messages.Mend, replication_messages.Mended),
    Verb.GOVERN: (route_messages.Govern, route_messages.Governed),
    Verb.GIVE: (replication_messages.Give, replication_messages.Given),
    Verb.SNAPSHOT: (replication_messages.TakeSnapshot, replication_messages.Snapshot),
    Verb.FETCH: (replication_messages.Fetch, replication_messages.Fetched),
    Verb.RESEND: (delay_messages.Resend, delay_messages.Resent),
    Verb.REMOVE_SUBJECT: (admin_messages.RemoveSubject, admin_messages.Removed),
    Verb.REMOVE_GROUP: (admin_messages.RemoveGroup, admin_messages.Removed),
}

REQUESTS: Final[dict[type[ControlMessage], Verb]] = {asked: verb for verb, (asked, _) in TABLE.items()}
ANSWERS: Final[dict[int, type[ControlMessage]]] = {int(verb): answered for verb, (_, answered) in TABLE.items()}

# The number of batches attached to a message; none if the message is not listed.
_ATTACHED: Final[dict[type[ControlMessage], Callable[[Any], int]]] = {
    messages.Produce: lambda _: 1,
    messages.Pulled: lambda pulled: len(pulled.batches),
    admin_messages.Scanned: lambda scanned: len(scanned.batches),
    delay_messages.PendingPage: lambda page: len(page.batches),
    replication_messages.Replicated: lambda replicated: len(replicated.chunks),
    replication_messages.Mended: lambda _: 1,
    replication_messages.Give: lambda give: 0 if give.sentence else 1,
    replication_messages.Fetched: lambda _: 1,
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

# ValueError: msgspec's own errors, and text that is not UTF-8. RecursionError: deep nesting in ignored fields.
_UNREADABLE: Final = (ValueError, RecursionError)

_STORED_MAX: Final = 64  # batches named in a conflict; with more, none of them can be the refused batch

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
    """Decode a request; the verb must be known."""
    try:
        request: ControlMessage = _DECODE_REQUEST[verb](control)
    except _UNREADABLE as error:
        raise _unreadable(verb, error) from None
    return request


def decode_answer(verb: int, control: bytes) -> ControlMessage:
    """Decode the answer to a request of that verb."""
    try:
        answer: ControlMessage = _DECODE_ANSWER[verb](control)
    except _UNREADABLE as error:
        raise _unreadable(verb, error) from None
    return answer


def decode_refusal(verb: int, control: bytes) -> Refused:
    """Decode a refusal into the exception that it means on this side."""
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
    """The code, or OTHER: a later version may use codes that this one does not know, and the connection goes on."""
    return _CODES.get(text, Code.OTHER)


def refusal_of(refused: Refused) -> messages.Refusal:
    """The wire form of a refusal."""
    stored = None
    if refused.stored is not None and len(refused.stored) <= _STORED_MAX:
        stored = [messages.StoredPart(*each) for each in refused.stored]
    return messages.Refusal(refused.code.value, shortened(refused.sentence), refused.retry_after_ms, stored)


def shortened(sentence: str) -> str:
    """Bound a sentence and make it valid UTF-8: it may quote input of a peer, or a file name."""
    if len(sentence) > limits.SENTENCE_CHARS_MAX:
        sentence = sentence[: limits.SENTENCE_CHARS_MAX - 1] + "…"
    return sentence.encode("utf-8", "replace").decode()


def attachments_of(message: ControlMessage) -> int:
    """The number of batches attached to this message."""
    count = _ATTACHED.get(type(message))
    return count(message) if count else 0


def _decoded(decode: Decode, control: bytes, verb: int) -> Any:
    try:
        return decode(control)
    except _UNREADABLE as error:
        raise _unreadable(verb, error) from None


def _unreadable(verb: int, error: Exception) -> RemoteProtocolError:
    return RemoteProtocolError(f"control message of verb {verb} cannot be read: {shortened(str(error))}")
