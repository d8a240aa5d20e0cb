"""Masks and hashes are part of the format: these values never change."""

from __future__ import annotations

import google_crc32c
import numpy
import pytest

from fairway.batch import check, checksum, encode, key_hash, may_hold, tag_mask


@pytest.mark.parametrize(
    ("tag", "mask"),
    [("", 0x1), ("paid", 0x400020400), ("größe", 0x10000000802000)],
)
def test_mask_of_a_tag_is_fixed(tag: str, mask: int) -> None:
    assert tag_mask(tag) == mask


@pytest.mark.parametrize(
    ("key", "value"),
    [("", 1), ("order-1", 0xE0B37FEF4DE1886C), ("заказ", 0xC988DBF4E375A028)],
)
def test_hash_of_a_key_is_fixed(key: str, value: int) -> None:
    assert key_hash(key) == value


def test_filter_of_a_batch_holds_its_tags() -> None:
    tags = [["paid", "web"], [], ["new"]]
    header = check(encode([b""] * 3, producer_id=1, first_sequence=0, created_ms=0, tags=tags))
    assert header.tag_filter == tag_mask("paid") | tag_mask("web") | tag_mask("new")
    assert may_hold(header.tag_filter, tag_mask("web"))
    assert may_hold(header.tag_filter, tag_mask("web") | tag_mask("new"))
    assert not may_hold(header.tag_filter, tag_mask("refunded"))


def test_filter_skips_nearly_as_well_as_a_filter_can() -> None:
    """With 8 different tags in a batch, 3 bits of 64 each let about 1 foreign tag in 33 pass."""
    masks = [tag_mask(f"tag-{i}") for i in range(4_000)]
    passed = tried = 0
    for start in range(0, 2_000, 8):
        bits = 0
        for mask in masks[start : start + 8]:
            bits |= mask
        tried += 2_000
        passed += sum(may_hold(bits, mask) for mask in masks[2_000:])
    assert passed / tried < 0.05


def test_hash_spreads_similar_keys() -> None:
    counts = numpy.bincount([key_hash(f"order-{i}") % 7 for i in range(7_000)], minlength=7)
    assert counts.min() > 800
    assert len({key_hash(f"order-{i}") for i in range(7_000)}) == 7_000


@pytest.mark.parametrize("length", [0, 1, 100, 16 * 1024 - 1, 16 * 1024, 100_000])
def test_checksum_takes_any_buffer(length: int) -> None:
    data = bytes(range(256)) * (length // 256 + 1)
    data = data[:length]
    expected = google_crc32c.value(data)
    assert checksum(data) == checksum(bytearray(data)) == checksum(memoryview(data)) == expected
    assert checksum(memoryview(data)[length // 3 :], checksum(data[: length // 3])) == expected


def test_checksum_is_castagnolis() -> None:
    assert checksum(b"123456789") == 0xE3069283
