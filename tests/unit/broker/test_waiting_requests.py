"""Requests that wait: nothing keeps them in memory once they are answered, or their connection is gone."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from fairway import limits
from fairway.broker.group_coordinator import RELEASED_PER_TURN
from fairway.broker.produce import NewNames
from fairway.errors import Refused
from fairway.limits import MIB
from fairway.names import Subject
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Lever, Retrace, Retraced, Scan, Scanned
from fairway.protocol.route_messages import ClientRole, Route, Routed
from fairway.serving.requests import ServedRequest
from fairway.serving.session_manager import _WITHDRAWN_PER_TURN
from tests.support.client import Client, Stream
from tests.unit.broker.scene import GROUP, SUBJECT, Scene, options_of, staged, staged_with

WAIT_MS = 50_000


_of_other_tests: dict[int, object] = {}  # by id, and kept, so that no other object gets one of these ids


def _requests() -> list[object]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, ServedRequest)]


@pytest.fixture(autouse=True)
def _know_the_requests_of_other_tests() -> Iterator[None]:
    """A broker that another test left to the collector may still hold some."""
    _of_other_tests.update((id(each), each) for each in _requests())
    yield
    _of_other_tests.clear()


def requests_in_memory() -> int:
    return sum(id(each) not in _of_other_tests for each in _requests())


def begin(asked: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """Ask, and wait for no answer."""
    asking = asyncio.ensure_future(asked)
    asking.add_done_callback(lambda done: done.cancelled() or done.exception())
    return asking


def scan(client: Client) -> Coroutine[Any, Any, Any]:
    return client.ask(Scan(SUBJECT, m.Whence.LATEST, 0, None, 1_000, wait_ms=WAIT_MS), Scanned)


def retrace(client: Client) -> Coroutine[Any, Any, Any]:
    return client.ask(Retrace(m.Whence.LATEST, 0, 1_000, wait_ms=WAIT_MS), Retraced)


def route(client: Client) -> Coroutine[Any, Any, Any]:
    return client.ask(Route(ClientRole.CONSUMER, [SUBJECT], 1, WAIT_MS), Routed)


async def pulling(scene: Scene) -> Client:
    """A connection with a consumer that has a long poll under way."""
    client = await scene.connect()
    await client.join(SUBJECT, GROUP, "bob")
    _ = begin(client.pull(SUBJECT, GROUP, "bob", wait_ms=WAIT_MS))
    return client


@staged
async def test_a_question_is_forgotten_with_its_connection(scene: Scene) -> None:
    await scene.send(b"a")
    for question in (scan, retrace, route):
        client = await scene.connect()
        for _ in range(3):
            _ = begin(question(client))
        await asyncio.sleep(1)
        assert requests_in_memory(), question
        client.abort()
        await asyncio.sleep(1)
        assert requests_in_memory() == 0, question


@staged
async def test_a_pull_is_forgotten_with_its_connection(scene: Scene) -> None:
    await scene.worker("ann")
    client = await pulling(scene)
    await asyncio.sleep(1)
    assert requests_in_memory() == 1
    client.abort()
    await asyncio.sleep(1)
    assert requests_in_memory() == 0


@staged
async def test_a_paused_pull_is_forgotten_with_its_connection(scene: Scene) -> None:
    await scene.worker("ann")
    await scene.switch(Lever.PAUSE_GROUP, is_on=True)
    client = await pulling(scene)
    await asyncio.sleep(1)
    assert requests_in_memory() == 1
    client.abort()
    await asyncio.sleep(1)
    assert requests_in_memory() == 0


@staged
async def test_a_question_is_forgotten_with_its_answer(scene: Scene) -> None:
    """Its timer, which holds it, is cancelled."""
    await scene.send(b"a")
    client = await scene.connect()
    seen, _ = await client.ask(Retrace(m.Whence.LATEST, 0, 0), Retraced)
    asking = [
        begin(client.ask(Scan(SUBJECT, m.Whence.SEQUENCE, 1, None, 1_000, wait_ms=WAIT_MS), Scanned)),
        begin(client.ask(Retrace(m.Whence.SEQUENCE, seen.position, 1_000, wait_ms=WAIT_MS), Retraced)),
    ]
    await asyncio.sleep(1)
    await scene.worker("ann")
    await scene.send(b"b")
    await asyncio.sleep(1)
    assert all(each.done() for each in asking)
    assert requests_in_memory() == 0


@staged
async def test_a_paused_pull_is_forgotten_with_its_answer(scene: Scene) -> None:
    await scene.worker("ann")
    await scene.switch(Lever.PAUSE_GROUP, is_on=True)
    await pulling(scene)
    await asyncio.sleep(1)
    await scene.send(b"a")
    await scene.switch(Lever.PAUSE_GROUP, is_on=False)
    await asyncio.sleep(1)
    assert requests_in_memory() == 0


@staged
async def test_thousands_of_scans_look_again_a_few_at_a_time(scene: Scene) -> None:
    """All of them in one turn held up everybody for two seconds."""
    await scene.send(b"a")
    clients = [await scene.connect() for _ in range(3)]
    scans = [begin(scan(client)) for client in clients for _ in range(500)]
    await asyncio.sleep(1)
    state = scene.broker.store.messages.views.subjects.find(Subject.parse(SUBJECT))
    assert state is not None
    lane = next(actor for actor in scene.broker.scheduler if actor.key[0] == "scan")  # type: ignore[index]
    assert not lane.mailbox
    scene.broker.coordinator.watches.release(state.id)
    assert len(lane.mailbox) == RELEASED_PER_TURN
    await scene.send(b"b")
    told = await asyncio.gather(*scans, return_exceptions=True)
    assert all(isinstance(each, tuple | Refused) for each in told)


@staged
async def test_scans_about_to_look_again_end_with_their_connection_and_with_the_broker(scene: Scene) -> None:
    await scene.send(b"a")
    client, other = await scene.connect(), await scene.connect()
    ends = [begin(scan(each)) for each in (client, other) for _ in range(2 * RELEASED_PER_TURN)]
    await asyncio.sleep(1)
    state = scene.broker.store.messages.views.subjects.find(Subject.parse(SUBJECT))
    assert state is not None
    scene.broker.coordinator.watches.release(state.id)
    client.abort()
    scene.broker.coordinator.watches.close()
    told = [each for each in await asyncio.gather(*ends, return_exceptions=True) if isinstance(each, Refused)]
    assert len(told) >= RELEASED_PER_TURN, "the broker stops"
    assert requests_in_memory() == 0


# --- the room that they have ------------------------------------------------------------------------------------------

ROOM = 1 * MIB


async def crowd(scene: Scene) -> list[Client]:
    """As many scans as find room, over ten connections."""
    await scene.send(b"a")
    clients = [await scene.connect() for _ in range(10)]
    for client in clients:
        for _ in range(200):
            _ = begin(scan(client))
    await asyncio.sleep(1)
    return clients


@staged_with(options_of(waiting_bytes_max=ROOM))
async def test_long_polls_leave_room_for_what_is_urgent(scene: Scene) -> None:
    ann = await scene.worker("ann")
    clients = await crowd(scene)
    taken = scene.broker.waiting.taken_bytes
    assert ROOM // 4 < taken <= ROOM // 2
    assert scene.broker.pages["/readyz"]().status == 200
    await scene.send(b"b")
    await ann.ack(await ann.pull())
    await ann.heartbeat()
    for client in clients:
        client.abort()
    await asyncio.sleep(1)
    assert scene.broker.waiting.taken_bytes == 0


@staged_with(options_of(waiting_bytes_max=ROOM))
async def test_a_broker_without_room_is_not_ready(scene: Scene) -> None:
    session = await scene.connect()
    scene.broker.waiting.take(session, ROOM, is_urgent=True)  # type: ignore[arg-type]  # any holder will do
    page = scene.broker.pages["/readyz"]()
    assert page.status == 503
    scene.broker.waiting.forget(session)  # type: ignore[arg-type]
    assert scene.broker.pages["/readyz"]().status == 200


@staged
async def test_produce_to_subjects_that_do_not_exist_has_one_actor(scene: Scene) -> None:
    """However many names there are, and however many connections."""
    clients = [await scene.connect() for _ in range(5)]
    for number, client in enumerate(clients):
        for name in range(20):
            stream = Stream(1_000 * number + name + 1)
            stream.batch([b"the first one, which is never sent"])
            _ = begin(client.produce(f"new-{number}-{name}", stream.batch([b"x"])))
    await asyncio.sleep(1)
    produce = [actor.key for actor in scene.broker.scheduler if "produce" in str(actor.key) or "new" in str(actor.key)]
    assert produce == [NewNames.KEY]
    assert scene.broker.scheduler.find(NewNames.KEY).weight == limits.NEW_NAMES_WEIGHT  # type: ignore[union-attr]


@staged
async def test_what_is_refused_outright_has_a_tenth_of_the_time(scene: Scene) -> None:
    rests = [scene.broker.session_manager.rest_ms(1_000_000) for _ in range(10)]
    assert rests[-1] == 10 * limits.REFUSALS_SHARE, "over all connections"


@staged
async def test_the_requests_of_a_lost_connection_are_withdrawn_a_few_at_a_time(scene: Scene) -> None:
    """A thousand at once took 6 ms, for which everybody else waited."""
    await scene.send(b"a")
    client = await scene.connect()
    asked = [begin(scan(client)) for _ in range(100)]
    await scene.sleep(0.1)
    before = requests_in_memory()
    session_manager = scene.broker.session_manager
    [session] = [each for each in session_manager._sessions if len(each.waiting) == 100]
    session.connection_lost(None)
    assert len(session_manager._orphans) == 100
    session_manager._withdraw_some()
    assert len(session_manager._orphans) == 100 - _WITHDRAWN_PER_TURN
    client.abort()
    del session, asked
    await scene.sleep(1)
    assert requests_in_memory() <= before - 100
