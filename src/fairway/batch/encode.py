"""From lists of messages to the bytes of a batch.

Payloads pass through `map`, `accumulate`, `pack` and `join` only. All loops run in C, and no Python runs per message.
Keys, tags and headers cost one encoding of the whole column if it is ASCII. The parts are joined once, at the end. The
CRC runs over the parts, which saves a second copy.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Final

import zstandard

from fairway import limits
from fairway.batch import layout, single_message
from fairway.batch.checksum import checksum, key_hashes_of, tag_filter_of
from fairway.batch.identity import MessageId
from fairway.batch.layout import PADDING, Codec
from fairway.errors import Misuse

_FLAGS_FIELD: Final = 6  # of the header
_SIZE_FIELD: Final = 8
_PRODUCER_FIELD: Final = 14  # the first sequence is the next field
_NOTHING: Final = (None, None, None, None)
_ZSTD_LEVEL: Final = 3  # zstd's own default: higher levels cost twice the time for a few per cent


def encode(
    payloads: Sequence[bytes],
    *,
    producer_id: int,
    first_sequence: int,
    created_ms: int,
    producer_epoch: int = 0,
    keys: Sequence[str | None] | None = None,
    tags: Sequence[Collection[str] | None] | None = None,
    headers: Sequence[Mapping[str, str] | None] | None = None,
    created_deltas_ms: Sequence[int] | None = None,
    due_ms: Sequence[int] | None = None,
    ids: Sequence[MessageId | None] | None = None,
    codec: Codec = Codec.NONE,
    schema_id: int = 0,
) -> bytes:
    """The bytes of one batch. A column that is None, or empty for every message, costs nothing.

    A due time of 0 means at once. A body that zstd cannot make smaller is stored uncompressed.
    """
    count = len(payloads)
    has_more = (tags, headers, created_deltas_ms, due_ms) != _NOTHING or codec or schema_id or producer_epoch
    if count == 1 and not has_more and (keys is None or len(keys) == 1) and (ids is None or len(ids) == 1):
        key, born = None if keys is None else keys[0], None if ids is None else ids[0]
        data = single_message.encode(payloads[0], key, born, producer_id, first_sequence, created_ms)
        if data is not None:
            return data
    _check_header(count, producer_id, first_sequence, created_ms, producer_epoch, schema_id)
    flags = tag_filter = 0
    section: list[bytes] = []
    columns: list[bytes] = []
    _add_payloads(columns, payloads)
    if keys is not None and (_said(keys, count, "keys") or keys.count(None) < count):
        flags |= layout.KEYS
        section.append(_add_keys(columns, keys))
    if due_ms is not None and _said(due_ms, count, "due_ms"):
        flags |= layout.DUE
        section.append(_times(due_ms, "due_ms", 0))
    if ids is not None and _said(ids, count, "ids"):
        flags |= layout.IDS
        section.append(_explicit_ids(ids))
    if tags is not None and _said(tags, count, "tags"):
        flags |= layout.TAGS
        tag_filter = _add_tags(columns, tags)
    if headers is not None and _said(headers, count, "headers"):
        flags |= layout.HEADERS
        _add_headers(columns, headers)
    if created_deltas_ms is not None and _said(created_deltas_ms, count, "created_deltas_ms"):
        flags |= layout.CREATED
        columns.append(_times(created_deltas_ms, "created_deltas_ms", created_ms))
    raw_length = sum(map(len, columns))
    if raw_length > limits.BATCH_RAW_BYTES_MAX:
        raise _too_large(raw_length)
    codec, body, body_length = _compressed(columns, codec, raw_length)
    size = layout.HEADER_BYTES + sum(map(len, section)) + body_length + len(PADDING[body_length % 8])
    head = layout.HEADER.pack(
        layout.MAGIC, 0, layout.VERSION, layout.HEADER_BYTES, codec, count, flags, 0, size, body_length, raw_length,
        producer_epoch, schema_id, 0, producer_id, first_sequence, created_ms, tag_filter,
    )  # fmt: skip
    return sealed([head[layout.PREFIX_BYTES :], *section, *body])


def restamp(data: bytes, *, producer_id: int, first_sequence: int) -> bytes:
    """The same batch with another producer id and first sequence: only for a batch that is certainly stored nowhere."""
    fields = list(layout.HEADER.unpack_from(data))
    fields[_PRODUCER_FIELD : _PRODUCER_FIELD + 2] = producer_id, first_sequence
    return sealed([layout.HEADER.pack(*fields)[layout.PREFIX_BYTES :], data[layout.HEADER_BYTES :]])


def reborn(data: bytes, *, producer_id: int, first_sequence: int) -> bytes:
    """The same as `restamp`, but the messages keep their ids: for a batch whose sender knows the ids already."""
    header = layout.peek(data)
    ids_at = header.header_length + layout.section_bytes(header.flags & (layout.IDS - 1), header.count)
    body_at = header.header_length + layout.section_bytes(header.flags, header.count)
    ids = array("Q", data[ids_at:body_at] if header.has_ids else bytes(layout.ID_BYTES * header.count))
    for index in range(header.count):
        if not ids[2 * index]:
            ids[2 * index], ids[2 * index + 1] = header.producer_id, header.first_sequence + index
    fields = list(layout.HEADER.unpack_from(data))
    fields[_FLAGS_FIELD] |= layout.IDS
    fields[_SIZE_FIELD] += layout.ID_BYTES * header.count - (body_at - ids_at)
    fields[_PRODUCER_FIELD : _PRODUCER_FIELD + 2] = producer_id, first_sequence
    head = layout.HEADER.pack(*fields)[layout.PREFIX_BYTES :]
    return sealed([head, data[layout.HEADER_BYTES : ids_at], ids.tobytes(), data[body_at:]])


def _check_header(
    count: int, producer_id: int, first_sequence: int, created_ms: int, epoch: int, schema_id: int
) -> None:
    if not 1 <= count <= limits.BATCH_MESSAGES_MAX:
        raise Misuse(
            f"a batch has 1 to {limits.BATCH_MESSAGES_MAX} messages, not {count}; send them as several batches"
        )
    for value, name, least, most in (
        (producer_id, "producer_id", 1, layout.U64_MAX),
        (first_sequence, "first_sequence", 0, layout.U64_MAX - count + 1),
        (created_ms, "created_ms", 0, layout.TIME_MS_MAX),
        (epoch, "producer_epoch", 0, layout.U32_MAX),
        (schema_id, "schema_id", 0, layout.U32_MAX),
    ):
        if not least <= value <= most:
            raise Misuse(f"{name} is {value}: {least} to {most} is allowed")


def _said(values: Sequence[object], count: int, name: str) -> bool:
    """Whether any message has a value in the column. Checks the column's length too."""
    if len(values) != count:
        raise Misuse(f"{len(values)} {name} for {count} payloads: give one for each, or None for the whole column")
    return any(values)


