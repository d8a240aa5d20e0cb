"""Runs: messages of one key go out together to a consumer that handles one after another, and come back in order."""

from __future__ import annotations

import msgspec

from fairway.groups import AfterDead, Backoff, Coalesce, GroupConfig, Order
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Lever
from tests.unit.broker.scene import Handed, Scene, Worker, staged

LEASE_S = 15
BY_KEY = GroupConfig(order=Order.KEY, backoff=Backoff(first_ms=5_000, jitter=0))


async def crew(scene: Scene, *names: str, config: GroupConfig = BY_KEY) -> list[Worker]:
    await scene.configure(config)
    return [await scene.worker(name) for name in names]


def said(kind: m.Settlement, handed: Handed, *texts: str) -> list[m.Settle]:
    """One outcome of these messages."""
    meant = [each.sequence for each in handed.messages if each.payload.decode() in texts]
    outcomes = []
    for lot in handed.lots:
        spans = [
            m.SequenceRange(each, 1) for each in meant if any(s.first <= each < s.first + s.count for s in lot.spans)
        ]
        if spans:
            outcomes.append(m.Settle(kind, lot.first, lot.attempt, spans, fence=lot.fence))
    return outcomes


def behind(handed: Handed) -> list[str]:
    """What the broker has marked."""
    texts = {each.sequence: each.payload.decode() for each in handed.messages}
    spans = [span for lot in handed.lots if lot.is_behind for span in lot.spans]
    return [texts[at] for span in spans for at in range(span.first, span.first + span.count)]


@staged
async def test_a_run_goes_to_whoever_keeps_it_apart(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "b1", "a2", "a3", "b2", "a4")
    handed = await ann.pull(run_max=3)
    assert (handed.texts, behind(handed)) == (["a1", "b1", "a2", "a3", "b2"], ["a2", "a3", "b2"])
    assert not (await ben.pull(run_max=3)).lots, "ann has both keys until her runs are settled"
    await ann.settle_all(said(m.Settlement.ACK, handed, "a1", "a2"))
    assert not (await ben.pull(run_max=3)).lots
    await ann.settle_all(said(m.Settlement.ACK, handed, "a3"))
    assert (await ben.pull(run_max=3)).texts == ["a4"]


@staged
async def test_who_knows_nothing_of_runs_has_one_message_of_a_key_at_a_time(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "a2", "a3")
    old = await ann.pull()
    assert (old.texts, behind(old)) == (["a1"], [])
    await ann.ack(old)
    new = await ben.pull(run_max=64)
    assert (new.texts, behind(new)) == (["a2", "a3"], ["a3"])


@staged
async def test_a_run_of_none_is_no_run(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send_keyed("a1", "a2", "a3")
    assert (await ann.pull(run_max=0)).texts == ["a1"]


@staged
async def test_what_is_behind_a_failure_waits_for_it_and_has_lost_no_attempt(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "a2", "a3", "b1")
    handed = await ann.pull(run_max=64)
    await ann.settle_all(said(m.Settlement.ACK, handed, "a1", "b1"))
    await ann.settle_all(said(m.Settlement.RETRY, handed, "a2") + said(m.Settlement.RELEASE, handed, "a3"))
    assert not (await ben.pull(run_max=64)).lots
    await scene.sleep(6)
    again = await ben.pull(run_max=64)
    assert (again.texts, again.attempts) == (["a2"], [2]), "alone: it failed before"
    await ben.ack(again)
    last = await ann.pull(run_max=64)
    assert (last.texts, last.attempts) == (["a3"], [1])


@staged
async def test_outcomes_that_come_out_of_turn_let_nothing_pass(scene: Scene) -> None:
    """What was said of the first one got lost, say, and is said again later."""
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "a2", "a3")
    handed = await ann.pull(run_max=64)
    await ann.settle_all(said(m.Settlement.RELEASE, handed, "a3") + said(m.Settlement.RETRY, handed, "a2"))
    await scene.sleep(6)
    assert not (await ben.pull(run_max=64)).lots
    await ann.settle_all(said(m.Settlement.ACK, handed, "a1"))
    again = await ben.pull(run_max=64)
    assert (again.texts, again.attempts) == (["a2"], [2])
    await ben.ack(again)
    assert (await ben.pull(run_max=64)).texts == ["a3"]


