"""Any conversation survives any chunking; any bytes are events or a RemoteProtocolError."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fairway.batch import encode
from fairway.errors import RemoteProtocolError
from fairway.protocol import Connection, Frame, FrameReader, RequestReceived, ResponseReceived, Role, Why, frames
from fairway.protocol.messages import AttachedBatch, Pull, Pulled
from tests.unit.protocol.feeding import contents, joined, opened

MIB = 1 << 20


def _batch(payload_bytes: int, count: int) -> bytes:
    return encode([b"p" * payload_bytes] * count, producer_id=1, first_sequence=0, created_ms=0)


batches = st.builds(_batch, st.sampled_from((0, 1, 100, 20_000)), st.integers(1, 3))
sound_flags = st.sampled_from((0, 1, 3, 0x10, 0xF1))
written = st.builds(
    Frame,
    st.integers(0, 2**16 - 1),
    sound_flags,
    st.integers(0, 2**64 - 1),
    st.binary(min_size=1, max_size=40),
    st.lists(batches, max_size=3).map(tuple),
)


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    """The data, cut at these places, wherever they lie."""
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


def write(frame: Frame) -> bytes:
    return joined(frames.write(frame.verb, frame.flags, 1, frame.correlation, frame.control, frame.attachments))


cuts = st.lists(st.integers(0, 2**31), max_size=20)


@given(st.lists(written, max_size=5), cuts, st.sampled_from((0, 60, 1_000, 20_200, MIB)))
def test_any_frames_survive_any_chunking(sent: list[Frame], where: list[int], buffer_from_bytes: int) -> None:
    reader = FrameReader(frame_bytes_max=MIB, version=1, buffer_from_bytes=buffer_from_bytes)
    found: list[Frame] = []
    for chunk in chunked(b"".join(map(write, sent)), where):
        reader.feed(chunk)
        found.extend(reader.frames())
    assert contents(found) == contents(sent)
    assert reader.buffered_bytes == 0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), cuts, cuts, st.randoms(use_true_random=False))
def test_any_conversation_survives_any_chunking(
    sizes: list[int], there: list[int], back: list[int], order: object
) -> None:
    pair = opened()
    batch = _batch(100, 1)
    asked = [pair.client.request(Pull("s", "g", "c", size, 1, 0, 0)) for size in sizes]
    heard = [event for chunk in chunked(joined(pair.client.take()), there) for event in pair.server.feed(chunk, 0)]
    assert [event.correlation for event in heard if isinstance(event, RequestReceived)] == asked
    order.shuffle(asked)  # type: ignore[attr-defined]
    for correlation in asked:
        size = sizes[correlation - 1]
        pair.server.respond(correlation, Pulled(1, [], [AttachedBatch(0, 0)] * size), [batch] * size)
    answers = [event for chunk in chunked(joined(pair.server.take()), back) for event in pair.client.feed(chunk, 0)]
    assert [event.correlation for event in answers if isinstance(event, ResponseReceived)] == asked
    assert pair.client.in_flight == pair.server.in_flight == 0


@given(st.binary(max_size=200), cuts, st.sampled_from((0, 60, MIB)))
def test_any_bytes_are_frames_or_a_remote_protocol_error(data: bytes, where: list[int], buffer_from: int) -> None:
    reader = FrameReader(frame_bytes_max=MIB, version=1, buffer_from_bytes=buffer_from)
    try:
        for chunk in chunked(data, where):
            reader.feed(chunk)
            list(reader.frames())
    except RemoteProtocolError:
        return
    assert reader.buffered_bytes <= len(data)


@given(st.sampled_from(Role), st.booleans(), st.lists(written.map(write) | st.binary(max_size=60), max_size=5), cuts)
def test_any_bytes_are_events_or_the_end_of_a_connection(
    role: Role, is_open: bool, parts: list[bytes], where: list[int]
) -> None:
    pair = opened()
    connection = Connection(role, 0)
    if is_open:
        connection = pair.client if role is Role.CLIENT else pair.server
    for chunk in chunked(b"".join(parts), where):
        connection.feed(chunk, 0)
    assert connection.closed is None or connection.closed.why in {Why.BROKEN, Why.ACCUSED, Why.PARTED, Why.TURNED_AWAY}
