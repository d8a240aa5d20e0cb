"""The check of a batch: every reader can read a batch that passes, in one way only and within its bounds.

A CRC proves that the bytes are the ones that were sent, but the sender may be faulty or hostile. So every length and
offset is checked before use, in the order of the bytes: header, CRC, section, then column after column. Each offsets
buffer begins at 0, never decreases, and its last value is the length of the next buffer. Padding is zero, and no bytes
are left over. Redundant parts (tag filter, key hashes) must agree with their columns, and all text is UTF-8. So no
consumer, years later and in Spark, finds a batch that it cannot read.

The loops run in numpy, `sorted`, `map` and `str`; none of them touches the payloads.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from itertools import compress, pairwise
from operator import not_, sub
from typing import Any, Final

import msgspec
import zstandard

from fairway import limits
from fairway.batch import layout, single_message
from fairway.batch.checksum import checksum, key_hashes_of, tag_filter_of
from fairway.batch.layout import BatchHeader, Codec, byte_view, numpy_for, padded, peek
from fairway.errors import RemoteProtocolError
from fairway.runtime.buffers import Bytes

# 1 MiB: text is decoded in pieces of this size, because one wide character makes Python's str four times as large as
# its UTF-8.
_TEXT_CHUNK_BYTES: Final = limits.MIB
# 1 MiB: a column up to this size is copied once more while it is sliced, because slices of bytes are made in half the
# time of slices of a view. A larger column is not: the copy would be another 64 MiB for the largest batch.
_COPIED_BYTES_MAX: Final = limits.MIB


class Strings(msgspec.Struct, frozen=True, gc=False):
    """A checked column of strings: the start of its offsets, its number of items, and the place of its data."""

    offsets_at: int
    count: int
    data_at: int
    data_end: int


class BatchColumns(msgspec.Struct, frozen=True):
    """The place of every column in the raw body of a checked batch. None: the column is absent."""

    header: BatchHeader
    view: memoryview  # the whole batch
    raw: memoryview  # its columns, decompressed
    payloads: Strings
    validity_at: int  # of the keys
    keys: Strings | None
    tag_lists_at: int  # offsets of the lists
    tags: Strings | None
    header_lists_at: int
    names: Strings | None
    values: Strings | None
    created_at: int | None

    def offsets(self, at: int, count: int) -> list[int]:
        """The count + 1 offsets that begin at `at`."""
        return self.raw[at : at + 4 * (count + 1)].cast("i").tolist()

    def slices(self, strings: Strings) -> list[bytes]:
        """The items of a column."""
        view = self.raw[strings.data_at : strings.data_end]
        offsets = self.offsets(strings.offsets_at, strings.count)
        if len(view) > _COPIED_BYTES_MAX:
            return [bytes(view[start:end]) for start, end in pairwise(offsets)]
        data = bytes(view)
        return [data[start:end] for start, end in pairwise(offsets)]

    def validity(self) -> int:
        """Arrow's bitmap of the keys as one number: bit i is set if message i has a key."""
        return int.from_bytes(self.raw[self.validity_at : self.validity_at + (self.header.count + 7) // 8], "little")

    def present(self) -> list[bool]:
        """For each message, whether it has a key."""
        digits = f"{self.validity():0{self.header.count}b}"
        return list(map("1".__eq__, reversed(digits)))


def check(view: Bytes) -> BatchHeader:
    """The header of a batch that is sound in every byte; RemoteProtocolError otherwise."""
    header = peek(view)
    is_sound = single_message.is_sound(view, header) if header.count == 1 else _is_plainly_sound(view, header)
    return header if is_sound else open_columns(view).header


def _is_plainly_sound(view: Bytes, header: BatchHeader) -> bool:
    """A fast path for most batches: payloads alone, as bytes, not compressed.

    It takes 0.6 of the time of the general code (bench/batch). On False the general code decides, and finds the error.
    """
    if header.flags or header.codec or type(view) is not bytes or len(view) != header.size:
        return False
    count, at = header.count, header.header_length
    offsets_end = at + 4 * (count + 1)
    data_at = padded(offsets_end)
    if data_at > len(view):
        return False
    numpy = numpy_for(count)
    if numpy is not None:
        array = numpy.frombuffer(view, numpy.int32, count + 1, at)
        first, last = int(array[0]), int(array[-1])
        is_rising = 1 not in (array[1:] < array[:-1]).tobytes()  # a third of the time of numpy's own `any`
    else:
        offsets = memoryview(view)[at:offsets_end].cast("i").tolist()
        first, last = offsets[0], offsets[-1]
        is_rising = offsets == sorted(offsets)
    end = data_at + last
    return (
        is_rising
        and first == 0
        and padded(end) == len(view)
        and (end == len(view) or not any(view[end:]))
        and (offsets_end == data_at or not any(view[offsets_end:data_at]))
        and checksum(view[layout.PREFIX_BYTES :]) == header.crc
    )


def locate(view: Bytes) -> BatchColumns:
    """Find the columns of a batch that was checked before and has not changed: no checksum, no text decoding."""
    data = byte_view(view)
    header = peek(data)
    return _walk(header, data, _raw(data, header))


def open_columns(view: Bytes) -> BatchColumns:
    """Check everything that `check` checks, and find the columns."""
    return open_verified(view, verify(view))


def verify(view: Bytes) -> BatchHeader:
    """Check the header, the length, the checksum and the section; the columns stay compressed and unchecked.

    The checksum proves that the bytes are those that the broker checked. The cost follows from the stored length, not
    from the length that the sender claims for the columns.
    """
    data = byte_view(view)
    header = peek(data)
    if len(data) != header.size:
        raise RemoteProtocolError(f"batch of {header.size} bytes in {len(data)} bytes")
    if checksum(data[layout.PREFIX_BYTES :]) != header.crc:
        raise RemoteProtocolError("batch with a wrong checksum: it was damaged on its way")
    _check_section(data, header)
    return header


def open_verified(view: Bytes, header: BatchHeader) -> BatchColumns:
    """Decompress and check the columns of a batch that `verify` has passed."""
    data = byte_view(view)
    columns = _walk(header, data, _raw(data, header))
    if columns.keys is not None:
        _check_keys(columns, columns.keys)
    if columns.tags is not None:
        _check_tags(columns, columns.tags)
    if columns.names is not None and columns.values is not None:
        _check_headers(columns, columns.names, columns.values)
    return columns


def _raw(data: memoryview, header: BatchHeader) -> memoryview:
    """The columns, decompressed."""
    start = header.header_length + layout.section_bytes(header.flags, header.count)
    end = start + header.body_length
    if any(data[end:]):
        raise RemoteProtocolError("batch whose last padding is not zero")
    body = data[start:end]
    return body if header.codec is Codec.NONE else memoryview(_decompressed(body, header.raw_length))


def _decompressed(frame: memoryview, raw_length: int) -> bytes:
    """The content of a zstd frame that must hold exactly `raw_length` bytes.

    A frame names its content size, which must be the header's raw length. So the one allocation is known, and bounded,
    before the first byte is decompressed. There is one frame, with nothing behind it and without a dictionary.
    """
    if bytes(frame[:4]) != layout.ZSTD_MAGIC:  # other magics mean skippable frames and formats before zstd 1.0
        raise RemoteProtocolError("the batch's body is not a zstd frame")
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != raw_length:
            raise RemoteProtocolError(f"zstd frame of {parameters.content_size} bytes for columns of {raw_length}")
        if parameters.window_size > limits.BATCH_RAW_BYTES_MAX:
            raise RemoteProtocolError(
                f"zstd frame with a window of {parameters.window_size} bytes: at most 64 MiB is allowed"
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=limits.BATCH_RAW_BYTES_MAX)
        raw = decompressor.decompress(frame, max_output_size=raw_length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(f"the batch's body is a damaged zstd frame: {error}") from None
    if len(raw) != raw_length:
        raise RemoteProtocolError(f"zstd frame of {len(raw)} bytes for columns of {raw_length}")
    return raw


def _check_section(data: memoryview, header: BatchHeader) -> None:
    due = layout.due_times_ms(data, header)
    if due is not None:
        _check_range(due, 0, "due times")
    ids = layout.explicit_ids(data, header)
    if ids is not None and any(compress(ids[1::2], map(not_, ids[::2]))):
        raise RemoteProtocolError("explicit id with a sequence but no producer")


def _check_range(times: memoryview, since_ms: int, what: str) -> None:
    numpy = numpy_for(len(times))
    if numpy is None:
        least, most = min(times), max(times)
    else:
        array = numpy.frombuffer(times, numpy.int64)
        least, most = int(array.min()), int(array.max())
    if least + since_ms < 0 or most + since_ms > layout.TIME_MS_MAX:
        raise RemoteProtocolError(f"{what} outside the years 1970 to 9999")


class _Walker:
    """Walks through the raw body buffer by buffer. Every buffer must lie inside before it is touched."""

    __slots__ = ("at", "raw")

    def __init__(self, raw: memoryview) -> None:
        self.raw = raw
        self.at = 0

    def buffer(self, length: int, what: str) -> int:
        """Step over a buffer and its padding; returns its start."""
        start = self.at
        end = start + length
        self.at = padded(end)
        if self.at > len(self.raw):
            raise RemoteProtocolError(f"{what} of {length} bytes at {start} in columns of {len(self.raw)} bytes")
        if end != self.at and any(self.raw[end : self.at]):
            raise RemoteProtocolError(f"{what} whose padding is not zero")
        return start

    def offsets(self, count: int, item_max: int, what: str) -> tuple[int, int]:
        """Step over an offsets buffer; returns its start and its last value."""
        start = self.buffer(4 * (count + 1), what)
        return start, _last_offset(self.raw[start : start + 4 * (count + 1)], item_max, what)

    def strings(self, count: int, item_max: int, what: str) -> Strings:
        """Step over the offsets and the data of a column."""
        offsets_at, last = self.offsets(count, item_max, what)
        data_at = self.buffer(last, what)
        return Strings(offsets_at, count, data_at, data_at + last)


def _walk(header: BatchHeader, view: memoryview, raw: memoryview) -> BatchColumns:
    """Find every column. The order here is the order in the format."""
    count, flags = header.count, header.flags
    walker = _Walker(raw)
    validity_at = tag_lists_at = header_lists_at = 0
    keys = tags = names = values = created_at = None
    payloads = walker.strings(count, limits.BATCH_RAW_BYTES_MAX, "payloads")
    if flags & layout.KEYS:
        validity_at = walker.buffer((count + 7) // 8, "key validity")
        keys = walker.strings(count, limits.KEY_BYTES_MAX, "keys")
    if flags & layout.TAGS:
        tag_lists_at, items = walker.offsets(count, limits.BATCH_TAGS_MAX, "tag lists")
        tags = walker.strings(items, limits.TAG_BYTES_MAX, "tags")
    if flags & layout.HEADERS:
        header_lists_at, items = walker.offsets(count, limits.HEADERS_MAX, "header lists")
        names = walker.strings(items, limits.BATCH_RAW_BYTES_MAX, "header names")
        values = walker.strings(items, limits.BATCH_RAW_BYTES_MAX, "header values")
    if flags & layout.CREATED:
        created_at = walker.buffer(8 * count, "created-at deltas")
        _check_range(raw[created_at : created_at + 8 * count].cast("q"), header.created_ms, "created-at times")
    if walker.at != len(raw):
        raise RemoteProtocolError(f"columns of {walker.at} bytes in a body of {len(raw)}")
    return BatchColumns(
        header, view, raw, payloads, validity_at, keys, tag_lists_at, tags, header_lists_at, names, values, created_at
    )


def _last_offset(buffer: memoryview, item_max: int, what: str) -> int:
    """The last offset. Offsets must begin at 0, never decrease, and never grow by more than `item_max` in one step."""
    numpy = numpy_for(len(buffer) // 4)
    if numpy is None:
        rising, last, longest = _survey_list(buffer.cast("i").tolist(), item_max)
    else:
        rising, last, longest = _survey_array(numpy.frombuffer(buffer, numpy.int32), item_max)
    if not rising:
        raise RemoteProtocolError(f"{what} whose offsets do not begin at 0 or decrease")
    if longest > item_max:
        raise RemoteProtocolError(f"{what} of length {longest}: at most {item_max} is allowed")
    return last


def _survey_list(offsets: list[int], item_max: int) -> tuple[bool, int, int]:
    """Whether the offsets begin at 0 and never decrease; the last one; the longest step (0: not needed)."""
    rising, last = offsets[0] == 0 and offsets == sorted(offsets), offsets[-1]
    return rising, last, max(map(sub, offsets[1:], offsets)) if rising and last > item_max else 0


def _survey_array(offsets: Any, item_max: int) -> tuple[bool, int, int]:
    """The same for an ndarray."""
    # Compared, not subtracted: a difference of two int32 can wrap around and look harmless.
    rising, last = offsets[0] == 0 and bool((offsets[1:] >= offsets[:-1]).all()), int(offsets[-1])
    return rising, last, int((offsets[1:] - offsets[:-1]).max()) if rising and last > item_max else 0


def _check_text(columns: BatchColumns, strings: Strings, what: str) -> None:
    """Check that the column is UTF-8, and no item begins inside a character."""
    data = columns.raw[strings.data_at : strings.data_end]
    try:
        characters = _count_characters(data)
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"{what} that are not UTF-8: {error.reason}") from None
    if characters != len(data) and _cuts_character(data, columns.offsets(strings.offsets_at, strings.count)):
        raise RemoteProtocolError(f"{what} cut inside a character")


def _count_characters(data: memoryview) -> int:
    if len(data) <= _TEXT_CHUNK_BYTES:
        return len(str(data, "utf-8"))
    decoder = codecs.getincrementaldecoder("utf-8")()
    chunks = range(0, len(data), _TEXT_CHUNK_BYTES)
    characters = sum(len(decoder.decode(data[at : at + _TEXT_CHUNK_BYTES])) for at in chunks)
    decoder.decode(b"", final=True)
    return characters


def _cuts_character(data: memoryview, offsets: list[int]) -> bool:
    """Whether an offset points at a continuation byte; an offset at the very end points at no byte."""
    inside = offsets[: bisect_left(offsets, len(data))]
    numpy = numpy_for(len(inside))
    if numpy is None:
        return any(data[offset] & 0xC0 == 0x80 for offset in inside)
    return bool((numpy.frombuffer(data, numpy.uint8)[inside] & 0xC0 == 0x80).any())


def _check_keys(columns: BatchColumns, keys: Strings) -> None:
    _check_text(columns, keys, "keys")
    validity = columns.validity()
    if validity >> columns.header.count:
        raise RemoteProtocolError("key validity with bits past the last message")
    items = columns.slices(keys)
    if validity.bit_count() != len(items) and any(compress(items, map(not_, columns.present()))):
        raise RemoteProtocolError("key that is absent but has bytes")
    hashes = layout.key_hashes(columns.view, columns.header)
    if hashes is None or hashes.tobytes() != key_hashes_of(items, validity):
        raise RemoteProtocolError("key hashes that are not those of the keys")


def _check_tags(columns: BatchColumns, tags: Strings) -> None:
    _check_text(columns, tags, "tags")
    if tag_filter_of(columns.slices(tags)) != columns.header.tag_filter:
        raise RemoteProtocolError("tag filter that is not the one of the tags")


def _check_headers(columns: BatchColumns, names: Strings, values: Strings) -> None:
    _check_text(columns, names, "header names")
    _check_text(columns, values, "header values")
    count = columns.header.count
    offsets = columns.offsets(columns.header_lists_at, count)
    items = columns.slices(names)
    each = offsets[1]
    if offsets == [each * index for index in range(count + 1)] and items == items[:each] * count:
        offsets = offsets[:2]  # the usual case, every message has the same names: checking the first is enough
    if any(len(set(items[start:end])) != end - start for start, end in pairwise(offsets)):
        raise RemoteProtocolError("header name twice in one message")
