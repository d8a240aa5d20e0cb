"""The batch format: messages as columns, the same bytes on the wire, on disk and in Spark.

    layout         what each byte of a batch means; the header; numpy, if it is installed
    encode         lists of messages → bytes
    check          proves that the bytes of a batch are sound, and finds its columns
    decode         bytes → messages
    single_message fast paths of encoding and checking for one message
    identity       message ids and secrets
    checksum       CRC-32C; tag filters and key hashes
    arrow          a batch as an Arrow record batch

A producer encodes a batch once (`encode`). The broker checks it once (`check`) and then moves it unopened (`peek`,
`key_hashes`, ...). A consumer decodes it once (`decode`), and Spark reads its columns in place (`Batch.to_arrow`).
"""

from fairway.batch.check import check, verify
from fairway.batch.checksum import checksum, checksum_of_bytes, key_hash, may_hold, tag_mask
from fairway.batch.decode import Batch, decode, decode_verified
from fairway.batch.encode import as_bytes, encode, reborn, restamp
from fairway.batch.identity import MessageId
from fairway.batch.layout import (
    HEADER_BYTES,
    BatchHeader,
    Codec,
    due_times_ms,
    explicit_ids,
    is_delayed,
    key_hashes,
    peek,
)

__all__ = [
    "HEADER_BYTES",
    "Batch",
    "BatchHeader",
    "Codec",
    "MessageId",
    "as_bytes",
    "check",
    "checksum",
    "checksum_of_bytes",
    "decode",
    "decode_verified",
    "due_times_ms",
    "encode",
    "explicit_ids",
    "is_delayed",
    "key_hash",
    "key_hashes",
    "may_hold",
    "peek",
    "reborn",
    "restamp",
    "tag_mask",
    "verify",
]
