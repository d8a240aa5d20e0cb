"""The text form of an id: 26 characters, one for each id, read back leniently where Crockford says so."""

from __future__ import annotations

import pytest

from fairway.batch import MessageId
from fairway.errors import Misuse


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (MessageId(0, 0), "00000000000000000000000000"),
        (MessageId(0, 31), "0000000000000000000000000Z"),
        (MessageId(1, 0), "0000000000000G000000000000"),
        (MessageId(2**64 - 1, 2**64 - 1), "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"),
    ],
)
def test_text_form(one: MessageId, text: str) -> None:
    assert str(one) == text
    assert MessageId.parse(text) == one


def test_text_sorts_as_ids_do() -> None:
    ids = [MessageId(producer, sequence) for producer in (1, 2, 300, 2**63) for sequence in (0, 1, 31, 32, 2**40)]
    assert sorted(map(str, ids)) == list(map(str, sorted(ids)))


def test_what_people_mistype_is_read() -> None:
    assert MessageId.parse("7zzzzzzzzzzzzoilabc0000000") == MessageId.parse("7ZZZZZZZZZZZZ011ABC0000000")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has 0 characters, an id has 26"),
        ("0" * 25, "has 25 characters"),
        ("0" * 27, "has 27 characters"),
        ("0" * 25 + "U", "'U' is not a digit"),
        ("0" * 25 + "-", "'-' is not a digit"),
        ("0" * 25 + "ß", "'ß' is not a digit"),
        ("8" + "0" * 25, "begins with '8'"),
    ],
)
def test_bad_text_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(Misuse, match=sentence):
        MessageId.parse(text)
