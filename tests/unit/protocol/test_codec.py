"""Verbs and messages: one table, one way to write them, and nothing else is read."""

from __future__ import annotations

import msgspec
import pytest

from fairway.errors import Code, Misuse, Refused, RemoteProtocolError
from fairway.protocol import admin_messages, codec, delay_messages, messages
from fairway.protocol.messages import ControlMessage, Verb
from tests.golden.frames import ANSWERED, ASKED

pack = msgspec.msgpack.encode


def test_every_verb_is_in_the_table_and_every_message_has_one_place() -> None:
    assert set(codec.TABLE) == set(Verb) - {Verb.GOODBYE}
    asked = [request for request, _ in codec.TABLE.values()]
    assert len(set(asked)) == len(asked)


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in ASKED} == {asked for asked, _ in codec.TABLE.values()}
    assert {(verb, type(message)) for verb, message in ANSWERED} == {
        (verb, answered) for verb, (_, answered) in codec.TABLE.items()
    }


@pytest.mark.parametrize("message", ASKED, ids=lambda message: type(message).__name__)
def test_requests_come_back(message: ControlMessage) -> None:
    assert codec.decode_request(codec.REQUESTS[type(message)], codec.encode(message)) == message


@pytest.mark.parametrize(("verb", "message"), ANSWERED, ids=str)
def test_answers_come_back(verb: Verb, message: ControlMessage) -> None:
    assert codec.decode_answer(verb, codec.encode(message)) == message


@pytest.mark.parametrize("message", ASKED, ids=lambda message: type(message).__name__)
def test_unknown_fields_at_the_end_are_ignored(message: ControlMessage) -> None:
    fields = msgspec.msgpack.decode(codec.encode(message))
    control = pack([*fields, "later", {"a": [1, None]}, 1.5])
    assert codec.decode_request(codec.REQUESTS[type(message)], control) == message


def test_fields_with_defaults_may_be_missing() -> None:
    assert codec.decode_request(Verb.JOIN, pack(["s", "g", "c", 0, 0])) == messages.Join("s", "g", "c", 0, 0)
    assert codec.decode_request(Verb.DESCRIBE, pack([1])) == admin_messages.Describe(admin_messages.Depth.SUBJECTS)


PULL = ["s", "g", "c", 10, 20, 30, 0]
BAD_PULLS: dict[str, bytes] = {
    "short": pack(PULL[:-1]),
    "empty": b"",
    "not an array": pack({"subject": "s"}),
    "number for a name": pack([1, *PULL[1:]]),
    "nothing for a name": pack([None, *PULL[1:]]),
    "bytes for a name": pack([b"s", *PULL[1:]]),
    "text for a number": pack([*PULL[:-1], "0"]),
    "fraction for a number": pack([*PULL[:-1], 0.5]),
    "negative": pack([*PULL[:-1], -1]),
    "beyond 63 bits": pack([*PULL[:-1], 2**63]),
    "not UTF-8": pack(PULL).replace(b"\xa1s", b"\xa1\xff"),
    "surrogates": b"\x97\xa3\xed\xa0\x80" + pack(PULL)[3:],
    "rest": pack(PULL) + b"\x00",
    "cut": pack(PULL)[:-1],
    "no such byte": b"\xc1",
    "giant array": b"\xdd\xff\xff\xff\xff" + pack(PULL)[1:],
    "giant text": b"\x97\xdb\xff\xff\xff\xff" + pack(PULL)[2:],
    "deep": b"\x98" + pack(PULL)[1:] + b"\x91" * 100_000 + b"\x90",
    "deep maps": b"\x98" + pack(PULL)[1:] + b"\x81\x01" * 100_000 + b"\x90",
}


@pytest.mark.parametrize("name", BAD_PULLS)
def test_anything_else_is_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="control message of verb 18 cannot be read"):
        codec.decode_request(Verb.PULL, BAD_PULLS[name])


@pytest.mark.parametrize("kind", [0, 5, 2**40])
def test_unknown_choices_are_refused(kind: int) -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode_request(Verb.SETTLE, pack(["s", "g", "c", [[kind, 0, 1, [[0, 1]]]], 0]))


def test_names_stay_as_they_came() -> None:
    message = codec.decode_request(Verb.PRODUCE, pack(["../../etc"]))
    assert message == messages.Produce("../../etc")


def test_what_cannot_be_written_is_our_callers_mistake() -> None:
    with pytest.raises(Misuse, match="a Settled that cannot be written"):
        codec.encode(messages.Settled(2**64, 0))


@pytest.mark.parametrize("code", Code)
def test_refusals_come_back(code: Code) -> None:
    refused = codec.decode_refusal(16, codec.encode(codec.refusal_of(Refused(code, "why", retry_after_ms=7))))
    assert (refused.code, refused.sentence, refused.retry_after_ms) == (code, "why", 7)


def test_a_code_of_a_later_version_is_still_a_refusal() -> None:
    refused = codec.decode_refusal(16, pack(["out_of_tea", "come back tomorrow", None, None, "more"]))
    assert refused.code is Code.OTHER
    assert refused.sentence == "come back tomorrow"


def test_sentences_are_bounded() -> None:
    assert len(codec.refusal_of(Refused(Code.BAD_NAME, "x" * 10_000)).sentence) == 500


def test_sentences_that_utf_8_cannot_say_are_said_nevertheless() -> None:
    assert codec.refusal_of(Refused(Code.DAMAGED, "file a\udcffb")).sentence == "file a?b"


def test_attachments_belong_to_four_messages() -> None:
    batches = [messages.AttachedBatch(1, 2), messages.AttachedBatch(2, 2)]
    assert codec.attachments_of(messages.Produce("s")) == 1
    assert codec.attachments_of(messages.Pulled(1, [], batches)) == 2
    assert codec.attachments_of(admin_messages.Scanned(batches[:1], 1, 1, 1, 1, 1)) == 1
    assert codec.attachments_of(delay_messages.PendingPage([], "", [delay_messages.DelayedBatch("s", 1)])) == 1
    assert codec.attachments_of(messages.Done()) == 0


def test_no_secret_is_in_the_repr_of_a_message() -> None:
    shown = repr(messages.Produce("orders", is_pinned=True, secret=b"0123456789abcdef"))
    assert shown == "Produce(subject='orders', is_pinned=True, secret=<16 bytes>)"
