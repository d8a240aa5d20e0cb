"""A consumer that joined with a secret, as it stands in the action log and in the checkpoint, for ever.

`actions-record-v1-secrets.bin` is the body of an ACTIONS record: a group is made, ann joins with a secret, ben without
one. `groups-picture-v1-secrets.bin` is what the checkpoint has of it, in its field `groups`, and a GROUPS record too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fairway.group_events import ActionKind
from fairway.batch.identity import consumer_verifier_of
from fairway.broker.groups import Groups
from fairway.groups import JoinClaim, GroupStateMachine, GroupConfig, JoinDecision, GroupOutcome
from fairway.names import ConsumerName
from fairway.names import GroupName
from fairway.storage.action_log import pack, unpack
from fairway.storage.record import RecordHeader, Record
from fairway.storage.record import RecordKind

FOLDER = Path(__file__).parent
ACTIONS = FOLDER / "actions-record-v1-secrets.bin"
PICTURE = FOLDER / "groups-picture-v1-secrets.bin"
SECRET = bytes(range(16))
TIME_MS = 1_700_000_000_000
SUBJECT_ID = 7


def actions_body() -> bytes:
    """What this version writes."""
    groups = Groups()
    host = groups.introduce(SUBJECT_ID, GroupName("billing"))
    claims = {"ann": JoinClaim(consumer_verifier_of(SECRET, "ann")), "ben": JoinClaim()}
    decisions = [host.state_machine.configure(0, GroupConfig(), now_ms=TIME_MS), host.state_machine.seek(0, now_ms=TIME_MS)]
    happened = [event for decision in decisions for event in decision.events]
    host.state_machine.apply_all(happened)
    for name, claim in claims.items():
        joined = join(host.state_machine, name, claim)
        host.state_machine.apply_all(joined.events)
        happened += joined.events
    return pack(map(host.action, happened))


def join(state_machine: GroupStateMachine, name: str, claim: JoinClaim) -> JoinDecision:
    return state_machine.join(
        ConsumerName(name), version=0, arrived=0, resume_at=0, now_ns=0, now_ms=TIME_MS, claim=claim
    )


def replayed() -> Groups:
    body = ACTIONS.read_bytes()
    groups = Groups()
    groups.replay(Record(RecordHeader(RecordKind.ACTIONS, 0, 64, 64, 1, 0, TIME_MS, 0, len(body), 0), body))
    return groups


def restored() -> Groups:
    groups = Groups()
    groups.restore(PICTURE.read_bytes(), 0)
    return groups


def test_the_actions_are_written_as_they_always_were() -> None:
    assert actions_body() == ACTIONS.read_bytes()
    kinds = [each.event.kind for each in unpack(ACTIONS.read_bytes())]
    assert kinds[2:] == [ActionKind.JOIN, ActionKind.VERIFIER, ActionKind.JOIN]


def test_the_picture_is_written_as_it_always_was() -> None:
    assert replayed().picture() == PICTURE.read_bytes() == restored().picture()


@pytest.mark.parametrize("read", [replayed, restored])
def test_who_shows_the_secret_resumes_and_nobody_else(read: object) -> None:
    [host] = read()  # type: ignore[operator]
    for stranger in (JoinClaim(), JoinClaim(consumer_verifier_of(SECRET[::-1], "ann"))):
        assert join(host.state_machine, "ann", stranger).outcome is GroupOutcome.BUSY
    resumed = join(host.state_machine, "ann", JoinClaim(consumer_verifier_of(SECRET, "ann")))
    assert (resumed.outcome, resumed.events) == (GroupOutcome.DONE, ())
    secured = join(host.state_machine, "ben", JoinClaim(consumer_verifier_of(SECRET, "ben")))
    assert [event.kind for event in secured.events] == [ActionKind.VERIFIER]
