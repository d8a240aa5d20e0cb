"""The columnar batch: what wire, disk and Spark share, byte for byte.

A producer encodes it once (`encode`), the broker checks it once (`check`) and then moves it unopened (`peek`,
`key_hashes`, ...), a consumer decodes it once (`decode`), and Spark reads its columns in place (`Batch.to_arrow`).
`layout` holds the theory.
"""

from fairway.batch.check import check, verify
from fairway.batch.checksum import checksum, checksum_of_bytes
from fairway.batch.decode import Batch, decode, decode_verified
from fairway.batch.encode import as_bytes, encode, reborn, restamp
from fairway.batch.hashing import key_hash, may_hold, tag_mask
from fairway.batch.identity import MessageId
from fairway.batch.layout import HEADER_BYTES, BatchHeader, Codec, is_delayed, peek
from fairway.batch.section import due_times_ms, explicit_ids, key_hashes

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
