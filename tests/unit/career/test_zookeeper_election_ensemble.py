"""A ZooKeeper of three servers, of which one dies at a time: an office outlives that."""

from __future__ import annotations

import pytest

from fairway.career import ZooKeeperElection
from tests.support.zookeeper import ensemble
from tests.unit.career.stage import Candidate, Clerk, Diary, running, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("zookeeper")]


def test_office_is_kept_when_servers_of_zookeeper_die_one_by_one() -> None:
    diary = Diary()
    with ensemble(3, tick_ms=1_000) as zookeeper:
        clerks = [Clerk(who, diary) for who in ("first", "second")]
        elections = [ZooKeeperElection(zookeeper.hosts, "/careers/clerk", session_ms=20_000) for _ in clerks]
        first = Candidate(clerks[0], elections[0])
        diary.until("first executes")
        second = Candidate(clerks[1], elections[1])
        with running(first, second):
            for server in list(zookeeper.servers):
                server.kill()
                pieces = clerks[0].pieces
                until(lambda pieces=pieces: clerks[0].pieces > pieces + 20)  # type: ignore[misc]
                server.start()
                server.await_serving()
            assert diary.lines == ["first inaugurates", "first executes"]
            first.end()
            diary.until("second executes")
