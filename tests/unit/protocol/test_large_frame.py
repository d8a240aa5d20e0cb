"""Large frames: gathered in a buffer that takes no memory before bytes come, and freed by the owner."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fairway import limits
from fairway.batch import check, encode
from fairway.limits import KIB, MIB
from fairway.protocol import Connection, FrameReader, Role
from fairway.protocol.messages import Produce
from fairway.runtime.buffers import LazyBuffer
from tests.unit.protocol.feeding import Pair, contents, frame, read, reader

LARGE = encode([b"a" * MIB, b"b" * 100], producer_id=1, first_sequence=0, created_ms=0)
STATM = Path("/proc/self/statm")
WITHOUT_ADDRESSES = """
import resource
from fairway.protocol import FrameReader
from tests.unit.protocol.test_large_frame import LARGE, in_pieces
from tests.unit.protocol.feeding import contents, frame, read
data = frame(attachments=LARGE)
expected = contents(read([data], FrameReader(frame_bytes_max=2 << 20, version=1))[0])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
waiting = FrameReader(frame_bytes_max=1 << 30, version=1)
assert read([frame(size=1 << 30, control_bytes=1)[:24], bytes(1000)], waiting) == ([], None)
assert waiting.buffered_bytes == 1024
assert contents(read(in_pieces(data), FrameReader(frame_bytes_max=2 << 20, version=1))[0]) == expected
print("read")
"""


def in_pieces(data: bytes, size: int = 100_000) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


class Unused:
    """Whoever is told of buffers that nobody uses."""

    def __init__(self) -> None:
        self.buffers: list[LazyBuffer] = []
        self.threads: list[int] = []

    def note(self, buffer: LazyBuffer) -> None:
        self.buffers.append(buffer)
        self.threads.append(threading.get_ident())


def large_reader(unused: Unused) -> FrameReader:
    return FrameReader(frame_bytes_max=limits.FRAME_BYTES_MAX, version=1, on_unused=unused.note)


def test_a_large_frame_is_read_from_its_buffer_and_its_batch_is_a_view() -> None:
    data = frame(attachments=LARGE)
    [found], error = read(in_pieces(data), reader(2 * MIB))
    assert error is None
    assert contents([found]) == contents(read([data], reader(2 * MIB))[0])
    [attached] = found.attachments
    assert isinstance(attached, memoryview)
    assert isinstance(attached.obj, LazyBuffer)
    assert attached.readonly
    assert check(attached).count == 2


@pytest.mark.parametrize("size", [1, 23, 24, 25, 7 * KIB, MIB - 8, MIB, MIB + 8])
def test_large_and_small_frames_follow_one_another(size: int) -> None:
    small = frame(correlation=9)
    data = small + frame(attachments=LARGE, correlation=1) * 2 + small * 3 + frame(attachments=LARGE) + small
    pieces = in_pieces(data, size) if size > 1 else [data[:1], data[1:]]
    found, error = read(pieces, reader(2 * MIB))
    assert error is None
    assert contents(found) == contents(read([data], reader(2 * MIB))[0])
    assert len(found) == 8


def test_the_owner_is_told_once_nobody_has_a_view_any_more() -> None:
    unused = Unused()
    found, _ = read(in_pieces(frame(attachments=LARGE)), large_reader(unused))
    part = memoryview(found[0].attachments[0])[100:200]
    del found
    assert unused.buffers == []
    assert bytes(part)
    del part
    [buffer] = unused.buffers
    steps = 0
    while buffer.free_some():
        steps += 1
    assert steps >= 1
    assert buffer[:MIB] == bytes(MIB), "its memory was given back to the system"
    unused.buffers.clear()
    del buffer
    gc.collect()
    assert unused.buffers == [], "not twice"


def test_the_thread_that_drops_the_last_view_tells() -> None:
    unused = Unused()
    found, _ = read(in_pieces(frame(attachments=LARGE)), large_reader(unused))
    held = [found.pop().attachments]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert len(unused.threads) == 1
    assert unused.threads[0] != threading.get_ident()


def test_a_frame_that_is_cut_off_leaves_its_buffer_to_the_owner() -> None:
    unused = Unused()
    client, server = Connection(Role.CLIENT, 0), Connection(Role.SERVER, 0, on_unused=unused.note)
    server.feed(b"".join(client.take()), 0)
    client.feed(b"".join(server.take()), 0)
    client.request(Produce("subject"), [LARGE])
    for piece in in_pieces(b"".join(client.take()))[:5]:
        assert not server.feed(piece, 0)
    assert server.buffered_bytes == 500_000
    assert server.partial_frame_bytes > len(LARGE)
    assert unused.buffers == []
    server.lost()
    assert server.buffered_bytes == 0
    assert not server.take_debris()
    assert len(unused.buffers) == 1


def test_a_bad_large_frame_leaves_its_buffer_to_the_owner() -> None:
    unused = Unused()
    pair = Pair()
    pair.server = Connection(Role.SERVER, 0, on_unused=unused.note)
    pair.to_server()
    pair.to_client()
    for piece in in_pieces(frame(attachments=LARGE, crc=1)):
        pair.server.feed(piece, 0)
    assert pair.server.closed is not None
    assert "wrong checksum" in pair.server.closed.sentence
    gc.collect()
    assert len(unused.buffers) == 1


@pytest.mark.skipif(not STATM.exists(), reason="only Linux says what a process has in memory")
def test_no_memory_is_used_on_the_word_of_a_header() -> None:
    def resident_bytes() -> int:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    promised = frame(size=limits.FRAME_BYTES_MAX, control_bytes=1)[:24]
    readers = [reader(limits.FRAME_BYTES_MAX) for _ in range(32)]
    before = resident_bytes()
    for waiting in readers:
        assert read([promised, b"x" * 1_000], waiting) == ([], None)
    assert resident_bytes() - before < 16 * MIB
    assert {waiting.buffered_bytes for waiting in readers} == {1_024}


@pytest.mark.skipif(not STATM.exists(), reason="the bound is one of Linux")
def test_without_addresses_for_a_buffer_a_frame_is_gathered_in_pieces() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ADDRESSES], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("read\n", "")
