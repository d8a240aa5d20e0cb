"""Who may resume a member: whoever shows the secret of its session, and nobody else before its lease ends."""

from __future__ import annotations

import pytest

from fairway.batch.identity import VERIFIER_BYTES, checked, consumer_verifier_of
from fairway.errors import Code, Refused
from fairway.group_events import ActionKind
from fairway.groups import GroupOutcome, GroupStateMachine, Handout, JoinClaim
from fairway.names import ConsumerName
from tests.unit.groups.scene import BORN_MS, Scene

LEASE_MS = 15_000
OWN = JoinClaim(b"o" * VERIFIER_BYTES)
OTHER = JoinClaim(b"x" * VERIFIER_BYTES)
TAKEN = JoinClaim(is_taken=True)
STRANGERS = [OTHER, JoinClaim(), OTHER._replace(is_taken=True), TAKEN, JoinClaim(OWN.verifier[:-1])]


def joined_scene(end: int = 100) -> Scene:
    """Ann has joined with a secret, and holds messages."""
    scene = Scene(end=end)
    assert [event.kind for event in scene.join("ann", claim=OWN).events] == [
        ActionKind.JOIN,
        ActionKind.VERIFIER,
    ]
    scene.pull("ann")
    return scene


def test_the_session_itself_resumes_at_once_and_keeps_what_it_holds() -> None:
    scene = joined_scene()
    lot = scene.lot("ann")
    scene.wait(LEASE_MS - 1)
    assert scene.join("ann", arrived=2, claim=OWN._replace(is_taken=True)).events == ()
    assert scene.ack("ann", lot).settled == 10


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_waits_for_the_end_of_the_lease_and_changes_nothing_before(stranger: JoinClaim) -> None:
    scene = joined_scene()
    before = scene.group.snapshot()
    for passed_ms, retry_after_ms in ((0, 1_000), (5_000, 1_000), (9_999, 1)):
        scene.wait(passed_ms)
        waits = scene.join("ann", arrived=1, claim=stranger)
        assert (waits.outcome, waits.events, waits.dying) == (GroupOutcome.BUSY, (), ())
        assert waits.retry_after_ms == retry_after_ms
        assert "wait for the lease of consumer ann to end" in waits.sentence
    assert scene.group.snapshot() == before
    scene.wait(1)
    assert [event.kind for event in scene.expire().events] == [ActionKind.EXPIRE], (
        "no JOIN of a stranger renewed the lease"
    )


@pytest.mark.parametrize("stranger", STRANGERS)
def test_after_the_lease_it_gets_what_was_not_acked_as_the_next_attempt(stranger: JoinClaim) -> None:
    scene = joined_scene()
    scene.wait(LEASE_MS)
    kinds = [event.kind for event in scene.join("ann", arrived=1, claim=stranger).events]
    assert kinds == [ActionKind.EXPIRE, ActionKind.JOIN] + [ActionKind.VERIFIER] * bool(stranger.verifier)
    assert scene.group.verifier_of(ConsumerName("ann")) == stranger.verifier
    assert scene.lot("ann") == Handout(0, 2, ((0, 10),))


def test_who_had_the_id_before_waits_for_whoever_has_it_now() -> None:
    scene = joined_scene()
    scene.wait(LEASE_MS)
    scene.join("ann", claim=OTHER)
    assert scene.join("ann", arrived=1, claim=OWN).outcome is GroupOutcome.BUSY


def test_one_that_leaves_frees_its_id_at_once() -> None:
    scene = joined_scene()
    scene.leave("ann")
    assert scene.join("ann", claim=OTHER).outcome is GroupOutcome.DONE
    assert scene.lot("ann") == Handout(0, 1, ((0, 10),))


def test_a_session_that_shows_its_secret_and_remembers_nothing_counts_as_a_restart() -> None:
    scene = joined_scene()
    kinds = [event.kind for event in scene.join("ann", claim=OWN).events]
    assert kinds == [ActionKind.EXPIRE, ActionKind.JOIN, ActionKind.VERIFIER]
    assert scene.lot("ann") == Handout(0, 2, ((0, 10),))


