"""The law of groups that keep an order, rest or coalesce, against the same naive model."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from fairway.groups import AfterDead, Coalesce, Order
from tests.property.test_groups_model import KEYS, GroupMachine


class OrderedMachine(GroupMachine):
    """By key, and now and then not."""

    orders: tuple[Order, ...] = (Order.KEY, Order.NONE)

    @rule(data=st.data(), after_dead=st.sampled_from(AfterDead))
    def reorder(self, data: st.DataObject, after_dead: AfterDead) -> None:
        config = self.model.config
        order = data.draw(st.sampled_from([*self.orders[:1] * 3, *self.orders[1:]]))
        coalesce = data.draw(st.sampled_from(self.mergers))
        is_keyed = order is Order.KEY or coalesce is not Coalesce.NONE
        rate = self.rate_per_key if is_keyed else 0
        version = config.version + 1
        changes = {"order": order, "after_dead": after_dead, "rate_per_key": rate, "coalesce": coalesce}
        self.configure_with(msgspec.structs.replace(config, version=version, **changes))

    @rule(key=st.sampled_from(KEYS))
    def go_on(self, key: int) -> None:
        self.happen(self.group.go_on(key, now_ms=self.now_ms))
        self.model.go_on(set(KEYS) if key == 0 else {key})
        self.model.is_halted &= key != 0
        self.remember(is_awaited=True)


class RunsMachine(OrderedMachine):
    """By key, where nothing stands in the way of runs."""

    rates = (0,)
    has_handling_max = False


class StrictMachine(OrderedMachine):
    """Strictly, and now and then otherwise."""

    orders = (Order.STRICT, Order.KEY, Order.NONE)


class CoalescingMachine(OrderedMachine):
    """Requests that mean the same, and now and then do not."""

    mergers = (Coalesce.LATEST, Coalesce.DECLINE, Coalesce.NONE)


for machine, examples in ((OrderedMachine, 40), (RunsMachine, 40), (StrictMachine, 40), (CoalescingMachine, 40)):
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=50)
TestOrderedGroups = OrderedMachine.TestCase
TestRuns = RunsMachine.TestCase
TestStrictGroups = StrictMachine.TestCase
TestCoalescingGroups = CoalescingMachine.TestCase
