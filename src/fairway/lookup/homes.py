"""Which broker group a key of an ordered subject belongs to: the same for whoever sends it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b


def home(key: str, names: Sequence[str]) -> int:
    """The one of these groups that a key belongs to: each gives it a rank, and the highest has it. So a group that is
    new takes its share from all the others, one that goes leaves its share to them, and nothing else moves."""
    ranks = [blake2b(f"{name}\0{key}".encode(), digest_size=8).digest() for name in names]
    return ranks.index(max(ranks))
