"""The frame: how a stream of bytes becomes messages with batches attached, and back.

    header      16 bytes: length of the whole frame, verb, flags, protocol version, correlation id
    check       8 bytes: length of the control message, CRC-32C of header, that length and the padded control message
    control     one MessagePack array, padded with zeros to a multiple of 8
    attachments batches, one after the other; each says its own size, so no directory can contradict them. Between
                copies, stretches of a log in place of batches, each behind a header that says its size

The control CRC protects acks: a bit that flips on the way must not settle another message. Batches carry a CRC of their
own. The CRC costs 0.2 µs per frame (bench/protocol).

The reader bounds every length before it trusts the length, and allocates no memory on the word of a header. A frame
that arrives in pieces is kept in pieces and joined when it is whole. A growing buffer would be moved again and again, a
millisecond and more at a time (bench/hostile). Pieces of a large frame go into one buffer of its size, whose memory is
used only as the pieces come (`runtime.buffers`). A frame that arrives whole is read in place. Small attachments are
handed out as bytes, large ones as views of the bytes that arrived; `fairway.batch.check` takes both.

`codec` gives the control message its type, and `connection` gives the frame its place in the exchange.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from fairway import limits
from fairway.batch import HEADER_BYTES as BATCH_HEADER_BYTES
from fairway.batch import checksum
from fairway.errors import Misuse, RemoteProtocolError
from fairway.runtime.buffers import Bytes, LazyBuffer, OnUnused

# length, verb, flags, version | correlation | control length || crc
_COVERED: Final = struct.Struct("<IHBBQI")
_PREFIX: Final = struct.Struct("<IHBBQII")
_CRC: Final = struct.Struct("<I")
COVERED_BYTES: Final = _COVERED.size
PREFIX_BYTES: Final = _PREFIX.size

# A reader must understand the low four flags, and may ignore the high four.
RESPONSE: Final = 1  # the answer to the request with this correlation id
REFUSED: Final = 2  # an answer that refuses; the control message is a Refusal
_MUST_KNOWN: Final = 0x0F
_FLAGS_SOUND: Final = frozenset({0, RESPONSE, RESPONSE | REFUSED})

_BATCH_MAGIC: Final = b"FWYB"
_BATCH_SIZE: Final = struct.Struct("<4s20xI")  # the two fields of a batch's header that a frame needs
_STRETCH_MAGIC: Final = b"FWYL"
_STRETCH: Final = struct.Struct("<4s20xII")  # of a stretch: the same two, and the bytes without header and padding
STRETCH_BYTES: Final = _STRETCH.size
_ATTACHED_BYTES_MIN: Final = {_BATCH_MAGIC: BATCH_HEADER_BYTES, _STRETCH_MAGIC: STRETCH_BYTES}

# Below 16 KiB a copy costs less than a view that keeps a whole chunk of the connection's bytes alive.
VIEW_FROM_BYTES: Final = 16 * limits.KIB

# Smaller pieces are gathered in blocks: a separate object for each would take more memory than its bytes.
_PIECE_BYTES_MIN: Final = 16 * limits.KIB
_BLOCK_BYTES_MAX: Final = 256 * limits.KIB

_PADDING: Final = tuple(bytes(length) for length in range(8))


class FrameTooLarge(Misuse):
    """The frame is larger than the peer takes, or its control message is too large. Nothing was written."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One complete and sound frame; the control message is not decoded yet."""

    verb: int
    flags: int
    correlation: int
    control: bytes
    attachments: tuple[Bytes, ...] = ()


def write(
    verb: int,
    flags: int,
    version: int,
    correlation: int,
    control: bytes,
    attachments: Sequence[Bytes] = (),
    *,
    bytes_max: int = limits.FRAME_BYTES_MAX,
) -> list[Bytes]:
    """The parts of a frame, for `writelines`; attachments are passed on as they are."""
    length = len(control)
    padding = -length & 7
    size = PREFIX_BYTES + length + padding
    for each in attachments:
        size += len(each)
    if length > limits.CONTROL_BYTES_MAX or size > bytes_max or size & 7:
        raise _cannot_be_written(length, size, bytes_max)
    covered = _COVERED.pack(size, verb, flags, version, correlation, length)
    padded = control + _PADDING[padding] if padding else control
    return [covered + _CRC.pack(checksum(covered + padded)) + padded, *attachments]


def _cannot_be_written(control_bytes: int, size: int, bytes_max: int) -> Misuse:
    if control_bytes > limits.CONTROL_BYTES_MAX:
        sentence = f"control message of {control_bytes} bytes: at most {limits.CONTROL_BYTES_MAX} are allowed"
        return FrameTooLarge(sentence)
    if size > bytes_max:
        return FrameTooLarge(f"frame of {size} bytes: the other side takes at most {bytes_max}; attach fewer batches")
    return Misuse("an attachment is a batch, whose size is a multiple of 8")


