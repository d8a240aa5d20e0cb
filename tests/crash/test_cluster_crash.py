"""A broker group on a real ZooKeeper whose master is stopped, killed and cut off, for a few seconds; and proof that the
judgement finds faults, with brokers that have a bug, planted files and planted times."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.crash import cluster_report, cluster_rounds
from tests.crash.broker_worker import LEASE_MS
from tests.crash.cluster_disk import Compared, difference, segments
from tests.crash.cluster_faults import ABRUPT, DEEDS, HASTY
from tests.crash.cluster_rounds import SMALL_CAST, ClusterCounts, ClusterTruth
from tests.crash.cluster_times import Gap, Spans, Successes, longest_gap
from tests.crash.cluster_view import Change
from tests.simulation.broker_truth import Holder
from tests.support import zookeeper
from tests.support.namespaces import NamespaceWires, NotAllowed

pytestmark = pytest.mark.xdist_group("zookeeper")

SECONDS_MAX = 60.0  # a plan ends before


def run(*plan: str, copies: int = 2, flaw: str = "") -> ClusterCounts:
    counts, ensemble = ClusterCounts(), zookeeper.shared()
    return cluster_rounds.run(
        SECONDS_MAX, 7, counts, ensemble, copies=copies, planned=iter(plan), parts=SMALL_CAST, flaw=flaw
    )


def told(counts: ClusterCounts) -> str:
    return "\n".join([*map(str, counts.breaches[:3]), *counts.failures, *counts.disk.sentences[:3]])


def test_nothing_is_lost_when_the_master_is_stopped_and_killed() -> None:
    counts = run("stop master past its session")
    assert counts.clean, told(counts)
    assert counts.faults.total() == 2  # what ends every run is a kill
    assert counts.epochs >= 2
    assert counts.acknowledged > 50
    assert counts.disk.bytes > 0
    assert counts.disk.messages >= 2 * counts.acknowledged


@pytest.mark.slow
def test_nothing_is_lost_on_three_servers_and_three_copies() -> None:
    counts = ClusterCounts()
    plan = ("restart ZooKeeper", "wipe replica", "replication one way", "rolling restart")
    with zookeeper.ensemble(3) as ensemble:
        cluster_rounds.run(SECONDS_MAX, 8, counts, ensemble, copies=3, planned=iter(plan))
    assert counts.clean, told(counts)
    assert set(counts.faults) == {*plan, "kill master"}


@pytest.mark.slow
def test_a_master_that_does_not_wait_for_its_replica_is_found_out() -> None:
    counts = run(*["kill master, replication failed"] * 3, flaw="answer-before-the-replica")
    found = {breach.promise.name for breach in counts.breaches}
    is_refused = any("SEQUENCE_GAP" in sentence for sentence in counts.failures)  # its successor lacks what it answered
    assert is_refused or found & {"LOST", "RENAMED", "REPEATED", "ACKED_AGAIN"}, told(counts)


@pytest.mark.slow
def test_links_in_namespaces() -> None:
    try:
        counts = cluster_rounds.run(
            SECONDS_MAX,
            9,
            ClusterCounts(),
            zookeeper.shared(),
            lay=NamespaceWires,
            planned=iter(("replication one way", "master's registry frozen")),
            parts=SMALL_CAST,
        )
    except NotAllowed as reason:
        pytest.skip(str(reason))
    assert counts.clean, told(counts)
    assert counts.epochs >= 2


def test_every_deed_is_known() -> None:
    assert {*ABRUPT, *HASTY} <= DEEDS.keys()


# --- a planted history ------------------------------------------------------------------------------------------------


def passed_on(*, changed_ns: int = 10, handed_back: bool = False) -> list[str]:
    """What is said of a message that one has acked, without an answer, and that another was given and did not ack."""
    truth = ClusterTruth([Change(1, changed_ns - 5, changed_ns)], drained_ns=1_000)
    owner, first, second = truth.owner("g", "orders", LEASE_MS), Holder("first"), Holder("second")
    truth.note_sent("orders", [b"a"], 1)
    truth.note_receipt("orders", 0, [b"a"])
    truth.note_member(owner, 1)
    truth.note_delivery(owner, first, {0: b"a"}, asked_ns=20, now_ns=21)
    truth.note_acking(owner, [0])
    truth.note_asked(owner, first, None, "left")
    truth.note_delivery(owner, second, {0: b"a"}, asked_ns=30, now_ns=31)
    if handed_back:
        truth.note_asked(owner, second, [0], "release")
    truth.check_drained()
    return [breach.promise.name for breach in truth.breaches]


def test_an_ack_that_was_lost_settles_nothing_that_another_one_holds() -> None:
    assert passed_on() == ["STUCK"]
    assert passed_on(changed_ns=1_010) == ["STUCK"], "all was settled by then"
    assert passed_on(handed_back=True) == []
    assert passed_on(changed_ns=40) == [], "the next master may not know who holds it, and believe the ack"


# --- planted files and times ------------------------------------------------------------------------------------------


def test_files_that_differ_below_the_committed_end_are_told(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"abcdef")
    other.write_bytes(b"abcdXf")
    assert difference(one, other, 100, 104) is None
    assert difference(one, other, 100, 106) == "at 104 of one, 6 and 6 bytes long below 106"
    other.write_bytes(b"abcd")
    assert difference(one, other, 100, 106) == "at 104 of one, 6 and 4 bytes long below 106"


def test_segments_are_those_below_the_end(tmp_path: Path) -> None:
    for name in (f"{0:020d}.log", f"{500:020d}.log", "notes.txt"):
        (tmp_path / name).touch()
    assert sorted(segments(tmp_path, 500)) == [0]
    assert sorted(segments(tmp_path, 501)) == [0, 500]


def test_longest_gap_is_that_between_the_successes_around_it() -> None:
    ms = 1_000_000
    times = [each * ms for each in (0, 10, 20, 500, 510, 900)]
    assert longest_gap(times, 15 * ms, 505 * ms) == Gap(20 * ms, 500 * ms)
    assert longest_gap(times, 21 * ms, 22 * ms) == Gap(20 * ms, 500 * ms)
    assert longest_gap(times, 15 * ms, 950 * ms) is None
    assert longest_gap([], 0, 1) is None


def test_successes_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "said"
    path.write_text('[5, "receipt", ["orders", 0, ["a"]]]\n[7, "delivery", ["g", "orders", "c", [], 6, 7]]\n[8, "rec')
    found = Successes()
    found.read([path])
    assert (found.produced_ns, found.consumed_ns, found.last_ns) == ([5], [7], {path: 6})
    with path.open("a") as more:
        more.write('eipt", ["orders", 1, ["b"]]]\n')
    found.read([path])
    assert (found.produced_ns, found.last_ns) == ([5, 8], {path: 8})


def test_the_table_has_a_row_for_every_kind() -> None:
    counts = ClusterCounts(runs=1, disk=Compared(bytes=7))
    counts.faults.update({"kill master": 2, "wipe replica": 1})
    counts.produce["kill master"] = Spans([100, 300])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(cluster_report.table(counts))
    shown = console.export_text()
    assert "kill master" in shown
    assert "wipe replica" in shown
    assert "200 / 298" in shown
