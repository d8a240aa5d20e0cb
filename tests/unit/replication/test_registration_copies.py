"""Which copy may follow, and with which secret: nodes of this version and of the one before, there and gone."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from fairway import limits
from fairway.batch.identity import SECRET_BYTES, VERIFIER_BYTES, copy_verifier_of, new_secret
from fairway.errors import Code, Refused
from fairway.protocol.replication_messages import Follow
from fairway.registry.layout import RegisteredCopy, member_path, pack, unpack
from fairway.replication.registration import RegisteredCopies
from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation, simulate
from fairway.simulation.registry import SimEnsemble

GROUP, COPY, OTHER = "g", "00000000000000b2", "00000000000000c3"
SECRET, NEXT = b"s" * SECRET_BYTES, b"n" * SECRET_BYTES
SHOWN, SHOWN_NEXT, NONE = copy_verifier_of(SECRET, COPY), copy_verifier_of(NEXT, COPY), b""
OLDER = RegisteredCopy(COPY, "host", 1)
NEWER = RegisteredCopy(COPY, "host", 1, verifier=SHOWN)
RESTARTED = RegisteredCopy(COPY, "host", 1, verifier=SHOWN_NEXT)
NOBODY: Mapping[str, RegisteredCopy] = {}


def copies(world: Simulation, members: Mapping[str, RegisteredCopy]) -> RegisteredCopies:
    return RegisteredCopies(SimEnsemble(world).client("master"), GROUP, [], members, retry_after_ms=100)


def accepted(
    members: Mapping[str, RegisteredCopy], *later: Mapping[str, RegisteredCopy], known: tuple[str, ...] = (COPY,)
) -> list[bool]:
    """Whether these may follow after the master has seen those nodes, one look after another: the process with the
    secret, the process that was started after it, and whoever has no secret."""

    async def scenario(world: Simulation) -> list[bool]:
        registered = copies(world, members)
        for each in later:
            registered.update(each, known)
        return [_may_follow(registered, shown, known) for shown in (SHOWN, SHOWN_NEXT, NONE)]

    return simulate(scenario, 1).result


def _may_follow(registered: RegisteredCopies, shown: bytes, known: tuple[str, ...]) -> bool:
    try:
        registered.check(COPY, shown, known, 0)
    except Refused:
        return False
    return True


@pytest.mark.parametrize("known", [(), (COPY,)])
def test_a_node_with_a_verifier_takes_its_secret_and_a_node_of_the_version_before_takes_any(
    known: tuple[str, ...],
) -> None:
    assert accepted({COPY: NEWER}, known=known) == [True, False, False]
    assert accepted({COPY: OLDER}, known=known) == [True, True, True]


def test_the_newest_node_decides() -> None:
    assert accepted({COPY: NEWER}, {COPY: RESTARTED}) == [False, True, False], "it was started again"
    assert accepted({COPY: OLDER}, {COPY: NEWER}) == [True, False, False], "it was upgraded"
    assert accepted({COPY: NEWER}, {COPY: OLDER}) == [True, True, True], "it went back to the version before"
    assert accepted({COPY: NEWER}, NOBODY, {COPY: RESTARTED}) == [False, True, False]
    assert accepted({COPY: NEWER}, NOBODY, {COPY: OLDER}) == [True, True, True]


def test_a_node_that_is_gone_leaves_its_verifier_for_as_long_as_the_group_knows_the_copy() -> None:
    assert accepted({COPY: NEWER}, NOBODY) == [True, False, False]
    assert accepted({COPY: NEWER}, NOBODY, NOBODY) == [True, False, False]
    assert accepted(NOBODY) == [True, True, True], "a new master has never seen its node; it does not count yet"
    assert accepted({COPY: NEWER}, NOBODY, known=()) == [False, False, False], "nobody knows it"


def test_copies_that_came_and_went_leave_no_verifiers_behind() -> None:
    async def scenario(world: Simulation) -> int:
        registered = copies(world, NOBODY)
        for number in range(100):
            directory = f"{number:016x}"
            registered.update({directory: RegisteredCopy(directory, "host", 1, verifier=SHOWN)}, (COPY,))
        registered.update({COPY: NEWER}, (COPY,))
        registered.update(NOBODY, (COPY,))
        return len(registered._verifiers)

    assert simulate(scenario, 1).result == 1


def test_the_sentence_says_what_was_shown_and_the_registry_is_read_again() -> None:
    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world)
        registered = RegisteredCopies(ensemble.client("master"), GROUP, [COPY], {COPY: NEWER}, retry_after_ms=100)
        for shown, words in ((NONE, "shows no secret"), (SHOWN_NEXT, "shows another secret")):
            with pytest.raises(Refused, match=f"directory {COPY} of group g .* {words}: only") as refused:
                registered.check(COPY, shown, [COPY], 0)
            assert (refused.value.code, refused.value.retry_after_ms) == (Code.FENCED, 100)
        assert registered.is_look_due
        copy = ensemble.client("copy")
        await copy.create(member_path(GROUP, COPY), pack(RESTARTED), is_ephemeral=True)
        await registered.look(0, [COPY])
        registered.check(COPY, SHOWN_NEXT, [COPY], 0)
        with pytest.raises(Refused):
            registered.check(COPY, SHOWN, [COPY], 0)
        assert not registered.is_look_due, "once a second at most"

    simulate(scenario, 1)


def test_a_group_that_is_full_takes_no_more_copies() -> None:
    async def scenario(world: Simulation) -> None:
        known = [f"{number:016x}" for number in range(1_000, 1_000 + limits.GROUP_COPIES_MAX)]
        with pytest.raises(Refused, match="takes no more") as refused:
            copies(world, {COPY: NEWER}).check(COPY, SHOWN, known, 0)
        assert refused.value.code is Code.TOO_LARGE

    simulate(scenario, 1)


# --- the secret -------------------------------------------------------------------------------------------------------


def test_a_verifier_is_of_one_copy_and_one_secret() -> None:
    secret = new_secret(SeededRng("a process"))
    verifiers = {copy_verifier_of(each, of) for each in (secret, SECRET) for of in (COPY, OTHER)}
    assert len(verifiers) == 4
    assert {len(each) for each in verifiers} == {VERIFIER_BYTES}
    assert copy_verifier_of(b"", COPY) == b""


def test_no_repr_shows_the_secret() -> None:
    shown = repr(Follow("east", 3, 161, SECRET))
    assert shown == "Follow(group='east', epoch=3, directory_id=161, secret=<16 bytes>)"


# --- peers of the version before --------------------------------------------------------------------------------------


class FollowBefore(msgspec.Struct, frozen=True, array_like=True):
    """FOLLOW as the version before has it."""

    group: str
    epoch: int
    directory_id: int


class MemberBefore(msgspec.Struct, frozen=True):
    """What the version before reads of a copy's node."""

    directory: str
    host: str
    port: int
    is_closed: bool = False


def test_the_version_before_reads_what_this_one_writes_and_the_other_way_round() -> None:
    before, now = FollowBefore("east", 3, 161), Follow("east", 3, 161, SECRET)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(now), type=FollowBefore) == before
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=Follow) == Follow("east", 3, 161)
    assert msgspec.json.decode(pack(NEWER), type=MemberBefore) == MemberBefore(COPY, "host", 1)
    assert unpack(RegisteredCopy, "node", msgspec.json.encode(MemberBefore(COPY, "host", 1))) == OLDER
