"""A group against a naive model, with consumers and a broker that do everything that can go wrong.

Consumers vanish, return with and without memory, lose responses, ack twice, ack what they no longer hold. The broker
crashes and loses the events that nobody waited for. Every message must be in the one place that the model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairway.group_events import ActionKind, GroupEvent
from fairway.groups import (
    AfterDead,
    Coalesce,
    Dying,
    GroupConfig,
    GroupDecision,
    GroupOutcome,
    GroupStateMachine,
    Handout,
    Order,
    PullDecision,
    Range,
    SettleVerdict,
)
from fairway.groups.lots import ranges_of
from fairway.names import ConsumerName
from tests.property.group_model import MS_NS, Client, Held, Model, Moment, failed_of, response_of, sequences

NAMES = ("ann", "bob", "cid")
LEASE_MS = 1_000
Ranges: TypeAlias = Sequence[Range]
UNAWAITED = {ActionKind.PULL, ActionKind.EXPIRE, ActionKind.CURSOR, ActionKind.PARK}
KEYS = (0, 1, 1, 2, 2, 3, 4, 5, 6, 7)  # of messages: some have none, and two come often
RUNS = (1, 2, 100)  # messages of one key that a consumer keeps apart by itself


class GroupMachine(RuleBasedStateMachine):
    group_class: type[GroupStateMachine] = GroupStateMachine
    orders: tuple[Order, ...] = (Order.NONE,)
    mergers: tuple[Coalesce, ...] = (Coalesce.NONE,)
    rates: tuple[float, ...] = (0, 2)  # per key
    has_handling_max = True

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1_000_000
        self.end = 0
        self.group = self.group_class()
        self.events: list[GroupEvent] = []
        self.clients = {name: Client() for name in NAMES}
        self.dying: list[Dying] = []
        self.said: list[Handout] = []  # every lot that was ever handed out
        self.keys: dict[int, int] = {}  # of every message

    def tick(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        self.model.now_ms = self.now_ms

    @property
    def now_ns(self) -> int:
        return self.now_ms * MS_NS

    @initialize(
        attempts_max=st.integers(1, 4),
        lot_max=st.integers(1, 7),
        handling=st.none() | st.just(1_500),
        end=st.integers(0, 20),
        names=st.sets(st.sampled_from(NAMES)),
        parked_max=st.sampled_from([1, 4, 1_000]),
        data=st.data(),
    )
    def begin(
        self,
        attempts_max: int,
        lot_max: int,
        handling: int | None,
        end: int,
        names: set[str],
        parked_max: int,
        data: st.DataObject,
    ) -> None:
        config = GroupConfig(
            attempts_max=attempts_max,
            lot_messages_max=lot_max,
            lease_ms=LEASE_MS,
            max_handling_ms=handling if self.has_handling_max else None,
            order=self.orders[0],
            after_dead=data.draw(st.sampled_from(AfterDead)) if len(self.orders) > 1 else AfterDead.GO_ON,
            parked_max=parked_max,
            rate_per_key=data.draw(st.sampled_from(self.rates)) if self.orders[0] is Order.KEY else 0,
            coalesce=self.mergers[0],
        )
        self.rate_per_key = config.rate_per_key
        self.model = Model(config, now_ms=self.now_ms)
        self.produce(end, data)
        self.moments: list[Moment] = []
        self.happen(self.group.configure(0, config, now_ms=self.now_ms))
        self.happen(self.group.seek(0, now_ms=self.now_ms))
        for name in sorted(names):
            self.join(name, False)
        self.remember(is_awaited=True)

    # --- helpers

    def happen(self, decision: GroupDecision) -> None:
        self.group.apply_all(decision.events, self.now_ns)
        self.events += decision.events
        self.dying += decision.dying

    def remember(self, *, is_awaited: bool) -> None:
        """The model has followed. What is awaited can no longer be lost."""
        if is_awaited:
            self.moments.clear()
        self.moments.append(Moment(len(self.events), self.model.copy(), self.group.snapshot()))

    def speak(self, name: str) -> bool:
        """A heartbeat; a consumer that is told so joins again."""
        decision = self.group.heartbeat(ConsumerName(name), arrived=self.clients[name].arrived, now_ns=self.now_ns)
        assert (decision.outcome is GroupOutcome.DONE) == (name in self.model.members)
        if name in self.model.members:
            self.model.hear(name, self.clients[name].arrived, self.now_ns)
        return name in self.model.members

    def take_in(self, name: str, pulled: PullDecision) -> None:
        """A response reaches its consumer."""
        client = self.clients[name]
        if pulled.number > client.arrived:
            client.arrived = pulled.number
            client.lots += pulled.lots

    # --- the world

    @rule(count=st.integers(1, 12), data=st.data())
    def produce(self, count: int, data: st.DataObject) -> None:
        if len(self.orders) > 1:
            drawn = data.draw(st.lists(st.sampled_from(KEYS), min_size=count, max_size=count))
            self.keys.update(zip(range(self.end, self.end + count), drawn, strict=True))
        self.end += count

    @rule(passed_ms=st.sampled_from([1, 100, 400, 900, 1_100, 6_000]))
    def wait(self, passed_ms: int) -> None:
        self.tick(passed_ms)

    @rule()
    def expire(self) -> None:
        decision = self.group.expire(now_ns=self.now_ns, now_ms=self.now_ms)
        self.happen(decision)
        before = {at for at, each in self.model.open.items() if each.place == "dying"}
        self.model.expire(self.now_ns)
        after = {at for at, each in self.model.open.items() if each.place == "dying"}
        assert {at for each in decision.dying for at in sequences(each.ranges)} == after - before
        self.remember(is_awaited=False)

    # --- consumers

    @rule(name=st.sampled_from(NAMES), remembers=st.booleans())
    def join(self, name: str, remembers: bool) -> None:
        if not remembers:
            self.clients[name] = Client()
        arrived = self.clients[name].arrived
        decision = self.group.join(
            ConsumerName(name), version=0, arrived=arrived, resume_at=0, now_ns=self.now_ns, now_ms=self.now_ms
        )
        assert decision.outcome is GroupOutcome.DONE
        self.happen(decision)
        self.model.join(name, arrived, self.now_ns)
        self.remember(is_awaited=True)

    @rule(name=st.sampled_from(NAMES), most=st.integers(1, 15), skip=st.integers(0, 3), extends=st.booleans())
    def pull(self, name: str, most: int, skip: int, extends: bool) -> None:
        self.take_in(name, self.pull_some(name, most, skip, RUNS[most % len(RUNS)], extends=extends))

    @rule(name=st.sampled_from(NAMES), most=st.integers(1, 15))
    def pull_and_lose(self, name: str, most: int) -> None:
        self.pull_some(name, most, 0, RUNS[most % len(RUNS)], extends=most % 2 == 0)

    def pull_some(self, name: str, most: int, skip: int, run_max: int, *, extends: bool) -> PullDecision:
        first = min(self.group.cursor + (skip if skip > 1 else 0), max(self.end, self.group.cursor))
        fresh = (first, max(self.end - first, 0))
        client = self.clients[name]
        pulled = self.group.pull(
            ConsumerName(name),
            arrived=client.arrived,
            messages_max=most,
            fresh=fresh,
            now_ns=self.now_ns,
            now_ms=self.now_ms,
            keys=[self.keys.get(at, 0) for at in range(first, self.end)] if self.model.is_keyed else (),
            run_max=run_max,
            extends_runs=extends,
        )
        note(f"{name} pulls: {pulled}")
        self.happen(pulled)
        self.check_pulled(name, pulled, most, first, run_max, extends=extends)
        is_new = bool(pulled.events if pulled.is_again else pulled.lots)
        assert pulled.is_durable_first == (self.model.config.is_ordered and is_new and bool(pulled.lots))
        self.remember(is_awaited=pulled.is_durable_first)
        self.said += pulled.lots
        return pulled

    def check_returned(self, handed: set[int], ready: set[int]) -> None:
        returned = {at for at in ready if not self.model.open[at].due_ms}
        assert not returned or min(returned) in handed, "what is handed back goes by its sequence"

    def check_pulled(
        self, name: str, pulled: PullDecision, most: int, first: int, run_max: int, *, extends: bool
    ) -> None:
        model = self.model
        if name not in model.members:
            assert pulled.outcome is GroupOutcome.NOT_A_MEMBER
            return
        model.hear(name, self.clients[name].arrived, self.now_ns)
        if model.members[name].version != model.config.version:
            assert pulled.outcome is GroupOutcome.OTHER_VERSION
            return
        handed = {at for lot in pulled.lots for at in sequences(lot.ranges)}
        assert len(handed) == sum(count for lot in pulled.lots for _, count in lot.ranges), "handed out twice at once"
        if unarrived := model.unarrived(name):
            self.check_again(name, pulled, handed, min(unarrived))
            return
        assert not pulled.is_again
        if model.is_paused or name in model.paused:
            assert pulled.outcome is GroupOutcome.PAUSED
            model.hungry.discard(name)
            return
        if model.is_strict and name != next(iter(model.members)):
            assert pulled.outcome is GroupOutcome.STANDBY
            return
        if (model.is_mixed and model.in_flight) or (model.is_strict and not self.may_go_on(most)):
            first, end = model.cursor, model.cursor
        else:
            end = self.end
        model.skip(first)
        lots = [lot for lot in pulled.lots if not lot.is_behind]
        handed = {at for lot in lots for at in sequences(lot.ranges)}
        ready, fresh = model.ready(self.now_ms), set(range(first, end))
        parked, declined = set[int](), set[int]()
        if model.is_strict:
            ready = model.ready_strictly(self.now_ms)
            order = [at for lot in pulled.lots for first_, count in lot.ranges for at in range(first_, first_ + count)]
            assert order == sorted(order)
        again, runs, rooms = handed & ready, dict[int, int](), dict[int, int]()
        if model.is_keyed:
            fresh, parked, declined, runs, rooms = model.choose_by_key(
                self.keys, name, again, range(first, end), most, run_max, extends=extends
            )
            assert handed & fresh == fresh
        else:
            self.check_returned(handed, ready)
            assert len(handed) == min(most, len(ready | fresh))
        assert handed <= ready | fresh
        assert len(again) == min(most, len(ready))
        assert not handed & fresh or ready <= handed, "what waits goes before what is fresh"
        assert not handed & (model.done | model.dead), "an ack came back"
        for lot in lots:
            self.check_order(sequences(lot.ranges))
            self.hand_out(name, lot, pulled.number)
        model.decline(declined)
        model.park(parked, self.keys)
        passed = {at for at in declined if at >= first}
        model.cursor = max(model.cursor, first + len(parked) + len(passed) + len(handed & fresh))
        waiting = {each.key for each in model.open.values() if each.place != "held"}
        assert {self.keys[at] for at in declined} <= waiting, "declined, and nobody does what it asks for"
        if model.is_keyed:
            rooms |= dict.fromkeys(model.led(handed & fresh), model.run_max(run_max))
            model.grow(runs, rooms, most - len(handed) - sum(runs.values()))
        following = [at for key, length in runs.items() for at in model.parked_of(key)[:length]]
        assert len(handed) + len(following) <= most
        lots = [lot for lot in pulled.lots if lot.is_behind]
        assert [at for lot in lots for at in sorted(sequences(lot.ranges))] == sorted(following)
        for lot in lots:
            self.hand_out(name, lot, pulled.number)
        model.check_runs(following, name)
        model.note_hunger(name, is_hungry=pulled.outcome is GroupOutcome.EMPTY)

    def check_again(self, name: str, pulled: PullDecision, handed: set[int], number: int) -> None:
        model = self.model
        model.give_up_loose(name, number)
        assert handed == {at for at, each in model.held_by(name).items() if each.number == number}
        assert (pulled.is_again, pulled.number) == ((True, number) if handed else (False, 0))
        behind = {at for lot in pulled.lots if lot.is_behind for at in sequences(lot.ranges)}
        assert {at for at in handed if model.follows(at)} <= behind

    def hand_out(self, name: str, lot: Handout, number: int) -> None:
        model, members = self.model, sorted(sequences(lot.ranges))
        assert lot.first == members[0]
        assert {model.open[at].attempt if at in model.open else 1 for at in members} == {lot.attempt}
        model.hand_out(name, lot.first, lot.attempt, members, number, self.now_ns, self.keys)

    def may_go_on(self, most: int) -> bool:
        """In strict order: whether something fresh may follow in the same response."""
        unheld_lots = {at for at, each in self.model.open.items() if each.place == "stock"}
        is_dying = any(each.place == "dying" for each in self.model.open.values())
        is_all = self.model.ready_strictly(self.now_ms) == unheld_lots and len(unheld_lots) <= most
        return is_all and not is_dying and not self.model.is_halted

    def check_order(self, handed: set[int]) -> None:
        """The promise itself, whatever the mechanism: nothing of the same key comes before it that is not over."""
        model = self.model
        if model.is_strict and not model.is_mixed:
            open_ = {at for at, each in model.open.items() if each.place != "held"} - handed
            assert not any(each < at for each in open_ for at in handed)
            assert len({each.owner for each in model.open.values() if each.place == "held"}) <= 1
        if not model.is_keyed or model.is_mixed:
            return
        over = model.done | model.dead | model.skipped
        for at in handed:
            key = self.keys.get(at, 0)
            assert at in model.open or not model.rests_until(key), f"{at} goes out before its key has rested"
            before = [each for each, known in self.keys.items() if key and known == key and each < at]
            unordered = [each for each in before if each not in over and model.open[each].key == key]
            assert not unordered, f"{at} goes out before {unordered}"

    @rule(name=st.sampled_from(NAMES), verdict=st.sampled_from(SettleVerdict), data=st.data())
    def settle(self, name: str, verdict: SettleVerdict, data: st.DataObject) -> None:
        lots = self.clients[name].lots
        if lots:
            self.settle_some(name, verdict, data.draw(st.sampled_from(lots)), data)

    @rule(name=st.sampled_from(NAMES))
    def ack_latest(self, name: str) -> None:
        lots = self.clients[name].lots
        if lots and self.speak(name):
            self.settle_exactly(name, SettleVerdict.ACK, lots[-1], lots[-1].ranges, after_ms=None, draw=0.0)

    @precondition(lambda self: self.said)
    @rule(name=st.sampled_from(NAMES), data=st.data())
    def ack_what_another_has(self, name: str, data: st.DataObject) -> None:
        self.settle_some(name, SettleVerdict.ACK, data.draw(st.sampled_from(self.said[-3:])), data)

    @precondition(lambda self: self.said)
    @rule(name=st.sampled_from(NAMES), verdict=st.sampled_from(SettleVerdict), data=st.data())
    def settle_stale(self, name: str, verdict: SettleVerdict, data: st.DataObject) -> None:
        """About a lot that anybody had at any time."""
        self.settle_some(name, verdict, data.draw(st.sampled_from(self.said)), data)

    def settle_some(self, name: str, verdict: SettleVerdict, lot: Handout, data: st.DataObject) -> None:
        members = sorted(sequences(lot.ranges))
        chosen = data.draw(st.sets(st.sampled_from(members), min_size=1) | st.just(set(members)))
        ranges = ranges_of(sum(1 << at - lot.first for at in chosen), lot.first)
        draw = data.draw(st.sampled_from([0.0, 0.5]))
        after_ms = data.draw(st.sampled_from([None, 0, 300]))
        if self.speak(name):
            self.settle_exactly(name, verdict, lot, ranges, after_ms=after_ms, draw=draw)

    def settle_exactly(
        self, name: str, verdict: SettleVerdict, lot: Handout, ranges: Ranges, *, after_ms: int | None, draw: float
    ) -> None:
        said = sequences(ranges)
        due_ms = self.now_ms + (self.group.config.backoff.delay_ms(lot.attempt, draw) if after_ms is None else after_ms)
        arrived = self.clients[name].arrived
        decision = self.group.settle(
            ConsumerName(name),
            verdict,
            lot.first,
            lot.attempt,
            ranges,
            now_ms=self.now_ms,
            arrived=arrived,
            after_ms=after_ms,
            draw=draw,
        )
        note(f"{name} says {verdict.name} of {lot}, {ranges}: {decision}")
        self.happen(decision)
        held = self.model.holds(name, lot.first, lot.attempt, said, arrived)
        believed: set[int] = set()
        if verdict is SettleVerdict.ACK and not self.model.has_lot(name, lot.first, lot.attempt):
            believed = self.model.believable(lot.attempt, said)
        assert decision.settled == len(held | believed)
        assert decision.stale == len(said) - decision.settled
        if believed:
            self.model.believe(believed, self.now_ms + LEASE_MS)
        self.judge(verdict, held, due_ms)
        self.remember(is_awaited=True)

    def judge(self, verdict: SettleVerdict, held: set[int], due_ms: int) -> None:
        if verdict is SettleVerdict.ACK:
            self.model.ack(held)
        elif verdict is SettleVerdict.REJECT:
            self.model.reject(held)
        else:
            counts = verdict is SettleVerdict.RETRY
            for at in held:
                self.model.fail(at, counts=counts, due_ms=due_ms if counts else 0, is_said=counts)

    @rule(name=st.sampled_from(NAMES))
    def beat(self, name: str) -> None:
        self.speak(name)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.happen(self.group.leave(ConsumerName(name), now_ms=self.now_ms))
        if name in self.model.members:
            self.model.part(name, counts=False)
        self.remember(is_awaited=True)

    # --- operators

    @rule(name=st.none() | st.sampled_from(NAMES), is_paused=st.booleans())
    def pause(self, name: str | None, is_paused: bool) -> None:
        act = self.group.pause if is_paused else self.group.resume
        self.happen(act(None if name is None else ConsumerName(name), now_ms=self.now_ms))
        if name is None:
            self.model.is_paused = is_paused
        elif is_paused:
            self.model.paused.add(name)
        else:
            self.model.paused.discard(name)
        self.remember(is_awaited=True)

    @rule(attempts_max=st.integers(1, 4), handling=st.none() | st.just(1_500))
    def configure(self, attempts_max: int, handling: int | None) -> None:
        version = self.model.config.version
        self.configure_with(
            GroupConfig(
                version=version + 1,
                attempts_max=attempts_max,
                lease_ms=LEASE_MS,
                max_handling_ms=handling if self.has_handling_max else None,
                order=self.model.config.order,
                after_dead=self.model.config.after_dead,
                parked_max=self.model.config.parked_max,
                rate_per_key=self.model.config.rate_per_key,
                coalesce=self.model.config.coalesce,
            )
        )

    def configure_with(self, config: GroupConfig) -> None:
        self.happen(self.group.configure(config.version - 1, config, now_ms=self.now_ms))
        self.model.reorder(config)
        self.remember(is_awaited=True)

    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 9)):  # seldom: it wipes the slate
            return
        to = data.draw(st.integers(0, self.end))
        decision = self.group.seek(to, now_ms=self.now_ms)
        self.happen(decision)
        open_ = [each.place for each in self.model.open.values()]
        counts = (decision.held, decision.waiting, decision.dying_count)
        waiting = open_.count("stock") + open_.count("parked")
        assert counts == (open_.count("held"), waiting, open_.count("dying"))
        self.model.seek(to)
        self.clients = {name: Client(client.arrived) for name, client in self.clients.items()}
        self.said.clear()
        self.remember(is_awaited=True)

    @precondition(lambda self: self.dying)
    @rule(data=st.data())
    def mark_dead(self, data: st.DataObject) -> None:
        dying = data.draw(st.sampled_from(self.dying))
        if (dying.first, dying.attempt) not in self.group._state.dying:
            self.dying.remove(dying)  # a seek, or a crash, came between
            return
        self.happen(self.group.mark_dead(dying, now_ms=self.now_ms))
        self.model.mark_dead(sequences(dying.ranges))
        self.remember(is_awaited=False)

    # --- crashes

    @rule(data=st.data(), from_snapshot=st.booleans())
    def crash(self, data: st.DataObject, from_snapshot: bool) -> None:
        """Events that nobody waited for may be gone; a checkpoint may be any that covers no more than what is left."""
        kept = data.draw(st.just(0) | st.integers(0, len(self.moments) - 1))
        moment = self.moments[kept]
        assert all(event.kind in UNAWAITED | {ActionKind.DEAD} for event in self.events[self.moments[0].events :])
        del self.events[moment.events :], self.moments[kept + 1 :]
        if from_snapshot:
            base = self.moments[data.draw(st.integers(0, kept))]
            self.group = self.group_class.restore(base.snapshot)
            self.group.apply_all(self.events[base.events :])
        else:
            self.group = self.group_class()
            self.group.apply_all(self.events)
        assert self.group.snapshot() == moment.snapshot
        self.model = moment.model.copy()
        self.model.now_ms = self.now_ms
        self.dying = list(self.group.begin_life(self.end, self.now_ns))
        self.model.begin_life(self.end, self.now_ns)

    # --- what always holds

    @invariant()
    def every_message_is_where_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        state, found = self.group._state, dict[int, Held]()
        for member, lot in state.roster.held():
            for at in sequences(lot.ranges):
                assert at not in found
                found[at] = Held("held", lot.attempt, member.name, lot.base, response_of(lot, at), lot.handed_ns)
                found[at].key, found[at].failed = self.key_of(at), failed_of(lot)
        for place, shelf in (("stock", state.unheld_lots), ("dying", state.dying)):
            for lot in shelf:
                assert lot.mask & 1
                for at in sequences(lot.ranges):
                    assert at not in found
                    found[at] = Held(place, lot.attempt, due_ms=lot.due_ms, key=self.key_of(at), failed=failed_of(lot))
        for at in state.keys.parked() if state.keys is not None else ():
            assert at not in found
            found[at] = Held("parked", 1, key=self.key_of(at))
        assert state.held_count == sum(len(member.lots) for member in state.roster)
        assert found.keys() == self.model.open.keys()
        for at, message in found.items():
            expected = self.model.open[at]
            expected.handed_ns = message.handed_ns if message.place != "held" else expected.handed_ns
            assert message == expected
        assert (state.is_paused, state.paused) == (self.model.is_paused, self.model.paused)
        assert {member.name for member in state.roster} == self.model.members.keys()
        assert self.group.cursor == self.model.cursor
        places = (self.model.open.keys(), self.model.done, self.model.dead, self.model.skipped)
        assert sum(map(len, places)) == self.model.cursor
        assert set().union(*places) == set(range(self.model.cursor))

    def key_of(self, at: int) -> int:
        """So far as the group knows."""
        keys = self.group._state.keys
        return 0 if keys is None else keys.key_of(at)

    @invariant()
    def the_first_of_a_key_is_out(self) -> None:
        if not hasattr(self, "model") or self.group._state.keys is None:
            return
        keys, model = self.group._state.keys, self.model
        out = {key: model.out_of(key) for key in {each.key for each in model.open.values()} - {0}}
        assert keys.out.keys() == {key for key in out if out[key]} | model.halted
        for key in out.keys() - model.halted:
            assert keys.out[key] == out[key][0] < min([*model.parked_of(key), model.cursor])
            assert keys.is_run(key) == (len(out[key]) > 1)
        assert keys.halted == model.halted
        assert keys.parked_count == sum(each.place == "parked" for each in model.open.values())
        assert keys.behind_count == model.behind_count <= model.config.parked_max
        assert self.group._state.declined_count == self.model.declined_count

    @invariant()
    def deadline_is_never_missed(self) -> None:
        if not hasattr(self, "model"):
            return
        deadline_ns = self.group.next_deadline_ns(now_ns=self.now_ns, now_ms=self.now_ms)
        due = [each.due_ms for each in self.model.open.values() if each.place == "stock" and each.due_ms > self.now_ms]
        leases = [each.renewed_ns + LEASE_MS * MS_NS for each in self.model.members.values()]
        expected = leases + ([] if self.model.is_paused else [each * MS_NS for each in due])
        if self.model.config.max_handling_ms is not None:
            held = [each.handed_ns for each in self.model.open.values() if each.place == "held"]
            expected += [each + self.model.config.max_handling_ms * MS_NS for each in held]
        assert deadline_ns == min(expected, default=None)

    def teardown(self) -> None:
        """Whatever happened: consumers that do their work empty the group."""
        if not hasattr(self, "model"):
            return
        for name in (None, *NAMES):
            self.pause(name, False)
        for name in NAMES:
            self.join(name, False)
        self.let_keys_go_on()
        for _ in range(200):
            if self.model.cursor == self.end and not self.model.open:
                break
            self.work_once()
        assert not self.model.open
        assert self.model.done | self.model.dead | self.model.skipped == set(range(self.end))
        again = self.group_class()
        again.apply_all(self.events)
        restored = self.group_class.restore(self.group.snapshot())
        assert again.snapshot() == self.group.snapshot() == restored.snapshot()
        assert again.held_bytes == self.group.held_bytes == restored.held_bytes

    def let_keys_go_on(self) -> None:
        """Nothing halts any more: else not all of it would be done."""
        if self.model.config.after_dead is AfterDead.HALT:
            config = self.model.config
            changed = msgspec.structs.replace(config, version=config.version + 1, after_dead=AfterDead.GO_ON)
            self.configure_with(changed)
            for name in NAMES:
                self.join(name, True)

    def work_once(self) -> None:
        for name in NAMES:
            pulled = self.pull_some(name, 15, 0, 3, extends=True)
            self.take_in(name, pulled)
            for lot in pulled.lots:
                self.settle_exactly(name, SettleVerdict.ACK, lot, lot.ranges, after_ms=None, draw=0.0)
        for dying in self.dying:
            self.happen(self.group.mark_dead(dying, now_ms=self.now_ms))
            self.model.mark_dead(sequences(dying.ranges))
        self.dying.clear()
        self.tick(500)


GroupMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestGroups = GroupMachine.TestCase
