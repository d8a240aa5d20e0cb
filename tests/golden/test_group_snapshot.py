"""A group's snapshot, as it is in the checkpoint: version 1, and version 1 with the failed attempts of what is owed, and
with the secrets of consumers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fairway.batch.identity import consumer_verifier_of
from fairway.groups import JoinClaim, GroupStateMachine, SettleVerdict
from tests.unit.groups.scene import Scene
from tests.unit.groups.test_recovery import busy_scene

FOLDER = Path(__file__).parent
BEFORE = FOLDER / "group_snapshot_v1.bin"  # from before attempts were kept: `busy_scene`
KEPT = FOLDER / "group_snapshot_v1_attempts.bin"
SECURED = FOLDER / "group_snapshot_v1_secrets.bin"


def failing_scene() -> Scene:
    """The same, and attempts that failed in each way; some messages share them. Returned lots go out by sequence since
    the file was written, so other messages fail here than there."""
    scene = busy_scene()
    scene.wait(scene.group.config.lease_ms)
    scene.expire()
    scene.join("dee")
    for _ in range(3):
        scene.settle("dee", SettleVerdict.RETRY, scene.lot("dee", 2), after_ms=0, reason="no such hotel")
    scene.pull("dee", 3)
    return scene


def test_a_snapshot_from_before_attempts_were_kept_is_read_and_written_alike() -> None:
    data = BEFORE.read_bytes()
    assert GroupStateMachine.restore(data).snapshot() == data
    assert data == msgspec.msgpack.encode(msgspec.msgpack.decode(busy_scene().group.snapshot())[:15])


def test_a_snapshot_with_attempts_is_read_and_written_alike() -> None:
    data = KEPT.read_bytes()
    assert GroupStateMachine.restore(data).snapshot() == data
    kept, now = msgspec.msgpack.decode(data), msgspec.msgpack.decode(failing_scene().group.snapshot())
    assert [type(each) for each in kept] == [type(each) for each in now]
    assert kept[15] == [  # the attempts that failed: which, when, whose, why
        [[1, 1_700_000_015_000, "bob", "the consumer's lease ended"]],
        [[1, 1_700_000_015_000, "dee", "no such hotel"]],
        [[1, 1_700_000_000_000, "ann", ""]],
        [[1, 1_700_000_015_000, "bob", "the consumer's lease ended"], [2, 1_700_000_015_000, "dee", "no such hotel"]],
        [[1, 1_700_000_000_000, "ann", "broken"]],
    ]
    reasons = {attempt[3] for each in kept[15] for attempt in each}
    assert {attempt[3] for each in now[15] for attempt in each} == reasons


def secured_scene() -> Scene:
    """The same, and one consumer that has shown the secret of its session."""
    scene = busy_scene()
    scene.join("eve", claim=JoinClaim(consumer_verifier_of(bytes(range(16)), "eve")))
    scene.pull("eve", 3)
    return scene


def test_a_snapshot_with_secrets_is_read_and_written_alike() -> None:
    data = SECURED.read_bytes()
    assert GroupStateMachine.restore(data).snapshot() == data == secured_scene().group.snapshot()


def test_only_a_consumer_that_has_a_secret_is_written_in_another_form() -> None:
    members = msgspec.msgpack.decode(SECURED.read_bytes())[8]
    *before, secured = members
    assert [len(each) for each in before] == [5] * len(before)
    assert secured[:2] + secured[5:] == [secured[0], "eve", consumer_verifier_of(bytes(range(16)), "eve")]


@pytest.mark.parametrize("path", [BEFORE, KEPT, SECURED], ids=lambda path: path.stem)
def test_no_part_of_it_is_taken_for_the_whole(path: Path) -> None:
    data = path.read_bytes()
    for end in range(len(data)):
        with pytest.raises(Exception, match="a group's snapshot cannot be read"):
            GroupStateMachine.restore(data[:end])
