"""The body of a batch as one zstd frame.

A frame names its content size, which must be the header's raw length. So the one allocation is known, and bounded,
before the first byte is decompressed. There is exactly one frame, with nothing behind it and without a dictionary.
Contexts are made per call, because threads cannot share them. A context costs 10 µs; compressing 10 KiB takes 30 µs.
"""

from __future__ import annotations

from typing import Final

import zstandard

from fairway import limits
from fairway.batch.layout import ZSTD_MAGIC
from fairway.errors import RemoteProtocolError

_LEVEL: Final = 3  # zstd's own default: higher levels cost twice the time for a few per cent


def compress(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(raw)


def decompress(frame: memoryview, raw_length: int) -> bytes:
    """The content of a frame that must hold exactly `raw_length` bytes."""
    if bytes(frame[:4]) != ZSTD_MAGIC:  # other magics mean skippable frames and formats before zstd 1.0
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
