"""Golden batches: bytes that every later version must read, with what they hold.

    python -m tests.golden.batch        writes those of CASES that have no file yet

A file that exists is never written again: it stands for batches that lie on people's disks. A new shape gets a new
case; a new format version gets new cases, and the old files stay.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fairway.batch import Batch, Codec, MessageId, decode, encode

FOLDER = Path(__file__).parent / "batch-v1"

IDENTITY: dict[str, Any] = {
    "producer_id": 0x0123_4567_89AB_CDEF,
    "producer_epoch": 3,
    "first_sequence": 1_000,
    "created_ms": 1_700_000_000_000,
    "schema_id": 42,
}
THREE = [b"one", b"", b"\xff\x00three"]

CASES: dict[str, dict[str, Any]] = {
    "plain": {"payloads": THREE},
    "single-empty": {"payloads": [b""]},
    "keys": {"payloads": THREE, "keys": ["order-1", None, ""]},
    "due": {"payloads": THREE, "due_ms": [0, 1_800_000_000_000, 253_402_300_799_999]},
    "explicit-ids": {"payloads": THREE, "ids": [MessageId(5, 6), None, MessageId(2**64 - 1, 2**64 - 1)]},
    "everything": {
        "payloads": THREE,
        "keys": ["order-1", None, "заказ"],
        "tags": [["paid", "größe"], [], ["paid"]],
        "headers": [{"trace": "a1", "ort": "Köln"}, {}, {"trace": ""}],
        "created_deltas_ms": [0, -5, 1_000],
        "due_ms": [0, 1_800_000_000_000, 0],
        "ids": [None, MessageId(5, 6), None],
    },
    "zstd": {
        "payloads": [b'{"order": %d, "state": "paid"}' % number for number in range(20)],
        "keys": [f"order-{number}" for number in range(20)],
        "tags": [["paid"]] * 20,
        "headers": [{"trace": f"{number:08x}"} for number in range(20)],
        "codec": Codec.ZSTD,
    },
}


def content(batch: Batch) -> dict[str, Any]:
    """Everything that a batch holds, as JSON can say it. 64-bit numbers are hexadecimal: JSON's own stop at 2**53."""
    header = batch.header
    return {
        "count": header.count,
        "codec": header.codec.name,
        "producer_id": f"{header.producer_id:016x}",
        "producer_epoch": header.producer_epoch,
        "first_sequence": header.first_sequence,
        "created_ms": header.created_ms,
        "schema_id": header.schema_id,
        "tag_filter": f"{header.tag_filter:016x}",
        "crc": f"{header.crc:08x}",
        "payloads": [payload.hex() for payload in batch.payloads],
        "keys": batch.keys(),
        "tags": batch.tag_lists(),
        "headers": batch.header_maps(),
        "created_times_ms": batch.created_times_ms(),
        "due_times_ms": batch.due_times_ms(),
        "ids": [str(one) for one in batch.ids()],
    }


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, arguments in CASES.items():
        binary, text = folder / f"{name}.bin", folder / f"{name}.json"
        if binary.exists() or text.exists():
            print(f"{name}: kept, golden files are never written again")
            continue
        data = encode(**IDENTITY, **arguments)
        binary.write_bytes(data)
        text.write_text(json.dumps(content(decode(data)), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name}: {len(data)} bytes written")


if __name__ == "__main__":
    write(FOLDER)
