"""Randomness as a parameter: entropy in production, one seed in simulation."""

from __future__ import annotations

import random
import secrets
from typing import Protocol


class Rng(Protocol):
    """The port for randomness."""

    def bits(self, count: int) -> int:
        """An integer of `count` random bits."""

    def below(self, bound: int) -> int:
        """An integer in [0, bound)."""

    def uniform(self) -> float:
        """A float in [0, 1)."""


class RealRng:
    """The machine's entropy; every draw is fit for identities."""

    def bits(self, count: int) -> int:
        return secrets.randbits(count)

    def below(self, bound: int) -> int:
        return secrets.randbelow(bound)

    def uniform(self) -> float:
        return secrets.randbits(53) / (1 << 53)


class SeededRng:
    """The same draws for the same seed, on every machine; children have streams of their own.

    A child depends only on the seed and its own name. So one more draw in one part of a simulation does not change what
    the other parts see.
    """

    def __init__(self, seed: int | str) -> None:
        self.seed = seed
        self._random = random.Random(str(seed))  # a str is hashed with SHA-512, so PYTHONHASHSEED does not matter

    def child(self, name: str) -> SeededRng:
        return SeededRng(f"{self.seed}/{name}")

    def bits(self, count: int) -> int:
        return self._random.getrandbits(count)

    def below(self, bound: int) -> int:
        """The draws of `randrange`, without its work for other kinds of ranges: three times as fast."""
        if bound < 1:
            raise ValueError(f"nothing is below {bound}: a bound is 1 or more")
        bits = bound.bit_length()
        drawn = self._random.getrandbits(bits)
        while drawn >= bound:
            drawn = self._random.getrandbits(bits)
        return drawn

    def uniform(self) -> float:
        return self._random.random()
