"""The registry on a real ZooKeeper: connections that break or freeze, sessions that expire, answers that are lost."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import UnimplementedError

from fairway.errors import Misuse, Unreachable
from fairway.registry.kazoo_client import ZooKeeperConnection, translated
from fairway.registry.port import AnswerLost, SessionState
from fairway.registry.zookeeper import ARMING_MAX, ZooKeeperRegistry
from fairway.runtime.clock import RealClock
from tests.support import zookeeper
from tests.support.cable import Cable
from tests.support.ports import free_port
from tests.unit.registry.forms import until

pytestmark = pytest.mark.xdist_group("zookeeper")

SESSION_MS = 1_200  # of 400 to 4,000 that this server grants


class Scene:
    """One client behind a cable, one who watches it."""

    def __init__(self, cable: Cable, root: str) -> None:
        self.cable = cable
        self.states: list[SessionState] = []
        self._root = root
        self.clock = RealClock()

    async def open(self) -> None:
        server = zookeeper.shared().servers[0]
        self.other = await ZooKeeperRegistry.open(server.address, root=self._root)
        self.client = await ZooKeeperRegistry.open(
            f"127.0.0.1:{self.cable.port}", root=self._root, session_ms=SESSION_MS
        )
        self.client.on_session = self.states.append
        assert self.client.session_ms == SESSION_MS

    async def close(self) -> None:
        self.cable.mend()
        await asyncio.gather(self.client.close(), self.other.close())

    @property
    def is_certain(self) -> bool:
        return self.client.certain_until_ns() > self.clock.monotonic_ns()


@pytest.fixture
def play(request: pytest.FixtureRequest) -> Callable[[Callable[[Scene], Coroutine[Any, Any, None]]], None]:
    def play(story: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            with Cable(zookeeper.shared().servers[0].port) as cable:
                scene = Scene(cable, f"/tests/{request.node.name}")
                await scene.open()
                try:
                    await story(scene)
                finally:
                    await scene.close()

        asyncio.run(main())

    return play


Play = Callable[[Callable[[Scene], Coroutine[Any, Any, None]]], None]


def test_connection_that_breaks_ends_nothing_and_loses_no_watch(play: Play) -> None:
    async def story(scene: Scene) -> None:
        await scene.client.create("/m/client", is_ephemeral=True)
        session = scene.client.session_id
        calls: list[None] = []
        scene.client.watch("/x", lambda: calls.append(None))
        await until(lambda: bool(calls))
        scene.cable.cut()
        await until(lambda: scene.states == [SessionState.SUSPENDED])
        await scene.other.create("/x")
        calls.clear()
        scene.cable.mend()
        await until(lambda: scene.states == [SessionState.SUSPENDED, SessionState.OPEN])
        await until(lambda: bool(calls))
        assert await scene.client.get("/x") is not None
        assert scene.client.session_id == session
        assert await scene.other.get("/m/client", fresh=True) is not None
        calls.clear()
        await scene.other.put("/x", b"", 0)
        await until(lambda: bool(calls))
        await until(lambda: scene.is_certain)

    play(story)


def test_connection_that_breaks_leaves_no_gap_in_a_tree_watch(play: Play) -> None:
    async def story(scene: Scene) -> None:
        told: list[str] = []
        scene.client.watch_tree("/s", told.append)
        await until(lambda: "/s" in told)
        await scene.other.create("/s/a")
        await until(lambda: "/s/a" in told)
        scene.cable.cut()
        await until(lambda: scene.states == [SessionState.SUSPENDED])
        await scene.other.create("/s/b")
        told.clear()
        scene.cable.mend()
        await until(lambda: "/s" in told)
        assert await scene.client.children("/s") == ["a", "b"]
        await scene.other.put("/s/b", b"x", 0)
        await until(lambda: "/s/b" in told)

    play(story)


class _CountedConnection(ZooKeeperConnection):
    """Counts the requests that wait for an answer."""

    waiting = 0
    waiting_most = 0

    def ask(self, request: str, *args: Any, **options: Any) -> asyncio.Future[Any]:
        answer = super().ask(request, *args, **options)
        self.waiting += 1
        self.waiting_most = max(self.waiting_most, self.waiting)
        answer.add_done_callback(self._answered)
        return answer

    def _answered(self, _: object) -> None:
        self.waiting -= 1


class _CountingRegistry(ZooKeeperRegistry):
    line_class = _CountedConnection


def test_thousands_of_watches_leave_the_session_its_questions() -> None:
    """A question that waits behind all of them has no answer in time, and its connection is given up."""

    async def main() -> None:
        client = await _CountingRegistry.open(
            zookeeper.shared().hosts, root="/tests/thousands-of-watches", session_ms=4_000
        )
        try:
            states: list[SessionState] = []
            client.on_session = states.append
            called: set[int] = set()
            for number in range(4_000):
                client.watch(f"/w/{number}", partial(called.add, number))
            await until(lambda: len(called) == 4_000)
            assert isinstance(client._line, _CountedConnection)
            assert client._line.waiting_most <= ARMING_MAX
            assert states == []
            assert client.certain_until_ns() > RealClock().monotonic_ns()
        finally:
            await client.close()

    asyncio.run(main())


class _OldLine(ZooKeeperConnection):
    """To servers before 3.6."""

    def watch_tree(self, path: str) -> asyncio.Future[Any]:
        return self._refused(path)

    def read_many(self, paths: Sequence[str]) -> asyncio.Future[Any]:
        return self._refused(paths[0])

    def _refused(self, path: str) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_exception(translated(UnimplementedError(), path))
        return answer


class _OldRegistry(ZooKeeperRegistry):
    line_class = _OldLine


def test_servers_before_3_6_have_one_watch_per_node_instead() -> None:
    async def main() -> None:
        hosts = zookeeper.shared().hosts
        root = "/tests/old-servers"
        old = await _OldRegistry.open(hosts, root=root, session_ms=4_000)
        other = await ZooKeeperRegistry.open(hosts, root=root)
        try:
            await other.create("/s/a", b"1")
            told: list[str] = []
            old.watch_tree("/s", told.append)
            await until(lambda: {"/s", "/s/a"} <= set(told))
            told.clear()
            await other.put("/s/a", b"2", 0)
            await other.create("/s/b", b"3")
            await until(lambda: {"/s/a", "/s/b"} <= set(told))
            assert [node and node.value for node in await old.get_many(["/s/a", "/s/b", "/s/c"])] == [b"2", b"3", None]
            told.clear()
            await other.remove("/s/a")
            await until(lambda: "/s/a" in told)
        finally:
            await asyncio.gather(old.close(), other.close())

    asyncio.run(main())


def test_certainty_runs_out_before_others_see_the_session_end_and_another_follows(play: Play) -> None:
    async def story(scene: Scene) -> None:
        await scene.client.create("/m/client", is_ephemeral=True)
        session = scene.client.session_id
        calls: list[None] = []
        scene.client.watch("/x", lambda: calls.append(None))
        scene.cable.freeze()

        async def is_gone() -> bool:
            return await scene.other.get("/m/client", fresh=True) is None

        await until(is_gone)
        assert not scene.is_certain
        assert scene.client.session_id == session  # it cannot know
        scene.cable.mend()
        await until(lambda: scene.client.session_id not in (0, session))
        await until(lambda: scene.states[-2:] == [SessionState.OVER, SessionState.OPEN])
        made = await scene.client.create("/m/client", is_ephemeral=True)
        assert made.owner == scene.client.session_id
        await until(lambda: scene.is_certain)
        await asyncio.sleep(0.1)
        calls.clear()
        await scene.other.create("/x")
        await until(lambda: bool(calls))

    play(story)


def test_change_without_an_answer_is_lost_and_a_fresh_read_tells(play: Play) -> None:
    async def story(scene: Scene) -> None:
        await scene.client.create("/x", b"0")
        scene.cable.freeze()
        with pytest.raises(AnswerLost, match="/x"):
            await scene.client.put("/x", b"1", 0)
        scene.cable.cut()  # what was frozen never arrives
        scene.cable.mend()
        found = await scene.client.get("/x", fresh=True)
        assert found == await scene.other.get("/x", fresh=True)
        assert found is not None
        await scene.client.put("/x", b"2", found.version)

    play(story)


def test_frozen_connection_is_given_up_however_busy_its_client_is(play: Play) -> None:
    async def story(scene: Scene) -> None:
        scene.cable.freeze()

        async def ask() -> bool:
            asked = asyncio.ensure_future(scene.client.get("/x"))
            await asyncio.wait([asked], timeout=0.05)
            asked.cancel()
            return SessionState.SUSPENDED in scene.states

        await until(ask)

    play(story)


def test_session_that_is_ended_from_outside_is_followed_by_another(play: Play) -> None:
    async def story(scene: Scene) -> None:
        await scene.client.create("/m/client", is_ephemeral=True)
        session = scene.client.session_id
        await asyncio.get_running_loop().run_in_executor(None, _end_session, scene.client)
        await until(lambda: scene.client.session_id not in (0, session))
        await until(lambda: SessionState.OVER in scene.states)
        assert await scene.client.get("/m/client", fresh=True) is None

    play(story)


def _end_session(registry: ZooKeeperRegistry) -> None:
    """Whoever connects with its number and password may close it."""
    thief = KazooClient(zookeeper.shared().hosts, client_id=registry._line._client.client_id)
    thief.start()
    thief.stop()
    thief.close()


def test_client_of_kazoo_that_has_ended_is_replaced(play: Play) -> None:
    async def story(scene: Scene) -> None:
        session = scene.client.session_id
        calls: list[None] = []
        scene.client.watch("/x", lambda: calls.append(None))
        await asyncio.get_running_loop().run_in_executor(None, scene.client._line._client.stop)
        await until(lambda: scene.client.session_id not in (0, session))
        calls.clear()
        await scene.other.create("/x")
        await until(lambda: bool(calls))
        assert await scene.client.get("/x") is not None

    play(story)


def test_registry_that_is_cut_off_can_be_closed(play: Play) -> None:
    async def story(scene: Scene) -> None:
        scene.cable.cut()
        waiting = asyncio.ensure_future(scene.client.get("/x"))
        await asyncio.sleep(0.05)
        await scene.client.close()
        with pytest.raises(AnswerLost):
            await waiting

    play(story)


def test_session_too_short_is_the_callers_mistake() -> None:
    with pytest.raises(Misuse, match="session_ms=1"):
        asyncio.run(ZooKeeperRegistry.open("127.0.0.1:1", session_ms=1))


@pytest.mark.slow
def test_zookeeper_that_has_lost_its_data_lets_its_clients_in_again(tmp_path: Path) -> None:
    """It refuses whoever has seen more of it than it knows: they come as somebody new, after a while."""

    async def main(made: zookeeper.Ensemble) -> None:
        [server] = made.servers
        client = await ZooKeeperRegistry.open(server.address, root="/here", session_ms=SESSION_MS)
        states: list[SessionState] = []
        client.on_session = states.append
        session = client.session_id
        for number in range(50):
            await client.create(f"/before/{number}")
        calls: list[None] = []
        client.watch("/x", lambda: calls.append(None))
        server.kill()
        shutil.rmtree(tmp_path / "1/data/version-2")
        server.start()
        await asyncio.to_thread(server.await_serving)
        await until(lambda: client.session_id not in (0, session))
        assert [*dict.fromkeys(states)][:2] == [SessionState.SUSPENDED, SessionState.OVER]
        assert await client.children("/before") == []
        calls.clear()
        await client.create("/x", is_ephemeral=True)
        await until(lambda: bool(calls))
        await client.close()

    with zookeeper.ensemble(home=tmp_path) as made:
        asyncio.run(main(made))


def test_nobody_there_is_unreachable_and_names_the_address() -> None:
    port = free_port()
    with pytest.raises(Unreachable, match=f"no ZooKeeper answers at 127.0.0.1:{port}"):
        asyncio.run(ZooKeeperRegistry.open(f"127.0.0.1:{port}", open_s=0.3))
