"""Removals and copies: each reaches every copy, a deposed master's is undone, a mended record revives nobody."""

from __future__ import annotations

import pytest

from fairway.names import Subject
from fairway.storage.record import Record
from fairway.storage.segment import HEADER_BYTES, SegmentScan
from fairway.storage.store import StoreOptions
from tests.simulation.checks import picture
from tests.unit.storage.copies import Pair, Side, bytes_of
from tests.unit.storage.helpers import BILLS, ORDERS, ROOMY, SMALL, messages


def remove(side: Side, name: Subject) -> None:
    state = side.store.messages.views.subjects.find(name)
    assert state is not None
    side.store.remove_subjects([state])


def listed(side: Side) -> set[str]:
    return {str(each.name) for each in side.store.messages.views.subjects}


def filled(options: StoreOptions) -> Pair:
    pair = Pair(options=options)
    for number in range(6):
        pair.send([b"order %d" % number * 40])
        pair.send([b"bill %d" % number * 40], BILLS, 2)
    pair.settle()
    return pair


@pytest.mark.parametrize("options", [SMALL, ROOMY])
def test_a_removal_reaches_the_copy_which_may_then_lead(options: StoreOptions) -> None:
    with filled(options) as pair:
        remove(pair.master, ORDERS)
        pair.settle()
        assert listed(pair.master) == listed(pair.copy) == {"bills"}
        assert bytes_of(pair.copy) == bytes_of(pair.master)
        pair.send([b"again"], ORDERS, 3)
        pair.settle()
        assert picture(pair.copy.store.messages.views) == picture(pair.master.store.messages.views)
        pair.copy.store.lead(2)
        pair.wait()
        assert messages(pair.copy.store, ORDERS) == {6: b"again"}


@pytest.mark.parametrize("options", [SMALL, ROOMY])
@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_removal_that_is_not_committed_is_undone_with_the_tail_of_a_deposed_master(
    options: StoreOptions, with_checkpoint: bool
) -> None:
    with filled(options) as pair:
        ends = pair.master.store.ends()
        remove(pair.master, ORDERS)
        for number in range(8):
            pair.send([b"alone %d" % number * 80], BILLS, 2)  # nobody else ever has this
        pair.wait()
        assert "orders" in listed(pair.master)  # it leaves, and is there until the copy has the record
        if with_checkpoint:
            pair.master.store.checkpoint()
            pair.wait()
        pair.master.cut(*ends)
        pair.wait()
        assert listed(pair.master) == {"orders", "bills"}
        pair.master.store.confirm(*ends)
        pair.wait()
        assert len(messages(pair.master.store, ORDERS)) == 6
        state = pair.master.store.messages.views.subjects.find(ORDERS)
        assert state is not None
        assert (state.is_shut, state.next_sequence) == (False, 6)


def test_a_copy_that_took_a_checkpoint_before_the_commit_still_has_the_subject() -> None:
    """The copy has the record and does not know that it counts: its checkpoint must not be without the subject."""
    with filled(ROOMY) as pair:
        ends = pair.copy.store.ends()
        remove(pair.master, ORDERS)
        pair.wait()
        pair.pass_on()
        pair.wait()
        pair.copy.store.checkpoint()
        pair.wait()
        pair.copy.cut(*ends)
        pair.wait()
        assert listed(pair.copy) == {"orders", "bills"}
        assert not any(each.is_shut for each in pair.copy.store.messages.views.subjects)


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_records_of_a_removed_subject_that_are_mended_revive_nobody(with_checkpoint: bool) -> None:
    with filled(SMALL) as pair:
        remove(pair.master, ORDERS)
        pair.settle()
        if with_checkpoint:
            pair.copy.store.checkpoint()
            pair.wait()
        pair.copy.abandon()
        pair.copy.open(follows=True)
        pair.copy.store.confirm(*pair.copy.store.ends())
        pair.wait()
        log = pair.copy.store.messages
        first = log.log.segments[0]
        scan = SegmentScan(log.log.file(first), first.base, first.base + HEADER_BYTES, log.log.log_id)
        records = [each for each in scan if isinstance(each, Record)]
        assert any(each.header.subject_id == 1 for each in records)
        log.mended(first, records, lambda _fault: None)  # as if all of it had been fetched from another copy
        assert listed(pair.copy) == {"bills"}
        assert len(messages(pair.copy.store, BILLS)) == 6