def _add_offsets(columns: list[bytes], lengths: Iterable[int]) -> None:
    """Add Arrow's offsets: the start of each item, and the end of the last."""
    offsets = list(accumulate(lengths, initial=0))
    if offsets[-1] > limits.BATCH_RAW_BYTES_MAX:  # before the join, which would allocate them
        raise _too_large(offsets[-1])
    add_column(
        columns, struct.pack(f"<{len(offsets)}i", *offsets)
    )  # one and a half times as fast as array("i", offsets)


def add_column(columns: list[bytes], buffer: bytes) -> None:
    columns.append(buffer)
    if len(buffer) % 8:
        columns.append(PADDING[len(buffer) % 8])


def _add_payloads(columns: list[bytes], payloads: Sequence[bytes]) -> None:
    if set(map(type, payloads)) != {bytes}:
        payloads = list(map(as_bytes, payloads))
    _add_offsets(columns, map(len, payloads))
    add_column(columns, b"".join(payloads))


def _too_large(length: int) -> Misuse:
    return Misuse(
        f"batch of {length} bytes: at most {limits.BATCH_RAW_BYTES_MAX} are allowed; send fewer messages at a time"
    )


def as_bytes(payload: object) -> bytes:
    """The payload of one message as bytes, or a TypeError that names the remedy."""
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return bytes(payload)
    if isinstance(payload, str):
        raise TypeError("a payload is bytes, not str: call .encode() on it")
    raise TypeError(f"a payload is bytes, not {type(payload).__name__}: serialise it first")


def _add_strings(columns: list[bytes], items: Sequence[str], name: str, bytes_max: int) -> list[bytes] | None:
    """Add offsets and data of a text column. Returns the items' bytes if they had to be made (not all ASCII)."""
    try:
        joined = "".join(items)
        data = joined.encode()
        encoded = None if len(data) == len(joined) else [item.encode() for item in items]
    except TypeError as error:
        raise TypeError(f"{name} are str: {error}") from None
    except UnicodeEncodeError as error:
        raise Misuse(f"{name} are text, and a lone surrogate is not: {error}") from None
    longest = max(map(len, items if encoded is None else encoded), default=0)
    if longest > bytes_max:
        raise Misuse(f"{name} have at most {bytes_max} bytes each in UTF-8; one has {longest}")
    _add_offsets(columns, map(len, items if encoded is None else encoded))
    add_column(columns, data)
    return encoded


