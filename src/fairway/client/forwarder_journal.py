"""A forwarder's journal on a real disk: the spool's machinery, for items in the place of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fairway.client.forwarder_items import ForwarderOptions
from fairway.client.spool import SpoolOptions, yard_at
from fairway.client.spool_journal import Journal
from fairway.client.spool_keeper import SpoolThread
from fairway.world.clock import Clock
from fairway.world.rng import Rng

FOLDER = "forwarder"  # below the directory that was named, which may be a client's spool too


class ItemJournal:
    """The directory that forwarders of one host share, and what looks after it."""

    def __init__(self, options: ForwarderOptions[Any], clock: Clock, post: Callable[..., object]) -> None:
        self._clock = clock
        self._options = SpoolOptions(f"{options.journal}/{FOLDER}")
        self._yard = yard_at(self._options.directory, post=post)
        self._keeper = SpoolThread(self._options, self._yard, clock, post)

    def make(self, rng: Rng) -> Journal:
        """One of our own."""
        number, disk = self._yard.make(rng)
        return Journal(disk, number, self._clock)

    def start(self, adopt: Callable[[Sequence[Journal]], None]) -> None:
        self._keeper.start(adopt)

    def finished(self, journal: Journal) -> None:
        self._keeper.finished(journal)

    def close(self, journals: Callable[[], Sequence[Journal]]) -> None:
        """Not under a lock that completions need."""
        self._keeper.stop(journals)
