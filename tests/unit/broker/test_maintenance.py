"""Groups expire after idle days; retention keeps what groups owe, up to a ceiling."""

from __future__ import annotations

from dataclasses import replace

from fairway.broker.dead_letters import HISTORY_REASON
from fairway.errors import Code
from fairway.groups import GroupConfig, TagFilter
from fairway.limits import KIB
from fairway.protocol import messages as m
from fairway.storage.retention import Policy
from fairway.storage.store import StoreOptions
from tests.unit.broker.scene import STORE, Scene, options_of, refused, staged, staged_with

DAY_S = 86_400
HOUR_S = 3_600
SMALL = replace(STORE, segment_bytes=4 * KIB)


def keeping(policy: Policy) -> StoreOptions:
    return replace(SMALL, retention=policy)


async def fill(scene: Scene, segments: int) -> None:
    """So many segments of one batch each, and then the one that is written."""
    for _ in range(segments + 1):
        await scene.send(b"x" * 3_000)
    await scene.sleep(1)


def segments(scene: Scene) -> int:
    return len(scene.broker.store.messages.log.segments)


@staged
async def test_a_group_without_members_is_removed_after_its_idle_days(scene: Scene) -> None:
    await scene.configure(GroupConfig(idle_ms_max=2 * HOUR_S * 1_000))
    ann = await scene.worker("ann")
    await ann.leave()
    await scene.sleep(1.9 * HOUR_S)
    assert (await scene.describe()).consumers_count == 0
    await scene.sleep(0.2 * HOUR_S)
    assert await refused(scene.seek(m.Whence.EARLIEST)) is Code.NO_SUCH_GROUP
    assert scene.broker.maintenance.removed == 1
    await scene.kill()
    assert await refused(scene.seek(m.Whence.EARLIEST)) is Code.NO_SUCH_GROUP
    await scene.worker("ann")
    assert (await scene.describe()).config_version == 1


@staged
async def test_its_inbox_goes_with_it(scene: Scene) -> None:
    await scene.configure(GroupConfig(idle_ms_max=HOUR_S * 1_000))
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    await scene.redrive()
    await ann.leave()
    await scene.sleep(1.1 * HOUR_S)
    assert len(scene.broker.coordinator.groups) == 0
    await scene.restart()
    assert len(scene.broker.coordinator.groups) == 0
    ann = await scene.worker("ann")
    assert (await scene.redrive()).count == 0
    assert await ann.drain() == [b"a", b"b"]  # of the subject: the new group begins at its beginning


@staged
async def test_a_group_with_a_member_stays(scene: Scene) -> None:
    await scene.configure(GroupConfig(idle_ms_max=10_000, lease_ms=DAY_S * 1_000))
    await scene.worker("ann")
    await scene.sleep(HOUR_S)
    assert (await scene.describe()).consumers_count == 1


@staged
async def test_a_broadcast_consumer_that_was_away_too_long_is_told_gap(scene: Scene) -> None:
    ann = await scene.worker("ann", group="ann", is_joining=False)
    await ann.join(is_broadcast=True, start=m.Whence.LATEST)
    await scene.send(b"a")
    assert await ann.drain() == [b"a"]
    await ann.leave()
    await scene.send(b"b")
    await scene.sleep(HOUR_S / 2)
    assert not (await ann.join(is_broadcast=True)).has_gap
    assert await ann.drain() == [b"b"]
    await ann.leave()
    await scene.send(b"missed")
    await scene.sleep(HOUR_S * 1.1)
    assert (await ann.join(is_broadcast=True)).has_gap
    await scene.send(b"c")
    assert await ann.drain() == [b"c"]


@staged_with(options_of(store=keeping(Policy(age_ms_max=HOUR_S * 1_000))))
async def test_what_is_old_and_owed_by_nobody_goes(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await fill(scene, 5)
    await ann.drain()
    assert segments(scene) == 6
    await scene.sleep(1.1 * HOUR_S)
    assert segments(scene) == 1
    await scene.restart()
    assert (await scene.describe()).lag == 0


@staged_with(options_of(store=keeping(Policy(age_ms_max=HOUR_S * 1_000))))
async def test_what_a_group_owes_stays_also_what_was_pulled_and_not_acked(scene: Scene) -> None:
    await scene.configure(GroupConfig(lease_ms=DAY_S * 1_000))
    ann = await scene.worker("ann")
    await fill(scene, 5)
    await ann.ack(await ann.pull(most=2))
    held = await ann.pull(most=1)
    await ann.drain()
    await scene.sleep(3 * HOUR_S)
    assert segments(scene) == 4
    await ann.ack(held)
    await scene.sleep(0.1 * HOUR_S)
    assert segments(scene) == 1


@staged_with(options_of(store=keeping(Policy(age_ms_max=HOUR_S * 1_000))))
async def test_what_a_query_on_spark_has_not_read_stays(scene: Scene) -> None:
    """Its group has no members, and is moved by seeks alone."""
    spark = await scene.worker("spark", group="archive")
    await spark.leave()
    await fill(scene, 5)
    await scene.seek(m.Whence.SEQUENCE, 2, group="archive")
    await scene.sleep(3 * HOUR_S)
    assert segments(scene) == 4
    await scene.seek(m.Whence.SEQUENCE, 6, group="archive")
    await scene.sleep(0.1 * HOUR_S)
    assert segments(scene) == 1


@staged_with(options_of(store=keeping(Policy(age_ms_max=HOUR_S * 1_000, owed_bytes_max=14_000))))
async def test_above_the_ceiling_pulled_messages_die_and_others_are_lost_loudly(scene: Scene) -> None:
    await scene.configure(GroupConfig(lease_ms=DAY_S * 1_000))
    ann = await scene.worker("ann")
    await fill(scene, 9)
    held = await ann.pull(most=1)
    await scene.sleep(0.1 * HOUR_S)
    state = await scene.describe()
    assert segments(scene) <= 5
    assert state.lost > 0
    assert (state.in_flight, state.dying, state.dead) == (0, 0, 1)
    [dead] = await scene.scan("dead:billing:orders")
    assert dead.headers[HISTORY_REASON] == "retention could keep it no longer"
    assert any("too far behind" in remark for remark in scene.broker.store.remarks)
    assert (await ann.ack(held)).stale == 1
    rest = await ann.drain()
    assert 0 < len(rest) == 10 - 1 - state.lost
    await scene.restart()
    assert (await scene.describe()).lost == state.lost


@staged_with(options_of(store=keeping(Policy(age_ms_max=HOUR_S * 1_000, owed_bytes_max=1 << 20))))
async def test_what_a_filter_passed_over_is_not_owed(scene: Scene) -> None:
    await scene.configure(GroupConfig(lease_ms=86_400_000, tags=TagFilter(("red",))))
    ann = await scene.worker("ann")
    await fill(scene, 3)
    assert not (await ann.pull()).lots
    await scene.sleep(2 * HOUR_S)
    assert segments(scene) < 3
    assert (await scene.describe()).lost == 0
