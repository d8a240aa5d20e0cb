"""What was copied is known by where it came from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fairway.broker.message_copies import CopiedRanges, stream_of
from fairway.names import GroupName, Subject

SPAN = st.tuples(st.integers(0, 60), st.integers(1, 12))


@given(st.lists(SPAN, max_size=20), SPAN)
def test_spans_are_remembered_like_a_set_of_sequences(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    copies = CopiedRanges(None, 0, 0)  # type: ignore[arg-type]  # nothing is refreshed
    held: set[int] = set()
    for first, count in added:
        copies.add(first, count)
        held |= set(range(first, first + count))
    first, count = asked
    wanted = set(range(first, first + count))
    missing = [sequence for at, length in copies.missing(first, count) for sequence in range(at, at + length)]
    assert missing == sorted(wanted - held)
    assert copies.count(first, first + count) == len(wanted & held)


def test_a_stream_is_of_one_subject_and_one_group() -> None:
    streams = {
        stream_of(Subject(subject), GroupName(group)) for subject in ("a", "b", "inbox:g:a") for group in ("g", "h")
    }
    assert len(streams) == 6
    assert 0 not in streams
