"""Ways in which bytes arrive, connections that talk, and frames written by hand.

The frames follow the tables of docs/internals/protocol.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from fairway.batch import checksum, encode
from fairway.errors import RemoteProtocolError
from fairway.protocol import Bytes, Connection, ConnectionEvent, ConnectionOptions, Frame, FrameReader, Role, frames

JUNK = b"\xff" * 40  # what no frame begins with: its length is beyond every bound

BATCH = encode([b"payload"], producer_id=7, first_sequence=0, created_ms=1_700_000_000_000)
BIG_BATCH = encode([bytes(40_000), b"x" * 30_000], producer_id=7, first_sequence=1, created_ms=1_700_000_000_000)


def whole(data: bytes) -> list[bytes]:
    return [data]


def byte_by_byte(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def in_sevens(data: bytes) -> list[bytes]:
    return [data[at : at + 7] for at in range(0, len(data), 7)]


WAYS: list[Callable[[bytes], list[bytes]]] = [whole, byte_by_byte, in_sevens]


def read(chunks: Iterable[Bytes], reader: FrameReader) -> tuple[list[Frame], RemoteProtocolError | None]:
    """The frames that came out, and the error that ended it, if any."""
    found: list[Frame] = []
    try:
        for chunk in chunks:
            reader.feed(chunk)
            found.extend(reader.frames())
    except RemoteProtocolError as error:
        return found, error
    return found, None


def reader(frame_bytes_max: int = 1 << 20) -> FrameReader:
    return FrameReader(frame_bytes_max=frame_bytes_max, version=1)


def buffer_reader(frame_bytes_max: int = 1 << 20) -> FrameReader:
    """One that takes every frame for a large one."""
    return FrameReader(frame_bytes_max=frame_bytes_max, version=1, buffer_from_bytes=0)


def joined(parts: Iterable[Bytes]) -> bytes:
    return b"".join(parts)


def frame(
    control: bytes = b"\x90",
    *,
    verb: int = 16,
    flags: int = 0,
    version: int = 1,
    correlation: int = 1,
    attachments: bytes = b"",
    size: int | None = None,
    control_bytes: int | None = None,
    padding: bytes | None = None,
    crc: int | None = None,
) -> bytes:
    """A frame, byte by byte from the table; what is named says what it is told to say. The CRC fits unless named."""
    padded = control + (bytes(-len(control) % 8) if padding is None else padding)
    covered = struct.pack(
        "<IHBBQI",
        24 + len(padded) + len(attachments) if size is None else size,
        verb,
        flags,
        version,
        correlation,
        len(control) if control_bytes is None else control_bytes,
    )
    return covered + struct.pack("<I", checksum(covered + padded) if crc is None else crc) + padded + attachments


def plain(data: Bytes) -> bytes:
    return bytes(data)


def contents(found: Iterable[Frame]) -> list[tuple[int, int, int, bytes, list[bytes]]]:
    """Frames, comparable whatever their attachments lie in."""
    return [(f.verb, f.flags, f.correlation, f.control, list(map(plain, f.attachments))) for f in found]


def write(*arguments: int, control: bytes = b"\x90", attachments: Iterable[Bytes] = ()) -> bytes:
    verb, flags, correlation = arguments
    return joined(frames.write(verb, flags, 1, correlation, control, list(attachments)))


class Pair:
    """A client and a server, and the wire between them."""

    def __init__(self, client: ConnectionOptions | None = None, server: ConnectionOptions | None = None) -> None:
        self.client = Connection(Role.CLIENT, 0, client)
        self.server = Connection(Role.SERVER, 0, server)
        self.now_ns = 0

    def to_server(self, junk: bytes = b"", way: Callable[[bytes], list[bytes]] = whole) -> list[ConnectionEvent]:
        return self._carry(self.client, self.server, junk, way)

    def to_client(self, junk: bytes = b"", way: Callable[[bytes], list[bytes]] = whole) -> list[ConnectionEvent]:
        return self._carry(self.server, self.client, junk, way)

    def _carry(
        self, source: Connection, target: Connection, junk: bytes, way: Callable[[bytes], list[bytes]]
    ) -> list[ConnectionEvent]:
        events: list[ConnectionEvent] = []
        for chunk in way(joined(source.take()) + junk):
            events += target.feed(chunk, self.now_ns)
        return events


def opened(client: ConnectionOptions | None = None, server: ConnectionOptions | None = None) -> Pair:
    """A pair behind its handshake."""
    pair = Pair(client, server)
    pair.to_server()
    pair.to_client()
    assert pair.client.is_open
    assert pair.server.is_open
    return pair
