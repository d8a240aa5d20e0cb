"""Frames: read as they were written, however they arrive; refused before anything is allocated."""

from __future__ import annotations

import re
import struct
import time
import tracemalloc
from collections.abc import Callable

import pytest

from fairway import limits
from fairway.batch import check
from fairway.errors import Misuse, RemoteProtocolError
from fairway.protocol import Bytes, FrameReader, frames
from tests.unit.protocol.feeding import (
    BATCH,
    BIG_BATCH,
    JUNK,
    WAYS,
    buffer_reader,
    byte_by_byte,
    contents,
    frame,
    joined,
    read,
    reader,
    whole,
    write,
)

Way = Callable[[bytes], list[bytes]]
Make = Callable[[], FrameReader]

both_readers = pytest.mark.parametrize("make", [reader, buffer_reader])

SOUND: dict[str, bytes] = {
    "shortest": frame(),
    "control of 8 bytes": frame(b"\x97" + b"\x01" * 7),
    "control of 9 bytes": frame(b"\x98" + b"\x01" * 8),
    "answer": frame(flags=1, correlation=2**64 - 1),
    "refusal": frame(flags=3),
    "flags that may be ignored": frame(flags=0xF0),
    "one batch": frame(attachments=BATCH),
    "batches": frame(attachments=BATCH * 3),
    "a large batch": frame(attachments=BIG_BATCH),
    "large and small": frame(attachments=BATCH + BIG_BATCH + BATCH),
}

BAD: dict[str, tuple[bytes, str]] = {
    "too long": (frame(size=2**20 + 8), "at most 1048576 are allowed here"),
    "giant": (frame(size=2**32 - 8), "at most 1048576 are allowed here"),
    "shorter than its header": (frame(size=16), "a multiple of 8 from 24 up"),
    "no length": (frame(size=0), "a multiple of 8 from 24 up"),
    "crooked length": (frame(size=33), "a multiple of 8 from 24 up"),
    "other version": (frame(version=2), "frame of protocol version 2: 1 is expected"),
    "must-flag 4": (frame(flags=4), "frame flags 0x4 must be understood"),
    "must-flag 8": (frame(flags=8), "frame flags 0x8 must be understood"),
    "refusing request": (frame(flags=2), "a request of verb 16 marked as a refusal"),
    "no control": (frame(b"", control_bytes=0), "control message of 0 bytes in a frame of 24"),
    "control past the end": (frame(control_bytes=9), "control message of 9 bytes in a frame of 32"),
    "giant control": (frame(control_bytes=2**32 - 1), "control message of 4294967295 bytes"),
    "wrong checksum": (frame(crc=1), "wrong checksum"),
    "dirty padding": (frame(padding=b"\0\0\0\0\0\0\1"), "padding is not zero"),
    "attachment too short": (frame(attachments=bytes(8)), "attachment of 8 bytes"),
    "attachment that is none": (frame(attachments=bytes(88)), "not a batch"),
    "attachment cut short": (frame(attachments=BATCH[:-8]), "where 88 are left"),
    "crooked attachment": (frame(attachments=BATCH[:24] + b"\x51\0\0\0" + BATCH[28:]), "attached batch of 81 bytes"),
    "attachment of no size": (frame(attachments=BATCH[:24] + bytes(4) + BATCH[28:]), "attached batch of 0 bytes"),
    "rest behind the batch": (frame(attachments=BATCH + bytes(8)), "attachment of 8 bytes"),
}


@both_readers
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SOUND)
def test_sound_frames_arrive_in_any_pieces(name: str, way: Way, make: Make) -> None:
    data = SOUND[name]
    found, error = read(way(data * 3), make())
    assert error is None
    expected, _ = read([data], reader())
    assert len(expected) == 1
    assert contents(found) == contents(expected) * 3


@both_readers
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SOUND)
def test_junk_behind_a_frame_takes_nothing_from_it(name: str, way: Way, make: Make) -> None:
    found, error = read(way(SOUND[name] + JUNK), make())
    assert len(found) == 1
    assert error is not None


@both_readers
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("junk", [b"", JUNK], ids=["alone", "with junk"])
@pytest.mark.parametrize("name", BAD)
def test_bad_frames_are_refused(name: str, way: Way, junk: bytes, make: Make) -> None:
    data, sentence = BAD[name]
    found, error = read(way(SOUND["shortest"] + data + junk), make())
    assert len(found) == 1, "what came before the mistake counts"
    assert error is not None
    assert re.search(sentence, str(error))