def test_the_retry_comes_within_a_second_however_long_the_lease_is() -> None:
    assert joined_scene().join("ann", claim=OTHER).retry_after_ms == 1_000


def test_a_lease_that_stands_still_does_not_end() -> None:
    scene = joined_scene()
    scene.group.stop_lease(ConsumerName("ann"))
    scene.wait(10 * LEASE_MS)
    assert scene.join("ann", claim=OTHER).outcome is GroupOutcome.BUSY


# --- members without a secret, of earlier versions -------------------------------------------------------------------


def test_a_member_without_a_secret_resumes_when_its_connection_has_ended() -> None:
    scene = Scene()
    assert [event.kind for event in scene.join("ann").events] == [ActionKind.JOIN]
    lot = scene.lot("ann")
    assert scene.join("ann", arrived=1, claim=TAKEN).outcome is GroupOutcome.BUSY
    assert scene.join("ann", arrived=1).events == ()
    assert scene.ack("ann", lot).settled == 10


def test_it_has_a_secret_from_the_first_join_on_that_shows_one() -> None:
    """The program, or the broker, was upgraded."""
    scene = Scene()
    scene.join("ann")
    scene.pull("ann")
    assert [event.kind for event in scene.join("ann", arrived=1, claim=OWN).events] == [ActionKind.VERIFIER]
    assert scene.join("ann", arrived=1).outcome is GroupOutcome.BUSY
    assert scene.join("ann", arrived=1, claim=OWN).outcome is GroupOutcome.DONE


# --- the next life, and the inbox ------------------------------------------------------------------------------------


def crashed(scene: Scene) -> None:
    scene.crash()


def restored(scene: Scene) -> None:
    scene.group = GroupStateMachine.restore(scene.group.snapshot())
    scene.group.begin_life(scene.end, scene.now_ns)


@pytest.mark.parametrize("next_life", [crashed, restored])
def test_the_next_life_knows_the_secret(next_life: object) -> None:
    scene = joined_scene()
    scene.wait(LEASE_MS - 1)
    next_life(scene)  # type: ignore[operator]
    scene.wait(LEASE_MS - 1)  # every life begins with full leases
    assert scene.join("ann", arrived=1, claim=OTHER).outcome is GroupOutcome.BUSY
    assert scene.join("ann", arrived=1).outcome is GroupOutcome.BUSY
    assert scene.join("ann", arrived=1, claim=OWN).outcome is GroupOutcome.DONE


def test_a_join_that_the_caller_has_granted_waits_for_nobody_and_inherits_nothing() -> None:
    scene = joined_scene()
    granted = scene.join("ann", arrived=1, claim=OTHER._replace(is_granted=True))
    assert [event.kind for event in granted.events] == [
        ActionKind.EXPIRE,
        ActionKind.JOIN,
        ActionKind.VERIFIER,
    ]
    assert scene.lot("ann") == Handout(0, 2, ((0, 10),))


def test_the_verifier_is_stated_once() -> None:
    scene = joined_scene()
    for _ in range(3):
        scene.join("ann", arrived=1, claim=OWN)
    assert sum(event.kind is ActionKind.VERIFIER for event in scene.events) == 1
    assert scene.now_ms == BORN_MS


# --- the hash ---------------------------------------------------------------------------------------------------------


def test_a_verifier_depends_on_the_secret_and_on_the_consumer() -> None:
    secret = bytes(range(16))
    found = {
        consumer_verifier_of(secret, "ann"),
        consumer_verifier_of(secret, "ben"),
        consumer_verifier_of(secret[::-1], "ann"),
        consumer_verifier_of(b"n" + secret, "an"),
    }
    assert len(found) == 4
    assert {len(each) for each in found} == {VERIFIER_BYTES}
    assert all(secret not in each for each in found)
    assert consumer_verifier_of(b"", "ann") == b""


@pytest.mark.parametrize("secret", [b"short", bytes(15), bytes(65)])
def test_what_is_easily_guessed_is_no_secret(secret: bytes) -> None:
    with pytest.raises(Refused, match="a session's secret has 16 to 64 bytes") as refused:
        checked(secret, "session")
    assert refused.value.code is Code.BAD_REQUEST