class FrameReader:
    """Bytes in, frames out. Useless after a RemoteProtocolError, because the start of the next frame is unknown.

    `connection` sets `version` and `frame_bytes_max` after the handshake. Frames of `buffer_from_bytes` and more are
    gathered in a buffer; `on_unused` frees the buffer when nobody uses it any more.
    """

    __slots__ = (
        "_at", "_buffer", "_buffer_from_bytes", "_chunk", "_gathered", "_on_unused", "_partial", "_wanted",
        "frame_bytes_max", "version",
    )  # fmt: skip

    def __init__(
        self,
        *,
        frame_bytes_max: int = limits.HELLO_FRAME_BYTES_MAX,
        version: int = 0,
        buffer_from_bytes: int = limits.FRAME_BUFFER_FROM_BYTES,
        on_unused: OnUnused | None = None,
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.version = version
        self._buffer_from_bytes = buffer_from_bytes
        self._on_unused = on_unused
        self._chunk: Bytes = b""
        self._at = 0
        self._partial: list[Bytes] = []  # the pieces of an incomplete frame
        self._buffer: LazyBuffer | None = None  # in place of `_partial`, for a large frame
        self._gathered = 0  # bytes in `_partial`, or in the buffer
        self._wanted = 0  # bytes that must be there before the next parse

    @property
    def buffered_bytes(self) -> int:
        """The bytes that have arrived and are not yet part of a frame."""
        return len(self._chunk) - self._at + self._gathered

    @property
    def partial_frame_bytes(self) -> int:
        """The length of the incomplete frame, by its header; 0 if no header is complete."""
        return self._wanted if self._gathered and self._wanted > PREFIX_BYTES else 0

    @property
    def has_unread(self) -> bool:
        """Whether `next_frame` has bytes to look at."""
        return self._at < len(self._chunk)

    def feed(self, data: Bytes) -> None:
        """Take the bytes that arrived; the caller must not change them any more. Read `frames()` to the end before the
        next call, because the rest is copied."""
        if not data:
            return
        rest = len(self._chunk) - self._at
        self._chunk = b"".join((memoryview(self._chunk)[self._at :], data)) if rest else data
        self._at = 0

    def let_go(self) -> list[Bytes]:
        """Give up the pieces of an incomplete frame. Freeing megabytes takes time, so a busy caller drops them one by
        one. A buffer is not among them: `on_unused` reports it."""
        pieces, self._partial, self._gathered, self._wanted = self._partial, [], 0, 0
        self._buffer = None
        return pieces

    def frames(self) -> Iterator[Frame]:
        """Every complete frame; RemoteProtocolError at the first byte that cannot belong to a frame."""
        while (frame := self.next_frame()) is not None:
            yield frame

    def next_frame(self) -> Frame | None:
        """The next frame, or None until more bytes arrive."""
        if self._gathered:
            return self._finish()
        found = self._parse(self._chunk, self._at)
        if isinstance(found, int):
            self._set_aside(found)
            return None
        return found

    def _set_aside(self, wanted: int) -> None:
        """Begin to gather an incomplete frame."""
        self._want(wanted)
        self._gather()

    def _want(self, size: int) -> None:
        """Gather until `size` bytes are there; a large frame in a buffer, if the process has room for one."""
        self._wanted = size
        if size < self._buffer_from_bytes or size <= PREFIX_BYTES:
            return
        try:
            buffer = LazyBuffer(size, self._on_unused)
        except OSError:  # a bound on the process's address space
            return
        buffer[: self._gathered] = b"".join(self._partial)
        self._buffer, self._partial = buffer, []

    def _finish(self) -> Frame | None:
        """Go on gathering. Each byte is copied once or twice, whatever the size of the pieces."""
        while self._gather():
            at = self._at
            found = self._parse(self._joined(), 0)
            self._at = at
            if not isinstance(found, int):
                self._partial, self._buffer, self._gathered = [], None, 0
                return found
            self._want(found)
        return None

    def _gather(self) -> bool:
        """Move missing bytes from the chunk; returns whether all of them were there."""
        at, missing = self._at, self._wanted - self._gathered
        size = min(missing, len(self._chunk) - at)
        if size:
            self._keep(at, size)
            self._gathered += size
            self._at = at + size
        if self._at == len(self._chunk):
            self._chunk, self._at = b"", 0
        return size == missing

    def _keep(self, at: int, size: int) -> None:
        """Keep a piece of the chunk: the chunk itself if the piece is all of it and no buffer waits."""
        chunk, partial = self._chunk, self._partial
        if self._buffer is not None:
            self._buffer[self._gathered : self._gathered + size] = memoryview(chunk)[at : at + size]
        elif size >= _PIECE_BYTES_MIN:
            partial.append(chunk if size == len(chunk) else bytes(memoryview(chunk)[at : at + size]))
        elif partial and isinstance(partial[-1], bytearray) and len(partial[-1]) < _BLOCK_BYTES_MAX:
            partial[-1] += memoryview(chunk)[at : at + size]
        else:
            partial.append(bytearray(memoryview(chunk)[at : at + size]))

    def _joined(self) -> Bytes:
        """The gathered bytes in one piece that nobody changes."""
        if self._buffer is not None:
            return memoryview(self._buffer)
        partial = self._partial
        if len(partial) != 1 or not isinstance(partial[0], bytes):
            partial[:] = [b"".join(partial)]
        return partial[0]

    def _parse(self, data: Bytes, at: int) -> Frame | int:
        """The frame at `at`, or the number of bytes that the next parse needs. Every field is checked before use."""
        left = len(data) - at
        if left < PREFIX_BYTES:
            return PREFIX_BYTES
        size, verb, flags, version, correlation, control_bytes, crc = _PREFIX.unpack_from(data, at)
        is_sound = (
            PREFIX_BYTES + control_bytes <= size <= self.frame_bytes_max
            and 0 < control_bytes <= limits.CONTROL_BYTES_MAX
            and not size & 7
            and version == self.version
            and flags & _MUST_KNOWN in _FLAGS_SOUND
        )
        if not is_sound:
            raise RemoteProtocolError(self._complaint(size, verb, flags, version, control_bytes))
        if left < size:
            return size  # type: ignore[no-any-return]
        start = at + PREFIX_BYTES
        body = start + (control_bytes + 7 & -8)
        padded = bytes(data[start:body])
        if checksum(bytes(data[at : at + COVERED_BYTES]) + padded) != crc:
            raise RemoteProtocolError("frame with a wrong checksum: it was damaged on its way")
        if not padded.endswith(_PADDING[-control_bytes & 7]):
            raise RemoteProtocolError("control message whose padding is not zero")
        end = at + size
        attachments = _split(data, body, end) if body < end else ()
        self._at = end
        return Frame(verb, flags, correlation, padded[:control_bytes], attachments)

    def _complaint(self, size: int, verb: int, flags: int, version: int, control_bytes: int) -> str:
        """The fault of a header, in words."""
        if size > self.frame_bytes_max:
            return f"frame of {size} bytes: at most {self.frame_bytes_max} are allowed here"
        if size & 7 or size < PREFIX_BYTES:
            return f"frame of {size} bytes: a multiple of 8 from {PREFIX_BYTES} up is expected"
        if version != self.version:
            return f"frame of protocol version {version}: {self.version} is expected here"
        if flags & _MUST_KNOWN & ~(RESPONSE | REFUSED):
            return f"frame flags {flags & _MUST_KNOWN:#x} must be understood and are not"
        if flags & _MUST_KNOWN not in _FLAGS_SOUND:
            return f"a request of verb {verb} marked as a refusal"
        return f"control message of {control_bytes} bytes in a frame of {size}"


def stretch(data: Bytes) -> bytes:
    """Bytes of a log as an attachment."""
    padding = -len(data) & 7
    header = _STRETCH.pack(_STRETCH_MAGIC, STRETCH_BYTES + len(data) + padding, len(data))
    return b"".join((header, data, _PADDING[padding]))


def stretched(attachment: Bytes) -> bytes:
    """The bytes of a log from an attachment."""
    magic, size, length = _STRETCH.unpack_from(attachment) if len(attachment) >= STRETCH_BYTES else (b"", 0, 0)
    if magic != _STRETCH_MAGIC or size != len(attachment) or length > size - STRETCH_BYTES:
        raise RemoteProtocolError("attachment that is not a stretch of a log")
    return bytes(memoryview(attachment)[STRETCH_BYTES : STRETCH_BYTES + length])


def _split(data: Bytes, at: int, end: int) -> tuple[Bytes, ...]:
    """The batches between `at` and `end`, which they fill exactly."""
    attachments: list[Bytes] = []
    while at < end:
        if end - at < STRETCH_BYTES:
            raise RemoteProtocolError(f"attachment of {end - at} bytes: a batch has a header of {BATCH_HEADER_BYTES}")
        magic, size = _BATCH_SIZE.unpack_from(data, at)
        least = _ATTACHED_BYTES_MIN.get(magic)
        if least is None:
            raise RemoteProtocolError(f"attachment that is not a batch: it begins with {magic!r}")
        if size & 7 or not least <= size <= end - at:
            raise RemoteProtocolError(f"attached batch of {size} bytes where {end - at} are left")
        if size < VIEW_FROM_BYTES:
            attachments.append(bytes(data[at : at + size]))
        else:
            attachments.append(memoryview(data)[at : at + size].toreadonly())
        at += size
    return tuple(attachments)