def _add_keys(columns: list[bytes], keys: Sequence[str | None]) -> bytes:
    """Add validity and strings of the keys; returns the hashes, for the section."""
    validity = int("".join(["0" if key is None else "1" for key in reversed(keys)]), 2)
    items = ["" if key is None else key for key in keys]
    add_column(columns, validity.to_bytes((len(keys) + 7) // 8, "little"))
    encoded = _add_strings(columns, items, "keys", limits.KEY_BYTES_MAX)
    return key_hashes_of(encoded or [item.encode() for item in items], validity)


def _add_lists(columns: list[bytes], lists: Sequence[Collection[str] | None], name: str, items_max: int) -> list[str]:
    """Add the offsets of a list column; returns its items, one after the other."""
    kinds = set(map(type, lists))
    if str in kinds or bytes in kinds:
        given = next(each for each in lists if isinstance(each, str | bytes))
        raise TypeError(f"{name} are given as one collection per message, not as one str: write {name}=[{given!r}]")
    full: list[Collection[str]] = [items or () for items in lists]
    longest = max(map(len, full))
    if longest > items_max:
        raise Misuse(f"a message has at most {items_max} {name}; one has {longest}")
    _add_offsets(columns, map(len, full))
    return list(chain.from_iterable(full))


def _add_tags(columns: list[bytes], tags: Sequence[Collection[str] | None]) -> int:
    """Add the tags; returns the filter, for the header."""
    items = _add_lists(columns, tags, "tags", limits.BATCH_TAGS_MAX)
    _add_strings(columns, items, "tags", limits.TAG_BYTES_MAX)
    return tag_filter_of(tag.encode() for tag in set(items))


def _add_headers(columns: list[bytes], headers: Sequence[Mapping[str, str] | None]) -> None:
    if not all(isinstance(header, Mapping) for header in headers if header is not None):
        raise TypeError("headers are given as one mapping per message")
    names = _add_lists(columns, headers, "headers", limits.HEADERS_MAX)
    _add_strings(columns, names, "header names", limits.BATCH_RAW_BYTES_MAX)
    values = list(chain.from_iterable(header.values() for header in headers if header))
    _add_strings(columns, values, "header values", limits.BATCH_RAW_BYTES_MAX)


def _times(values: Sequence[int], name: str, since_ms: int) -> bytes:
    try:
        times = array("q", values)
    except (TypeError, OverflowError) as error:
        raise Misuse(f"{name} are whole milliseconds: {error}") from None
    if min(times) + since_ms < 0 or max(times) + since_ms > layout.TIME_MS_MAX:
        raise Misuse(
            f"{name} from {min(times)} to {max(times)}: the times they name must lie in the years 1970 to 9999"
        )
    return times.tobytes()


def _explicit_ids(ids: Sequence[MessageId | None]) -> bytes:
    pairs = [(0, 0) if one is None else one for one in ids]
    if any(one is not None and not one[0] for one in ids):
        raise Misuse("an explicit id with producer id 0 names nobody: give None for a message without one")
    try:
        return array("Q", chain.from_iterable(pairs)).tobytes()
    except (TypeError, OverflowError) as error:
        raise Misuse(f"an explicit id is two integers of 64 bits: {error}") from None


def _compressed(columns: list[bytes], codec: Codec, raw_length: int) -> tuple[Codec, list[bytes], int]:
    """The codec that was used, the parts of the body, and its length without padding."""
    if codec == Codec.ZSTD:
        # A context per call, because threads cannot share one: 10 µs, where compressing 10 KiB takes 30 µs.
        frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True).compress(b"".join(columns))
        if len(frame) + len(PADDING[len(frame) % 8]) < raw_length:
            return Codec.ZSTD, [frame, PADDING[len(frame) % 8]], len(frame)
    return Codec.NONE, columns, raw_length


def sealed(parts: list[bytes]) -> bytes:
    """The bytes of a batch: everything behind its prefix, with the checksum in front."""
    crc = 0
    for part in parts:
        crc = checksum(part, crc)
    return b"".join([layout.PREFIX.pack(layout.MAGIC, crc), *parts])