@staged
async def test_a_lease_that_ends_counts_for_the_first_alone(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben", config=msgspec.structs.replace(BY_KEY, attempts_max=2))
    await scene.send_keyed("a1", "a2", "a3")
    held = got = await ann.pull(run_max=64)
    for _ in range(4):
        await scene.sleep(LEASE_S / 3)
        got = await ben.pull(run_max=64)
        if got.lots:
            break
    assert (held.texts, got.texts, got.attempts) == (["a1", "a2", "a3"], ["a1"], [2])
    assert got.lots[0].fence > held.lots[0].fence
    ann = await scene.worker("ann", arrived=ann.arrived)
    assert (await ann.ack(held)).stale == 3
    await ben.ack(got)
    rest = await ben.pull(run_max=64)
    assert (rest.texts, rest.attempts) == (["a2", "a3"], [1, 1])


@staged
async def test_a_run_outlives_power_cuts_and_restarts(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send_keyed("a1", "a2", "a3", "a4")
    handed = await ann.pull(run_max=3)
    await ann.settle_all(said(m.Settlement.ACK, handed, "a1"))
    ben = await scene.worker("ben")
    for life in range(3):
        await (scene.restart() if life % 2 else scene.power_cut())
        ann = await scene.worker("ann", arrived=ann.arrived)
        ben = await scene.worker("ben")
        assert not (await ben.pull(run_max=64)).lots
    assert (await ann.settle_all(said(m.Settlement.ACK, handed, "a2"))).settled == 1
    await ann.settle_all(said(m.Settlement.RELEASE, handed, "a3"))
    assert (await ben.pull(run_max=64)).texts == ["a3", "a4"]


@staged
async def test_a_response_that_did_not_arrive_comes_again_with_its_marks(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send_keyed("a1", "a2", "a3")
    lost = await ann.pull(run_max=64)
    ann.arrived = 0
    again = await ann.pull(run_max=64)
    assert (again.number, again.texts) == (lost.number, lost.texts)
    assert set(behind(lost)) <= set(behind(again))


@staged
async def test_many_keys_go_before_long_runs(scene: Scene) -> None:
    """Whoever asks first takes no key for itself while there is other work."""
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed(*(f"{key}{number}" for number in range(3) for key in "abcd"))
    assert (await ann.pull(most=3, run_max=64)).texts == ["a0", "b0", "c0"]
    assert (await ben.pull(most=3, run_max=64)).texts == ["d0", "d1", "d2"]


@staged
async def test_a_room_is_shared_by_the_keys(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send_keyed(*(f"{key}{number}" for number in range(9) for key in "ab"))
    assert (await ann.pull(most=8, run_max=64)).texts == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


@staged
async def test_a_run_gets_longer_for_whoever_says_so(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "b1", "a2")
    first = await ann.pull(run_max=3, extends_runs=True)
    await scene.send_keyed("a3", "a4", "c1")
    second = await ann.pull(run_max=3, extends_runs=True)
    assert (first.texts, second.texts, behind(second)) == (["a1", "b1", "a2"], ["c1", "a3"], ["a3"])
    await ann.settle_all(said(m.Settlement.ACK, first, "a1"))
    assert not (await ben.pull(run_max=3, extends_runs=True)).lots, "ann has a2 and a3"
    await ann.settle_all(said(m.Settlement.ACK, first, "a2") + said(m.Settlement.ACK, second, "a3"))
    assert (await ben.pull(run_max=3, extends_runs=True)).texts == ["a4"]


@staged
async def test_who_does_not_say_so_gets_nothing_behind_an_earlier_response(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send_keyed("a1")
    await ann.pull(run_max=64)
    await scene.send_keyed("a2", "b1")
    assert (await ann.pull(run_max=64)).texts == ["b1"]


@staged
async def test_nobody_keeps_a_key_while_another_finds_nothing(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "a2")
    first = await ann.pull(run_max=64, extends_runs=True)
    assert not (await ben.pull(run_max=64, extends_runs=True)).lots
    await scene.send_keyed("a3")
    assert not (await ann.pull(run_max=64, extends_runs=True)).lots
    await ann.ack(first)
    assert (await ben.pull(run_max=64, extends_runs=True)).texts == ["a3"]


@staged
async def test_a_run_gets_no_longer_behind_a_failure(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send_keyed("a1", "a2", "a3", "a4")
    first = await ann.pull(run_max=64, extends_runs=True)
    await ann.settle_all(said(m.Settlement.RETRY, first, "a1"))
    await scene.send_keyed("a5", "b1")
    assert (await ann.pull(run_max=64, extends_runs=True)).texts == ["b1"]


@staged
async def test_a_run_gets_no_longer_behind_a_message_that_came_back(scene: Scene) -> None:
    """a3 is still in hand, and must not be followed by a2."""
    (ann,) = await crew(scene, "ann")
    await scene.send_keyed("a1", "a2", "a3")
    first = await ann.pull(run_max=64, extends_runs=True)
    await ann.settle_all(said(m.Settlement.RELEASE, first, "a2"))
    await scene.send_keyed("a4", "b1")
    assert (await ann.pull(run_max=64, extends_runs=True)).texts == ["b1"]
    await ann.settle_all(said(m.Settlement.ACK, first, "a1") + said(m.Settlement.RELEASE, first, "a3"))
    assert (await ann.pull(run_max=64, extends_runs=True)).texts == ["a2", "a3", "a4"]


@staged
async def test_a_power_cut_and_a_lost_response_leave_a_longer_run_in_order(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1")
    first = await ann.pull(run_max=64, extends_runs=True)
    await scene.send_keyed("a2", "a3")
    arrived = ann.arrived
    lost = await ann.pull(run_max=64, extends_runs=True)
    await scene.power_cut()
    ann, ben = await scene.worker("ann", arrived=arrived), await scene.worker("ben")
    again = await ann.pull(run_max=64, extends_runs=True)
    assert (again.number, again.texts, behind(again)) == (lost.number, ["a2", "a3"], ["a2", "a3"])
    await ann.settle_all(said(m.Settlement.RELEASE, again, "a2", "a3") + said(m.Settlement.ACK, first, "a1"))
    handed = await ben.pull(run_max=64)
    assert (handed.texts, handed.attempts) == (["a2", "a3"], [1, 1])


@staged
async def test_a_dead_letter_in_a_run_halts_the_key_by_choice(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann", config=msgspec.structs.replace(BY_KEY, after_dead=AfterDead.HALT))
    await scene.send_keyed("a1", "a2", "a3")
    handed = await ann.pull(run_max=64)
    await ann.settle_all(said(m.Settlement.ACK, handed, "a1") + said(m.Settlement.REJECT, handed, "a2"))
    await scene.sleep(1)  # it is in dead letter by now, and a3 still in hand
    await ann.settle_all(said(m.Settlement.RELEASE, handed, "a3"))
    assert not (await ann.pull(run_max=64, wait_s=3)).lots
    assert (await scene.describe()).halted == 1
    assert (await scene.switch(Lever.HALT_KEY, is_on=False, key="a")).was_on
    assert (await ann.pull(run_max=64)).texts == ["a3"]


@staged
async def test_where_each_message_has_its_own_time_there_are_no_runs(scene: Scene) -> None:
    await scene.send_keyed("a1", "a2", "a3")
    for name, value in {"rate_per_key": 0.5, "coalesce": Coalesce.LATEST, "max_handling_ms": 60_000}.items():
        group = name.replace("_", "-")
        await scene.configure(msgspec.structs.replace(BY_KEY, **{name: value}), group=group)
        ann = await scene.worker("ann", group=group)
        assert (await ann.pull(run_max=64)).texts == ["a1"], name


@staged
async def test_what_is_in_hand_counts_among_what_may_be_parked(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann", config=msgspec.structs.replace(BY_KEY, parked_max=3))
    await scene.send_keyed("a1", "a2", "a3", "a4", "a5", "b1")
    handed = await ann.pull(run_max=3)
    state = await scene.describe()
    assert (handed.texts, state.parked, state.is_full) == (["a1", "a2", "a3"], 1, True)
    await ann.settle(m.Settlement.RELEASE, handed)
    assert (await scene.describe()).parked == 3


@staged
async def test_a_key_of_large_messages_among_many_of_small_ones_is_no_endless_choice(scene: Scene) -> None:
    """Shares are equal, so those of the small ones take the place of the large ones that were too much."""
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed(*(f"{key}{number}" for number in range(50) for key in "abcdefghijklmno"))
    for number in range(40):
        await scene.send_keyed(f"z{number:<60000}")
    assert len((await ann.pull()).texts) == 16
    await ann.pull()
    await ann.leave()  # the others are parked by now, and the heads are anybody's
    handed = await ben.pull(run_max=64)
    assert len(handed.texts) > 100
    assert len([text for text in handed.texts if text[0] == "z"]) > 10
