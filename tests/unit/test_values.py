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
from fairway.names import ConsumerName, GroupName, Subject

good_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", fullmatch=True)


@given(good_names)
def test_a_name_of_the_alphabet_is_itself(raw: str) -> None:
    for kind in (Subject, GroupName, ConsumerName):
        parsed = kind.parse(raw)
        assert parsed == raw
        assert type(parsed) is kind


@pytest.mark.parametrize(
    "raw", ["", ".", "..", "-x", "_x", ".hidden", "a b", "a/b", "a\\b", "a\n", "ä", "a\0", "٣", "x" * 201, "a:b", "a*"]
)
def test_any_other_name_is_bad(raw: str) -> None:
    with pytest.raises(BadName, match="subject"):
        Subject.parse(raw)


DEEPEST = f"dead:{'x' * 200}:dead:{'y' * 200}:{'z' * 200}"


@pytest.mark.parametrize(
    "raw", ["dead:g:orders", "inbox:g:orders", "dead:g:dead:h:orders", "inbox:g:dead:h:o", DEEPEST]
)
def test_the_brokers_own_subjects_can_be_read_and_not_sent_to(raw: str) -> None:
    assert Subject.parse_any(raw) == raw
    assert Subject.parse_any(raw).is_internal
    with pytest.raises(BadName, match="own"):
        Subject.parse(raw)


@pytest.mark.parametrize(
    "raw", ["dead:", "dead:g", "dead:g:", "alive:g:orders", "dead:g:inbox:h:o", "dead:g:dead:h:dead:i:o", "dead:../x:o"]
)
def test_not_everything_with_a_colon_is_the_brokers_own(raw: str) -> None:
    with pytest.raises(BadName):
        Subject.parse_any(raw)


def test_groups_consume_dead_letters_one_deep() -> None:
    assert Subject.parse_joinable("orders") == "orders"
    assert Subject.parse_joinable("dead:g:orders") == "dead:g:orders"
    for raw in ("inbox:g:orders", "dead:g:dead:h:orders"):
        with pytest.raises(BadName, match="own"):
            Subject.parse_joinable(raw)


def test_an_inbox_says_whose_it_is() -> None:
    assert Subject.parse_inbox("inbox:g:orders") == ("g", "orders")
    assert Subject.parse_inbox("inbox:g:dead:h:orders") == ("g", "dead:h:orders")
    assert Subject.inbox(*Subject.parse_inbox("inbox:g:dead:h:orders")) == "inbox:g:dead:h:orders"
    for raw in ("orders", "dead:g:orders", "inbox:g", "inbox:g:", "inbox::orders", "inbox:g:inbox:h:o"):
        with pytest.raises(BadName, match="is no inbox"):
            Subject.parse_inbox(raw)


def test_names_that_the_broker_makes_are_names_that_it_reads() -> None:
    dead = Subject.dead_letters(GroupName("g"), Subject("orders"))
    assert Subject.parse_any(dead) == "dead:g:orders"
    assert Subject.parse_any(Subject.inbox(GroupName("h"), dead)).is_inbox


def test_a_name_is_text() -> None:
    with pytest.raises(BadName, match="bytes"):
        Subject.parse(b"orders")  # type: ignore[arg-type]


@given(st.text(max_size=210))
def test_a_bad_name_is_never_another_error(raw: str) -> None:
    with suppress(BadName):
        assert GroupName.parse(raw) == raw


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
