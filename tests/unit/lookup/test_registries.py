"""The registry of a meta server over the wire, where it differs from the others: the wire, and the server's restarts.

What all forms do is in tests/unit/registry/test_conformance.py, which runs on this one, too.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fairway.errors import Misuse, Refused, Unreachable
from fairway.lookup import registries
from fairway.lookup.registries import Inquirer, open_registry, parse_meta, parse_sqlite, parse_zookeeper
from fairway.meta.server import MetaOptions
from fairway.protocol.line import Answer, RequestOutcome
from fairway.protocol.messages import ControlMessage
from fairway.protocol.route_messages import Act, Register, Registered
from fairway.registry.port import SessionState
from fairway.registry.sqlite import SqliteRegistry
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.rng import RealRng
from fairway.serving.session_manager import SessionManagerOptions
from tests.support.client import Client
from tests.support.ports import free_port
from tests.unit.lookup.remote_form import connect, meta_server
from tests.unit.registry.forms import until

SESSION_MS = 1_000


def test_a_session_and_its_nodes_outlive_a_restart_of_the_meta_server(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        async with meta_server(tmp_path, port):
            registry = await connect(port, 10_000)
            states: list[SessionState] = []
            registry.on_session = states.append
            session = registry.session_id
            await registry.create("/members/me", b"1", is_ephemeral=True)
            changes: list[int] = []
            registry.watch("/members/me", lambda: changes.append(1))
            await until(lambda: bool(changes))
        await until(lambda: states == [SessionState.SUSPENDED])
        changes.clear()
        async with meta_server(tmp_path, port):
            await until(lambda: states == [SessionState.SUSPENDED, SessionState.OPEN])
            assert registry.session_id == session
            await until(lambda: bool(changes))  # after trouble all watches are called
            changes.clear()
            node = await registry.put("/members/me", b"2", 0)
            assert node.owner == session
            await until(lambda: bool(changes))
            await registry.close()

    asyncio.run(main())


def test_a_tree_watch_outlives_a_restart_of_the_meta_server(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        told: list[str] = []
        async with meta_server(tmp_path, port):
            registry = await connect(port, 10_000)
            registry.watch_tree("/s", told.append)
            await until(lambda: "/s" in told)
            await registry.create("/s/a")
            await until(lambda: "/s/a" in told)
        told.clear()
        async with meta_server(tmp_path, port) as server:
            await until(lambda: "/s" in told)
            await server._registry.create("/s/b")
            await until(lambda: "/s/b" in told or told.count("/s") > 1)
            await asyncio.sleep(1)  # it was told once more that anything may have changed, or was not
            told.clear()
            await asyncio.gather(*(server._registry.create(f"/s/{number}") for number in range(2_500)))
            await until(lambda: {f"/s/{number}" for number in range(2_500)} <= set(told))  # in more than one answer
            await registry.close()

    asyncio.run(main())


class ConfusedInquirer(Inquirer):
    """Gets an answer to another question, once for each act that waits for news."""

    confused: set[Act]

    async def outcome(self, message: ControlMessage, timeout_s: float) -> RequestOutcome:
        if isinstance(message, Register) and message.act in self.confused:
            self.confused.remove(message.act)
            return Answer(Register(Act.TOUCH, 0))
        return await super().outcome(message, timeout_s)


def test_an_answer_to_another_question_ends_no_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(registries, "Inquirer", ConfusedInquirer)
        ConfusedInquirer.confused = {Act.FEED, Act.WATCH, Act.TOUCH}
        async with meta_server(tmp_path) as server:
            registry = await connect(server.port)
            told: list[str] = []
            registry.watch_tree("/s", told.append)
            registry.watch("/t", lambda: told.append("/t"))
            await until(lambda: not ConfusedInquirer.confused)
            await until(lambda: {"/s", "/t"} <= set(told))
            told.clear()
            await server._registry.create("/s/a")
            await server._registry.create("/t")
            await until(lambda: {"/s/a", "/t"} <= set(told))
            await registry.close()

    asyncio.run(main())


def test_a_loop_that_dies_of_an_error_of_its_own_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> int:
        raise ZeroDivisionError

    async def main() -> None:
        said: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
        monkeypatch.setattr(registries.RemoteRegistry, "_poll", broken)
        async with meta_server(tmp_path) as server:
            registry = await connect(server.port)
            registry.watch_tree("/s", lambda _: None)
            await until(lambda: bool(said))
            assert said == ["fairway-remote-feed has ended: what changes in the registry is not noticed any more"]
            await registry.close()

    asyncio.run(main())


class OldOptions(MetaOptions):
    """Of a meta server that cannot say what has changed in a tree."""

    def feeding(self) -> SessionManagerOptions:
        return self.session_manager


def test_a_meta_server_without_a_feed_is_looked_at_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registries, "_NO_FEED_S", 0.05)

    async def main() -> None:
        told: list[str] = []
        states: list[SessionState] = []
        async with meta_server(tmp_path, options=OldOptions) as server:
            registry = await connect(server.port)
            registry.on_session = states.append
            registry.watch_tree("/s", told.append)
            await until(lambda: len(told) >= 3)
            assert set(told) == {"/s"}, "anything may have changed"
            assert states == [], "it is never asked what it does not know"
            await registry.close()

    asyncio.run(main())


def test_a_client_that_is_silent_loses_its_session_and_gets_another(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        async with meta_server(tmp_path, port):
            registry = await connect(port, SESSION_MS)
            states: list[SessionState] = []
            registry.on_session = states.append
            session = registry.session_id
            await registry.create("/members/me", is_ephemeral=True)
        await asyncio.sleep(SESSION_MS / 1_000)
        assert registry.certain_until_ns() < RealClock().monotonic_ns()
        other = Path(tmp_path / "another")  # a registry made anew knows nobody
        async with meta_server(other, port):
            await until(lambda: states[-2:] == [SessionState.OVER, SessionState.OPEN])
            assert registry.session_id not in {0, session}
            assert await registry.get("/members/me") is None
            await registry.close()

    asyncio.run(main())


def test_a_session_that_is_closed_leaves_no_question_behind(tmp_path: Path) -> None:
    """Who waits for news of a node is answered then: else the goodbye, and the meta server, would wait for it."""

    async def main() -> None:
        async with meta_server(tmp_path) as server:
            registry = await connect(server.port)
            changes: list[int] = []
            registry.watch("/members", lambda: changes.append(1))
            await until(lambda: bool(changes))
            await until(lambda: server.waiting.taken_bytes > 0)
            await registry.close()
            assert server.waiting.taken_bytes == 0
            assert len(server.session_manager) == 0

    asyncio.run(main())


def test_nothing_is_done_for_a_session_that_has_moved_to_another_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with meta_server(tmp_path) as server:
            net, clock = RealNet(), RealClock()
            first = await Client.connect(net, clock, "127.0.0.1", server.port)
            second = await Client.connect(net, clock, "127.0.0.1", server.port)
            opened, _ = await first.ask(Register(Act.OPEN, 0, number=10_000), Registered)
            session = opened.number
            made, _ = await first.ask(Register(Act.CREATE, session, "/a", b"1"), Registered)
            assert made.exists
            stranger, _ = await second.ask(Register(Act.PUT, session, "/a", b"2", number=1), Registered)
            assert stranger.trouble == "moved"
            await second.ask(Register(Act.TOUCH, session, value=opened.value), Registered)
            late, _ = await first.ask(Register(Act.PUT, session, "/a", b"2", number=1), Registered)
            assert late.trouble == "moved"
            node, _ = await second.ask(Register(Act.GET, session, "/a"), Registered)
            assert (node.value, node.version) == (b"1", 0)
            unknown, _ = await second.ask(Register(Act.GET, 77, "/a"), Registered)
            assert unknown.trouble == "over"
            with pytest.raises(Refused, match="the version that it expects"):
                await second.ask(Register(Act.PUT, session, "/a", b"2"), Registered)

    asyncio.run(main())


def test_where_there_is_no_meta_server_the_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registries, "FIRST_S", 0.3)
    with pytest.raises(Unreachable, match=r"no meta server at meta://127.0.0.1:\d+.*`fairway meta --registry"):
        asyncio.run(_open(f"meta://127.0.0.1:{free_port()}"))


async def _open(url: str) -> None:
    registry = await open_registry(url, RealNet(), RealClock(), RealRng())
    await registry.close()


def test_sqlite_directory_is_opened(tmp_path: Path) -> None:
    async def main() -> None:
        registry = await open_registry(f"sqlite:{tmp_path / 'new' / 'meta'}", RealNet(), RealClock(), RealRng())
        assert isinstance(registry, SqliteRegistry)
        assert registry.session_id != 0
        await registry.close()

    asyncio.run(main())
    assert parse_sqlite("sqlite:data/meta") == "data/meta"


def test_zookeeper_address_names_servers_and_a_root() -> None:
    assert parse_zookeeper("zookeeper://one:2181") == ("one:2181", "")
    assert parse_zookeeper("zookeeper://one:2181,10.0.0.2:2182,[::1]:2183/fw/eu") == (
        "one:2181,10.0.0.2:2182,[::1]:2183",
        "/fw/eu",
    )
    assert parse_zookeeper("zookeeper://one:2181/") == ("one:2181", "")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "write meta://HOST:PORT, zookeeper://"),
        ("redis://here", "write meta://HOST:PORT, zookeeper://"),
        ("sqlite:", "such as sqlite:data/meta"),
        ("sqlite://meta", "such as sqlite:data/meta"),
        ("zookeeper://", "bad server ''"),
        ("zookeeper://one", "bad server 'one'"),
        ("zookeeper://one:2181,", "bad server ''"),
        ("zookeeper://one:99999", "bad server 'one:99999'"),
        ("zookeeper://one:2181//x", "bad path"),
    ],
)
def test_bad_address_is_refused_with_the_remedy(url: str, sentence: str) -> None:
    with pytest.raises(Misuse, match=sentence):
        asyncio.run(_open(url))


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("meta://a", [("a", 20882)]),
        ("meta://a:1,b:2/", [("a", 1), ("b", 2)]),
        ("meta://[::1]:7,[::2]", [("::1", 7), ("::2", 20882)]),
    ],
)
def test_meta_servers_are_read_as_people_write_them(url: str, places: list[tuple[str, int]]) -> None:
    assert parse_meta(url) == tuple(places)


@pytest.mark.parametrize("url", ["meta://", "meta://:1", "meta://a:0", "meta://a:x", "meta://a:1,,b:1"])
def test_places_that_cannot_be_are_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(Misuse, match="meta://"):
        parse_meta(url)


def test_a_question_that_nobody_answers_ends_in_time() -> None:
    async def main() -> None:
        inquirer = Inquirer(RealNet(), RealClock(), RealRng(), [("127.0.0.1", free_port())])
        with pytest.raises(Unreachable, match="cannot connect"):
            await inquirer.ask(Register(Act.TOUCH, 1), Registered, 0.3)
        inquirer.abort()

    asyncio.run(main())
