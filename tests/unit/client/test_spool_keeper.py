"""The directory of a spool, when its client closes."""

from __future__ import annotations

from pathlib import Path

from fairway.client.spool import SpoolOptions
from fairway.client.spool_journal import Journal
from fairway.client.spool_keeper import SpoolThread
from fairway.world.clock import RealClock
from fairway.world.rng import RealRng
from fairway.world.yard import SharedDirectory


def test_a_journal_that_ends_while_its_client_closes_is_removed_once(tmp_path: Path) -> None:
    """Its last note completes on the disk's thread: then it is among the finished, and was among the client's."""
    clock, yard = RealClock(), SharedDirectory(tmp_path / "spool")
    number, disk = yard.make(RealRng())
    journal = Journal(disk, number, clock)
    keeper = SpoolThread(SpoolOptions(str(tmp_path / "spool")), yard, clock, lambda *_: None)
    journals = [journal]

    def asked() -> list[Journal]:
        keeper.finished(journal)
        return journals

    keeper.stop(asked)
    assert yard.names() == []
