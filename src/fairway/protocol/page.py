"""A batch of an answer, decoded when somebody first reads one of its messages.

A batch of 2 KiB may hold 64 MiB of columns, and one answer may bring a hundred of them. So a page keeps the stored
bytes, which a consumer's prefetch and the frame length bound. The decoded form is a cache: `DecodedBatches` keeps the
newest ones up to a budget and takes the oldest away. Whoever reads a page after that decodes the batch again.

The length, the checksum and the section are checked when the page is made, so damage on the way is found at once. The
broker checked the columns when it stored them; the page checks them again when it decodes them.
"""

from __future__ import annotations

from collections import deque
from weakref import ref

from fairway import limits
from fairway.batch import Batch, BatchHeader, decode_verified, key_hashes, layout, verify
from fairway.world.buffers import Bytes
from fairway.world.gate import Lock


class LazyBatch:
    """A batch, and what a batch does not know of itself. Its methods may be called from any thread."""

    __slots__ = (
        "__weakref__", "_batch", "_data", "_decoded", "_key_hashes", "_tag_lists", "appended_ms", "end_sequence",
        "first_sequence", "header", "raw_bytes",
    )  # fmt: skip

    def __init__(self, data: Bytes, first_sequence: int, appended_ms: int, decoded: DecodedBatches) -> None:
        """RemoteProtocolError if the bytes were damaged on their way."""
        self.header: BatchHeader = verify(data)
        self.first_sequence = first_sequence
        self.end_sequence = first_sequence + self.header.count
        self.appended_ms = appended_ms
        self.raw_bytes = max(self.header.raw_length, self.header.size)
        self._data = data
        self._decoded = decoded
        self._batch: Batch | None = None
        self._tag_lists: list[list[str]] | None = None
        self._key_hashes: list[int] | None = None

    def __len__(self) -> int:
        return self.header.count

    @property
    def batch(self) -> Batch:
        """The decoded batch. RemoteProtocolError, at the first call only, if the columns are not sound."""
        batch = self._batch
        return self._decoded.decode(self) if batch is None else batch

    @property
    def is_decoded(self) -> bool:
        return self._batch is not None

    def decode(self) -> Batch:
        """Decode the batch and keep it until `release`. For `DecodedBatches`, which counts it."""
        if self._batch is None:
            self._batch = decode_verified(self._data, self.header)
        return self._batch

    def release(self) -> None:
        """Forget the decoded batch."""
        self._batch = self._tag_lists = None

    def tag_lists(self) -> list[list[str]]:
        """Of all messages; looked up once for each time the batch is decoded."""
        if not self.header.flags & layout.TAGS:
            return [[]] * self.header.count
        batch, tag_lists = self.batch, self._tag_lists
        if tag_lists is None:
            self._tag_lists = tag_lists = batch.tag_lists()
        return tag_lists

    def key_hashes(self) -> list[int]:
        """Of all messages, 0 where one has no key; looked up once. They are never compressed: nothing is decoded."""
        if self._key_hashes is None:
            hashes = key_hashes(self._data, self.header)
            self._key_hashes = [0] * self.header.count if hashes is None else hashes.tolist()
        return self._key_hashes


class DecodedBatches:
    """The pages that are decoded now, within a budget of raw bytes; one page always fits, however large.

    A page that nobody refers to any more frees its memory by itself and counts until its turn comes. The lock is held
    while a batch is decoded: several threads that reach for large batches decode one at a time.
    """

    def __init__(self, bytes_max: int = limits.DECODED_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._lock = Lock()
        self._pages: deque[tuple[ref[LazyBatch], int]] = deque()  # the oldest first
        self._bytes = 0

    def decode(self, page: LazyBatch) -> Batch:
        """Decode a page, after the oldest ones have made room for it."""
        with self._lock:
            if page.is_decoded:  # by another thread, meanwhile
                return page.decode()
            while self._pages and self._bytes + page.raw_bytes > self.bytes_max:
                oldest, size = self._pages.popleft()
                self._bytes -= size
                if (found := oldest()) is not None:
                    found.release()
            batch = page.decode()
            self._pages.append((ref(page), page.raw_bytes))
            self._bytes += page.raw_bytes
            return batch