@both_readers
@pytest.mark.parametrize("name", SOUND)
def test_half_frames_wait(name: str, make: Make) -> None:
    data = SOUND[name]
    for cut in {0, 1, 15, 16, 23, 24, len(data) // 2, len(data) - 1}:
        half = make()
        assert read([data[:cut]], half) == ([], None)
        assert half.buffered_bytes == cut
        assert len(read([data[cut:]], half)[0]) == 1
        assert half.buffered_bytes == 0


def test_what_is_written_is_what_the_tables_say() -> None:
    assert write(16, 0, 5, control=b"\x91\xa1s", attachments=[BATCH]) == frame(
        b"\x91\xa1s", correlation=5, attachments=BATCH
    )
    assert write(18, 3, 2**64 - 1) == frame(verb=18, flags=3, correlation=2**64 - 1)


def test_batches_are_not_copied_on_their_way_out() -> None:
    batches: list[Bytes] = [memoryview(BIG_BATCH), BATCH]
    parts = frames.write(16, 0, 1, 1, b"\x90", batches)
    assert len(parts) == 3
    assert parts[1] is batches[0]
    assert parts[2] is batches[1]


def test_what_cannot_be_read_is_not_written() -> None:
    with pytest.raises(Misuse, match="a multiple of 8"):
        frames.write(16, 0, 1, 1, b"\x90", [b"123"])
    with pytest.raises(Misuse, match="control message of 1048577 bytes"):
        frames.write(16, 0, 1, 1, bytes(limits.CONTROL_BYTES_MAX + 1))
    with pytest.raises(Misuse, match="the other side takes at most 4096"):
        frames.write(16, 0, 1, 1, b"\x90", [bytes(4_096)], bytes_max=4_096)


@pytest.mark.parametrize("way", WAYS)
def test_attachments_pass_the_batch_door_as_they_come(way: Way) -> None:
    [found], _ = read(way(SOUND["large and small"]), reader())
    assert [check(each).count for each in found.attachments] == [1, 2, 1]
    assert [type(each) for each in found.attachments] == [bytes, memoryview, bytes]
    large = found.attachments[1]
    assert isinstance(large, memoryview)
    assert large.readonly


def test_a_large_batch_that_arrives_whole_is_not_copied() -> None:
    data = SOUND["a large batch"]
    [found], _ = read([data], reader())
    large = found.attachments[0]
    assert isinstance(large, memoryview)
    assert large.obj is data


def test_before_the_handshake_frames_are_small() -> None:
    data = frame(version=0, size=limits.HELLO_FRAME_BYTES_MAX + 8)
    found, error = read([data], FrameReader())
    assert found == []
    assert "at most 4096 are allowed here" in str(error)


def test_nothing_is_allocated_on_the_word_of_a_header() -> None:
    promised = frame(size=limits.FRAME_BYTES_MAX, control_bytes=1)[:24]
    waiting = reader(limits.FRAME_BYTES_MAX)
    tracemalloc.start()
    try:
        assert read([promised, b"x" * 1_000], waiting) == ([], None)
        assert tracemalloc.get_traced_memory()[1] < 16_000
    finally:
        tracemalloc.stop()
    assert waiting.buffered_bytes == 1_024


def _seconds_to_gather(mebibytes: int) -> float:
    control = bytes(8)
    size = 32 + (mebibytes << 20)
    head = struct.pack("<IHBBQII", size, 16, 0, 1, 1, 8, 0) + control
    piece = bytes(1_024)
    gathering = reader(limits.FRAME_BYTES_MAX)
    started = time.process_time()
    assert read([head], gathering) == ([], None)
    for _ in range((mebibytes << 10) - 1):
        gathering.feed(piece)
        assert gathering.next_frame() is None
    return time.process_time() - started


def test_gathering_costs_in_proportion_to_the_bytes() -> None:
    small = min(_seconds_to_gather(2) for _ in range(3))
    large = min(_seconds_to_gather(16) for _ in range(3))
    assert large < 8 * small * 4, "eight times the bytes; quadratic would be 64 times the time"


def test_unread_bytes_are_kept() -> None:
    late = reader()
    for chunk in byte_by_byte(SOUND["batches"] * 2):
        late.feed(chunk)
    assert len(list(late.frames())) == 2


def test_bytes_of_any_kind_are_taken() -> None:
    data = SOUND["large and small"]
    for chunk in (data, bytearray(data), memoryview(data)):
        found, error = read([chunk], reader())
        assert error is None
        assert contents(found) == contents(read(whole(data), reader())[0])


@pytest.mark.parametrize("name", ["too long", "wrong checksum", "dirty padding", "rest behind the batch"])
@pytest.mark.parametrize("way", WAYS)
@both_readers
def test_a_reader_raises_and_does_not_guess_where_the_next_frame_begins(name: str, way: Way, make: Make) -> None:
    broken = make()
    read(way(BAD[name][0]), broken)
    for _ in range(2):
        broken.feed(SOUND["shortest"])
        with pytest.raises(RemoteProtocolError):
            broken.next_frame()


def test_joined_parts_are_one_frame() -> None:
    parts = frames.write(16, 0, 1, 1, b"\x90", [BATCH, BIG_BATCH])
    assert contents(read(parts, reader())[0]) == contents(read([joined(parts)], reader())[0])
