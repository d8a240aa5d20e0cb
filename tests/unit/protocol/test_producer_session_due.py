"""Messages with a due time: streams, lanes and batches of their own, and the same law of sending again."""

from __future__ import annotations

from array import array

import pytest

from fairway import batch
from fairway.errors import BufferFull, Code, Misuse
from tests.unit.protocol.wired import WiredProducer, connected, ended

DUE_MS = 1_800_000_000_000


def dues(data: bytes) -> list[int] | None:
    found = batch.due_times_ms(data, batch.peek(data))
    return None if found is None else list(found)


def test_a_delayed_message_never_shares_a_batch_or_a_stream_with_a_direct_one() -> None:
    scene = connected()
    scene.producing.add("orders", b"now")
    scene.producing.add("orders", b"later", due_ms=DUE_MS)
    scene.producing.add("orders", b"now, too", key="o-42")
    scene.producing.add("orders", b"later, too", "o-42", ("paid",), {"source": "pos"}, None, DUE_MS + 1)
    scene.pump()
    assert scene.payloads == [[b"now", b"now, too"], [b"later", b"later, too"]]
    direct, delayed = scene.batches
    assert (dues(direct), dues(delayed)) == (None, [DUE_MS, DUE_MS + 1])
    assert scene.places[0][0] != scene.places[1][0]
    assert [place[1] for place in scene.places] == [0, 0]
    opened = batch.decode(delayed)
    assert (opened.key(1), opened.tags(1), opened.headers(1)) == ("o-42", ["paid"], {"source": "pos"})


def test_the_receipt_has_the_id_that_the_delayed_message_was_born_with() -> None:
    scene = connected()
    pending = scene.producing.add("orders", b"later", due_ms=DUE_MS)
    scene.pump()
    born = batch.decode(scene.batches[0]).id(0)
    scene.store(0)
    assert pending.receipt().message_id == born


def test_each_subject_has_a_lane_for_each_of_the_two() -> None:
    scene = connected()
    for subject in ("orders", "rooms"):
        scene.producing.add(subject, b"now")
        scene.producing.add(subject, b"later", due_ms=DUE_MS)
    scene.pump()
    assert len({place[0] for place in scene.places}) == 4


def test_one_time_for_a_whole_list() -> None:
    scene = connected()
    scene.producing.add_many("orders", [b"a", b"b", b"c"], due_ms=array("q", [DUE_MS]) * 3)
    scene.pump()
    assert dues(scene.batches[0]) == [DUE_MS] * 3


def test_the_receipt_of_a_batch_knows_the_ids_of_its_messages() -> None:
    scene = connected()
    (sent,) = scene.producing.add_many("orders", [b"a", b"b"], due_ms=[DUE_MS, DUE_MS])
    scene.pump()
    opened = batch.decode(scene.batches[0])
    scene.store(0)
    assert [sent.receipt().id(index) for index in (0, 1)] == [str(opened.id(index)) for index in (0, 1)]
    with pytest.raises(Misuse, match="no message 2"):
        sent.receipt().id(2)


def test_a_list_that_is_cut_keeps_each_messages_time() -> None:
    scene = connected(batch_messages_max=2)
    scene.producing.add_many("orders", [b"a", b"b", b"c"], due_ms=[DUE_MS, DUE_MS + 1, DUE_MS + 2])
    scene.pump()
    assert [dues(each) for each in scene.batches] == [[DUE_MS, DUE_MS + 1], [DUE_MS + 2]]


@pytest.mark.parametrize("column", [[DUE_MS, 0], [0, 0]])
def test_all_messages_of_a_list_have_a_time_or_none(column: list[int]) -> None:
    scene = connected()
    with pytest.raises(Misuse, match="every message has a time"):
        scene.producing.add_many("orders", [b"a", b"b"], due_ms=column)
    assert scene.producing.messages == 0


@pytest.mark.parametrize("due_ms", [-1, 253_402_300_800_000])
def test_a_time_that_cannot_be_said_is_its_callers_to_see(due_ms: int) -> None:
    scene = connected()
    with pytest.raises(Misuse, match="1970 to 9999"):
        scene.producing.add("orders", b"x", due_ms=due_ms)
    assert scene.producing.messages == 0


def test_what_was_lost_is_sent_again_byte_for_byte_on_both_ways() -> None:
    scene = connected()
    both = [scene.producing.add("orders", b"now"), scene.producing.add("orders", b"later", due_ms=DUE_MS)]
    scene.pump()
    before = scene.batches
    scene.cut()
    scene.connect()
    assert sorted(scene.batches) == sorted(before)
    scene.store(0)
    scene.store(0)
    assert [ended(pending) for pending in both] == ["stored", "stored"]


def test_a_refusal_of_the_delayed_leaves_the_direct_alone() -> None:
    scene = connected()
    delayed = scene.producing.add("orders", b"later", due_ms=DUE_MS)
    scene.pump()
    scene.refuse(Code.TOO_LARGE)
    direct = scene.producing.add("orders", b"now")
    scene.pump()
    scene.store(0)
    assert (ended(delayed), ended(direct)) == ("Refused", "stored")


def test_a_message_that_may_be_refused_travels_alone() -> None:
    scene = connected()
    sent = [scene.producing.add("orders", b"near", due_ms=DUE_MS)]
    sent.append(scene.producing.add_alone("orders", b"far", due_ms=10 * DUE_MS))
    sent.append(scene.producing.add("orders", b"near, too", due_ms=DUE_MS))
    scene.sleep(10)
    assert scene.payloads == [[b"near"], [b"far"], [b"near, too"]]
    scene.store(0)
    scene.refuse(Code.TOO_LARGE)
    scene.refuse(Code.SEQUENCE_GAP)  # what came behind it has a number behind a hole
    scene.sleep(1_000)
    scene.store(1)
    assert [ended(pending) for pending in sent] == ["stored", "Refused", "stored"]


def test_both_share_the_buffer_and_the_flush() -> None:
    scene = WiredProducer(buffer_messages_max=2)
    scene.producing.add("orders", b"now")
    scene.producing.add("orders", b"later", due_ms=DUE_MS)
    with pytest.raises(BufferFull):
        scene.producing.add("orders", b"later still", due_ms=DUE_MS)
    flush = scene.producing.flush()
    scene.connect()
    scene.store(0)
    assert not flush.is_done
    scene.store(0)
    assert flush.is_done


def test_giving_up_covers_both() -> None:
    scene = WiredProducer()
    both = [scene.producing.add("orders", b"now"), scene.producing.add("orders", b"later", due_ms=DUE_MS)]
    scene.producing.give_up("closed")
    assert [ended(pending) for pending in both] == ["NotSent", "NotSent"]
