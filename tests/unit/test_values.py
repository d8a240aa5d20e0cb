"""Names, errors and limits: what every part takes for granted."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway import limits
from fairway.errors import (
    BadName,
    Code,
    DirectoryLocked,
    DiskFull,
    FairwayError,
    InvariantViolated,
    Misuse,
    NoSuchFile,
    ReadOnlyDisk,
    Refused,
    RemoteProtocolError,
    StorageFault,
    WrongDirectory,
    invariant,
)
from fairway.names import Consumer, Group, Subject

good_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", fullmatch=True)


@given(good_names)
def test_a_name_of_the_alphabet_is_itself(raw: str) -> None:
    for kind in (Subject, Group, Consumer):
        parsed = kind.parse(raw)
        assert parsed == raw
        assert type(parsed) is kind


@pytest.mark.parametrize(
    "raw", ["", ".", "..", "-x", "_x", ".hidden", "a b", "a/b", "a\\b", "a\n", "ä", "a\0", "٣", "x" * 201, "a:b", "a*"]
)
def test_any_other_name_is_bad(raw: str) -> None:
    with pytest.raises(BadName, match="subject"):
        Subject.parse(raw)


def test_a_name_is_text() -> None:
    with pytest.raises(BadName, match="bytes"):
        Subject.parse(b"orders")  # type: ignore[arg-type]


@given(st.text(max_size=210))
def test_a_bad_name_is_never_another_error(raw: str) -> None:
    with suppress(BadName):
        assert Group.parse(raw) == raw


def test_errors_have_families() -> None:
    for fault in (DiskFull, NoSuchFile, DirectoryLocked, ReadOnlyDisk, WrongDirectory):
        assert issubclass(fault, StorageFault)
    assert issubclass(BadName, Misuse)
    families = (RemoteProtocolError, Refused, StorageFault, Misuse, InvariantViolated)
    for family in families:
        assert issubclass(family, FairwayError)
        assert not any(issubclass(family, other) for other in families if other is not family)


def test_a_refusal_says_why_and_when_to_try_again() -> None:
    refusal = Refused(Code.BUSY, "later", retry_after_ms=50)
    assert (refusal.code, refusal.sentence, refusal.retry_after_ms) == (Code.BUSY, "later", 50)
    assert str(refusal) == "BUSY: later"


def test_an_invariant_speaks_only_when_it_is_broken() -> None:
    invariant(True, "fine")
    with pytest.raises(InvariantViolated, match="broken"):
        invariant(False, "broken")


def test_limits_agree_with_one_another() -> None:
    assert limits.BATCH_RAW_BYTES_MAX < 2**31, "Arrow's offsets are int32"
    assert limits.BATCH_MESSAGES_MAX < 2**16
    assert limits.UNSYNCED_BYTES_MAX >= limits.BATCH_RAW_BYTES_MAX, "one batch must always be admitted"
    assert limits.SEGMENT_BYTES > limits.BATCH_RAW_BYTES_MAX
    assert limits.DISK_LOW_WATER_BYTES > limits.UNSYNCED_BYTES_MAX, "what was admitted must still find room"
    assert limits.DISK_LOW_WATER_BYTES > limits.ACTION_SEGMENT_BYTES
    assert limits.CHECKPOINTS_KEPT >= 2
    assert limits.NAME_CHARS_MAX + len(".12345678901234567890.log.tmp") <= 255
    assert limits.OPEN_SEGMENTS_MAX >= 2
