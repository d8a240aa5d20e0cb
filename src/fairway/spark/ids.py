"""Message ids as text for a million rows at a time: `batch.identity`, with numpy.

26 characters are 13 pairs of 10 bits. In one stream most pairs are the same for all rows, so they are filled in as one
value; only the last two or three are computed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from fairway.batch import MessageId
from fairway.batch.identity import TEXT_CHARS
from fairway.errors import Misuse

_DIGITS: Final = np.array([ord(str(MessageId(0, value))[-1]) for value in range(32)], np.uint8)
_PAIRS: Final = np.stack([np.repeat(_DIGITS, 32), np.tile(_DIGITS, 32)], axis=1).reshape(-1).view(np.uint16)
_HIGH_SHIFTS: Final = (56, 46, 36, 26, 16, 6)  # pairs that lie in the producer id alone
_LOW_SHIFTS: Final = (50, 40, 30, 20, 10, 0)  # pairs that lie in the sequence alone
_VALUES: Final = np.full(256, 255, np.uint8)
_VALUES[_DIGITS] = np.arange(32, dtype=np.uint8)
_TEN_BITS: Final = np.uint64(1023)


def text_column(producers: Any, sequences: Any) -> pa.Array:
    """The ids of messages, given by two arrays of 64-bit numbers."""
    count = len(sequences)
    pairs = np.empty((count, 13), np.uint16)
    high, low = _Numbers(producers), _Numbers(sequences)
    for place, shift in enumerate(_HIGH_SHIFTS):
        pairs[:, place] = high.pair(shift)
    mixed = (low.values >> np.uint64(60)) | ((high.values & np.uint64(63)) << np.uint64(4))
    pairs[:, 6] = _Numbers(mixed).pair(0)
    for place, shift in enumerate(_LOW_SHIFTS, 7):
        pairs[:, place] = low.pair(shift)
    offsets = np.arange(0, TEXT_CHARS * (count + 1), TEXT_CHARS, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(pairs)])


class _Numbers:
    """64-bit numbers, and between which two they lie."""

    def __init__(self, values: Any) -> None:
        self.values = values.astype(np.uint64, copy=False)
        self._least, self._most = int(self.values.min()), int(self.values.max())

    def pair(self, shift: int) -> Any:
        """Two characters for every row; one value, where all have the same."""
        if self._least >> shift == self._most >> shift:
            return _PAIRS[self._least >> shift & 1023]
        return _PAIRS[((self.values >> np.uint64(shift)) & _TEN_BITS).astype(np.intp)]


def parse_column(texts: pa.Array) -> Any:
    """Back to pairs of numbers, as they stand in a batch: an array of shape (rows, 2)."""
    if texts.null_count:
        raise Misuse("column id has a null: give every row an id, or leave out the option keepIds")
    joined = "".join(texts.to_pylist()).encode()
    if len(joined) != TEXT_CHARS * len(texts):
        raise Misuse(f"column id holds something else than message ids of {TEXT_CHARS} characters")
    values = _VALUES[np.frombuffer(joined, np.uint8)].reshape(-1, TEXT_CHARS).astype(np.uint64)
    if (values > 31).any() or (values[:, 0] > 7).any():
        raise Misuse("column id holds something that is not a message id in Crockford's base 32")
    low = np.zeros(len(texts), np.uint64)
    high = np.zeros(len(texts), np.uint64)
    for place in range(TEXT_CHARS):
        high = (high << np.uint64(5)) | (low >> np.uint64(59))
        low = (low << np.uint64(5)) | values[:, place]
    return np.stack([high, low], axis=1)
