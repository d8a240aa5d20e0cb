"""The directory of a spool, when its client closes."""

from __future__ import annotations

from pathlib import Path

from fairway.client.spool.journal import Journal
from fairway.client.spool.spool import SpoolOptions
from fairway.client.spool.thread import SpoolThread
from fairway.runtime.clock import RealClock
from fairway.runtime.rng import RealRng
from fairway.runtime.shared_directory import SharedDirectory


def test_a_journal_that_ends_while_its_client_closes_is_removed_once(tmp_path: Path) -> None:
    """Its last note completes on the disk's thread: then it is among the finished, and was among the client's."""
    clock, shared_directory = RealClock(), SharedDirectory(tmp_path / "spool")
    number, disk = shared_directory.make(RealRng())
    journal = Journal(disk, number, clock)
    keeper = SpoolThread(SpoolOptions(str(tmp_path / "spool")), shared_directory, clock, lambda *_: None)
    journals = [journal]

    def asked() -> list[Journal]:
        keeper.finished(journal)
        return journals

    keeper.stop(asked)
    assert shared_directory.names() == []
