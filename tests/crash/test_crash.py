"""A short campaign, and proof that its checker sees what it is for; `make crash` runs the long one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fairway.runtime.real_disk import POINTS
from fairway.storage import message_log, segment
from tests.crash import campaign
from tests.crash.campaign import Counts, Directory
from tests.crash.ledger import Judgement, Ledger, judge
from tests.crash.power import NotAllowed
from tests.crash.writer import Doom

RANDOM_KILLS = 6
RUNS_MAX = 5  # on a slow machine all may be killed before anything is acknowledged
# Once each, where it is passed most often.
PLACES = [Doom("open" if "truncate" in point else "run", point, 1) for point in POINTS]


def test_nothing_is_lost_when_killed_at_any_moment() -> None:
    counts, runs = Counts(), 0
    while not counts.acknowledged and runs < RUNS_MAX:
        campaign.kill_rounds(RANDOM_KILLS, 3 + runs, counts, lambda: None, iter(()))
        runs += 1
    assert counts.clean, (counts.judgement, counts.failures)
    assert counts.random_kills == runs * RANDOM_KILLS
    assert counts.acknowledged > 0


@pytest.mark.parametrize("half", [0, 1])
def test_nothing_is_lost_when_killed_at_a_named_point(half: int) -> None:
    places = PLACES[half::2]
    counts = Counts()
    campaign.kill_rounds(2 * len(places), half, counts, lambda: None, iter(places))
    assert counts.clean, (counts.judgement, counts.failures)
    assert counts.points == {doom.point for doom in places}
    assert counts.acknowledged > 0


def test_nothing_is_lost_when_the_power_is_cut() -> None:
    synced, unsynced = Counts(), Counts()
    try:
        campaign.power_rounds(4, 5, synced, lambda: None)
        campaign.power_rounds(2, 5, unsynced, lambda: None, synced=False)
    except NotAllowed as reason:
        pytest.skip(f"no power to cut here: {reason}")
    assert synced.clean, (synced.judgement, synced.failures)
    assert synced.acknowledged > 0
    assert unsynced.judgement.lost > 0, "without syncs a power cut must show losses, or it cuts nothing"


# --- the checker, with planted damage --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ledger]:
    """A directory that a killed writer left, and its ledger."""
    folder = tmp_path_factory.mktemp("written")
    counts = Counts()
    directory = Directory(folder / "data", folder, 1, counts)
    life = directory.start()
    life.await_word("open")
    for _ in range(100):  # a busy machine is slow: what counts is that there is something to damage
        assert not life.ended_by_itself(0.3)
        if len(life.lines()) > 60:
            break
    life.kill()
    directory.settle(life)
    assert counts.clean, (counts.judgement, counts.failures)
    assert len(directory.ledger.acked) > 20
    return directory.root, directory.ledger


def _cut(root: Path, ledger: Ledger) -> None:
    for path in (root / message_log.DIRECTORY).glob(f"*{segment.SUFFIX}"):
        path.write_bytes(path.read_bytes()[: segment.HEADER_BYTES])


def _flip(root: Path, ledger: Ledger) -> None:
    rng = random.Random(1)
    for path in (root / message_log.DIRECTORY).glob(f"*{segment.SUFFIX}"):
        data = bytearray(path.read_bytes())
        for at in rng.sample(range(len(data)), min(3, len(data))):
            data[at] ^= 4
        path.write_bytes(data)


def _forget_sent(root: Path, ledger: Ledger) -> None:
    ledger.sent.clear()


def _forget_acting(root: Path, ledger: Ledger) -> None:
    ledger.acting.clear()


def _expect_others(root: Path, ledger: Ledger) -> None:
    ledger.seed += 1


def _acknowledge_unsent(root: Path, ledger: Ledger) -> None:
    ledger.acted.add(1_000_000)


@pytest.mark.parametrize(
    ("harm", "kinds"),
    [
        (_cut, {"lost", "rotten"}),
        (_flip, {"lost"}),  # and rotten, where recovery reads it: what a checkpoint covers is read when wanted
        (_forget_sent, {"phantom"}),
        (_forget_acting, {"phantom"}),
        (_expect_others, {"corrupt"}),
        (_acknowledge_unsent, {"lost"}),
    ],
)
def test_checker_sees(
    harm: Callable[[Path, Ledger], None], kinds: set[str], written: tuple[Path, Ledger], tmp_path: Path
) -> None:
    root, said = written
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    ledger = Ledger(said.seed, set(said.sent), dict(said.acked), dict(said.floors), set(said.acting), set(said.acted))
    harm(copy, ledger)
    judgement: Judgement = judge(copy, ledger)
    assert {kind for kind in ("lost", "phantom", "corrupt", "rotten") if getattr(judgement, kind)} >= kinds
