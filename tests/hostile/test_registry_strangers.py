"""A stranger at a meta server, with nothing but sound requests: the registry says what copies say, and nothing else."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fairway import limits
from fairway.errors import Code, Refused
from fairway.lookup.registries import RemoteRegistry
from fairway.meta.server import MetaServer
from fairway.protocol.messages import ControlMessage
from fairway.protocol.route_messages import Act, ClientRole, Govern, Governed, Register, Registered, Route, RouteChange
from fairway.registry import layout
from fairway.registry.layout import GroupRecord, RegisteredCopy
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.serving.requests import ServedRequest
from tests.support.client import Client
from tests.unit.lookup.remote_form import connect, meta_server
from tests.unit.registry.forms import until

GROUP = "east"
MASTER, REPLICA, STRANGER = "00000000000000a1", "00000000000000b2", "000000000000bad0"


def member(directory: str, port: int = 7, **more: Any) -> bytes:
    return layout.pack(RegisteredCopy(directory, "127.0.0.1", port, **more))


@dataclass
class Scene:
    """A group of two copies, each with its session, and a stranger with a session of its own."""

    server: MetaServer
    master: RemoteRegistry
    replica: RemoteRegistry
    stranger: Client
    session: int = 0
    secret: bytes = b""

    async def ask(self, act: Act, path: str = "", value: bytes = b"", **more: Any) -> Registered:
        """What the stranger asks."""
        return await self.ask_as(self.session, act, path, value, **more)

    async def ask_as(self, session: int, act: Act, path: str = "", value: bytes = b"", **more: Any) -> Registered:
        return (await self.stranger.ask(Register(act, session, path, value, **more), Registered))[0]

    async def govern(self, message: ControlMessage) -> str:
        return (await self.stranger.ask(message, Governed))[0].sentence

    def place(self, directory: str, session: int = 0) -> str:
        return layout.member_path(GROUP, layout.place_name(directory, session or self.session))

    async def register(self, directory: str) -> Registered:
        """Properly, as a copy does."""
        return await self.ask(Act.CREATE, self.place(directory), member(directory), is_ephemeral=True)

    async def record(self) -> tuple[GroupRecord, int]:
        node = await self.master.get(layout.group_path(GROUP))
        assert node is not None
        return layout.unpack(GroupRecord, node.path, node.value), node.version

    async def put_record(self, **changed: Any) -> Registered:
        before, version = await self.record()
        after = layout.pack(msgspec.structs.replace(before, **changed))
        return await self.ask(Act.PUT, layout.group_path(GROUP), after, number=version + 1)


Story = Callable[[Scene], Awaitable[None]]


def play(directory: Path, story: Story) -> None:
    async def main() -> None:
        async with meta_server(directory, is_guarded=True) as server:
            master, replica = await connect(server.port, 10_000), await connect(server.port, 10_000)
            for registry, each in ((master, MASTER), (replica, REPLICA)):
                path = layout.member_path(GROUP, layout.place_name(each, registry.session_id))
                await registry.create(path, member(each), is_ephemeral=True)
            founded = GroupRecord("broker", 3, MASTER, [MASTER], 2, 11, 12, members=[MASTER])
            group = layout.group_path(GROUP)
            node = await master.put(group, layout.pack(founded), 0)
            whole = msgspec.structs.replace(founded, in_sync=[MASTER, REPLICA], members=[MASTER, REPLICA])
            await master.put(group, layout.pack(whole), node.version)
            stranger = await Client.connect(RealNet(), RealClock(), "127.0.0.1", server.port)
            scene = Scene(server, master, replica, stranger)
            opened = await scene.ask(Act.OPEN, number=10_000)
            scene.session, scene.secret = opened.number, opened.value
            before = await scene.record()
            await story(scene)
            assert (await scene.record())[0] == before[0], "nothing of it came to be"
            stranger.abort()
            await master.close()
            await replica.close()

    asyncio.run(main())


async def refused(asked: Awaitable[object], words: str) -> Refused:
    with pytest.raises(Refused, match=words) as caught:
        await asked
    return caught.value


def test_only_what_is_in_the_table_may_be_written(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        words = "is nothing that a copy or a career does"
        for path in (
            "/fairway",
            "/elsewhere",
            "/private/session-key",
            "/fairway/metas/evil:1",
            layout.subject_path("orders"),
            layout.members_path(GROUP),
            layout.member_path(GROUP, "x"),
            layout.member_path(GROUP, MASTER),
            f"{layout.group_path(GROUP)}/more",
            "/fairway/careers/billing/word-n_",
        ):
            for act in (Act.CREATE, Act.PUT, Act.REMOVE):
                await refused(scene.ask(act, path, b"{}", number=1), words)
        for act in (Act.CREATE, Act.PUT):
            await refused(scene.ask(act, layout.group_path(GROUP), b"{}", number=1, is_ephemeral=True), words)
        await refused(scene.ask(Act.REMOVE, layout.group_path(GROUP)), words)
        await refused(scene.ask(Act.CREATE, scene.place(STRANGER), member(STRANGER)), words)
        await refused(scene.ask(Act.CREATE, "no path"), "bad path")

    play(tmp_path, story)


def test_only_what_is_fairways_may_be_read(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        for act in (Act.GET, Act.CHILDREN, Act.WATCH, Act.FEED):
            for path in ("/private/session-key", "/private", "/"):
                await refused(scene.ask(act, path), "only what is below /fairway may be read")
            assert (await scene.ask(act, "/fairway")).trouble == ""

    play(tmp_path, story)


def test_a_session_is_its_openers_alone(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        node = await scene.ask(Act.GET, scene.place(MASTER, scene.master.session_id))
        assert node.owner == scene.master.session_id, "anybody may see whose it is"
        for secret in (b"", scene.secret, b"x" * 16):
            await refused(scene.ask_as(node.owner, Act.TOUCH, value=secret), "was opened by somebody else")
        for act in (Act.CLOSE, Act.GET, Act.REMOVE, Act.WATCH):
            assert (await scene.ask_as(node.owner, act, node.path)).trouble == "moved"
        assert scene.master.session_id == node.owner
        assert (await scene.master.get(node.path)) is not None

    play(tmp_path, story)


def test_a_secret_holds_after_a_restart_and_nothing_is_done_without_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with meta_server(tmp_path, is_guarded=True) as server:
            client = await Client.connect(RealNet(), RealClock(), "127.0.0.1", server.port)
            opened, _ = await client.ask(Register(Act.OPEN, 0, number=60_000), Registered)
            client.abort()
        async with meta_server(tmp_path, is_guarded=True) as server:
            client = await Client.connect(RealNet(), RealClock(), "127.0.0.1", server.port)
            session = opened.number
            told, _ = await client.ask(Register(Act.GET, session, "/fairway"), Registered)
            assert told.trouble == "moved"
            with pytest.raises(Refused, match="show its secret"):
                await client.ask(Register(Act.TOUCH, session), Registered)
            told, _ = await client.ask(Register(Act.TOUCH, session, value=opened.value), Registered)
            assert told.trouble == ""
            client.abort()

    asyncio.run(main())


def test_a_copys_node_is_its_own(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        theirs = scene.place(MASTER, scene.master.session_id)
        await refused(scene.ask(Act.PUT, theirs, member(MASTER, 666), number=1), "belongs to another session")
        for number in (0, 1):
            await refused(scene.ask(Act.REMOVE, theirs, number=number), "whose connection is open")
        own = member(REPLICA, verifier=b"v" * 32)  # of a secret that the stranger knows
        its = scene.place(REPLICA, scene.replica.session_id)
        await refused(scene.ask(Act.PUT, its, own, number=1), "belongs to another session")
        await refused(
            scene.ask(Act.CREATE, scene.place(REPLICA), own, is_ephemeral=True), "is registered in group east"
        )
        again = scene.ask(Act.CREATE, scene.place(MASTER), member(MASTER, role="master"), is_ephemeral=True)
        assert (await refused(again, "is registered in group east already")).code is Code.BUSY
        forged = layout.member_path(GROUP, layout.place_name(STRANGER, scene.master.session_id))
        await refused(scene.ask(Act.CREATE, forged, member(STRANGER), is_ephemeral=True), "names another session")
        node = await scene.master.get(theirs)
        assert node is not None
        assert node.value == member(MASTER)

    play(tmp_path, story)


def test_the_node_of_a_process_that_is_gone_makes_room_at_once(tmp_path: Path) -> None:
    """A copy that is started again removes what its life before has left, as soon as that one's connection is gone."""

    async def story(scene: Scene) -> None:
        gone = await Client.connect(RealNet(), RealClock(), "127.0.0.1", scene.server.port)
        opened, _ = await gone.ask(Register(Act.OPEN, 0, number=60_000), Registered)
        path = scene.place(STRANGER, opened.number)
        await gone.ask(Register(Act.CREATE, opened.number, path, member(STRANGER), is_ephemeral=True), Registered)
        await refused(scene.ask(Act.REMOVE, path), "whose connection is open")
        gone.abort()

        async def removed() -> bool:
            try:
                await scene.ask(Act.REMOVE, path)
            except Refused:
                return False
            return True

        await until(removed)
        assert (await scene.register(STRANGER)).exists

    play(tmp_path, story)


def test_a_member_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        path = scene.place(STRANGER)
        for value, words in (
            (b"{}", "cannot be read"),
            (b"[" * 60_000, "cannot be read"),
            (member(MASTER), "is of another directory"),
            (member(STRANGER, 0), "cannot be"),
            (member(STRANGER, 65_536), "cannot be"),
            (layout.pack(RegisteredCopy(STRANGER, "", 1)), "cannot be"),
            (layout.pack(RegisteredCopy(STRANGER, "h" * 300, 1)), "cannot be"),
            (member(STRANGER, kind="queen"), "cannot be"),
            (member(STRANGER, kind="delay"), "group east is of kind broker"),
        ):
            await refused(scene.ask(Act.CREATE, path, value, is_ephemeral=True), words)
        large = b" " * (limits.REGISTRY_RECORD_BYTES_MAX + 1)
        assert (await refused(scene.ask(Act.CREATE, path, large, is_ephemeral=True), "at most")).code is Code.TOO_LARGE
        assert await scene.master.children(layout.members_path(GROUP)) == sorted(
            layout.place_name(each, registry.session_id)
            for each, registry in ((MASTER, scene.master), (REPLICA, scene.replica))
        )

    play(tmp_path, story)


def test_whoever_has_no_copy_in_a_group_does_not_touch_its_record(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        words = "this session has no copy in group"
        await refused(scene.put_record(epoch=4, master=STRANGER, in_sync=[STRANGER]), words)
        await refused(scene.put_record(), words)  # what it says already: the master's next change would find it stale
        west = layout.pack(GroupRecord("broker", 1, STRANGER, [STRANGER], members=[STRANGER]))
        await refused(scene.ask(Act.CREATE, layout.group_path("west"), west), "is nothing that a copy or a career does")
        assert await scene.master.children(layout.GROUPS) == [GROUP]

    play(tmp_path, story)


def test_a_registered_stranger_can_only_do_what_copies_do(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.register(STRANGER)
        both, three = [MASTER, REPLICA], [MASTER, REPLICA, STRANGER]
        for changed, words in (
            ({"in_sync": [*both, STRANGER], "members": three}, "only its master, 00000000000000a1"),
            ({"in_sync": [MASTER]}, "only its master"),
            ({"master": STRANGER, "in_sync": [STRANGER], "members": three}, "a new master has a new epoch"),
            (
                {"epoch": 4, "master": STRANGER, "in_sync": [STRANGER], "members": three},
                "00000000000000a1 leads, and is registered: `fairway broker promote`",
            ),
            ({"epoch": 4, "master": REPLICA, "in_sync": [REPLICA]}, "this session has not registered"),
            ({"epoch": 2}, "epoch 2 goes back behind 3"),
            ({"epoch": 3 + limits.EPOCH_LEAP_MAX + 1}, "too far beyond 3"),
            ({"epoch": 1 << 63}, "epoch 9223372036854775808 in the record"),
            ({"epoch": 0}, "epoch 0 in the record"),
            ({"members": [MASTER], "in_sync": [MASTER]}, "copies are forgotten by command only"),
            ({"members": three}, "only its master"),
            ({"min_in_sync": 0}, "min_in_sync 0"),
            ({"min_in_sync": 1}, "only its master"),
            ({"kind": "delay"}, "stay as they are"),
            ({"messages_id": 99}, "stay as they are"),
            ({"is_draining": True}, "stay as they are"),
            ({"is_closed": True}, "stay as they are"),
            ({"master": "evil", "in_sync": ["evil"]}, "no directory id"),
            ({"in_sync": [REPLICA]}, "a master that is not in sync"),
            ({"in_sync": [*both, REPLICA]}, "named twice"),
            ({"members": [f"{each:016x}" for each in range(limits.GROUP_COPIES_MAX + 1)]}, "257 copies"),
        ):
            await refused(scene.put_record(**changed), words)
        for value, words in ((b"", "cannot be read"), (b"{}", "cannot be read"), (b"\xff", "cannot be read")):
            _, version = await scene.record()
            put = scene.ask(Act.PUT, layout.group_path(GROUP), value, number=version + 1)
            await refused(put, words)
        assert (await scene.put_record()).exists, "what it says already: so a copy fences a change of unknown outcome"

    play(tmp_path, story)


def test_a_master_brings_in_registered_copies_only(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        record, version = await scene.record()
        path = layout.group_path(GROUP)
        with_stranger = {"in_sync": [*record.in_sync, STRANGER], "members": [*record.members, STRANGER]}
        wrong = layout.pack(msgspec.structs.replace(record, **with_stranger))
        await refused(scene.master.put(path, wrong, version), "000000000000bad0 is not registered")
        named = layout.pack(msgspec.structs.replace(record, members=[*record.members, STRANGER]))
        await refused(scene.master.put(path, named, version), "is named as a copy and is not in sync")
        alone = msgspec.structs.replace(record, in_sync=[MASTER])
        node = await scene.master.put(path, layout.pack(alone), version)
        node = await scene.master.put(path, layout.pack(record), node.version)
        await scene.register(STRANGER)
        node = await scene.master.put(path, wrong, node.version)
        await scene.master.put(path, layout.pack(msgspec.structs.replace(record, **with_stranger)), node.version)
        await refused(scene.put_record(in_sync=[MASTER]), "only its master")
        back = msgspec.structs.replace(record, members=[*record.members, STRANGER])
        node = await scene.master.put(path, layout.pack(back), node.version + 1)
        hand = scene.server._registry
        await hand.put(path, layout.pack(record), node.version)

    play(tmp_path, story)


def test_a_copy_takes_over_when_its_master_is_gone_and_not_before(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        record, version = await scene.record()
        path = layout.group_path(GROUP)
        taken = msgspec.structs.replace(record, epoch=4, master=REPLICA, in_sync=[REPLICA])
        await refused(scene.replica.put(path, layout.pack(taken), version), "leads, and is registered")
        await scene.master.remove(scene.place(MASTER, scene.master.session_id))
        wider = msgspec.structs.replace(taken, in_sync=[REPLICA, STRANGER])
        await refused(scene.replica.put(path, layout.pack(wider), version), "adds nobody to the in-sync set")
        await scene.register(STRANGER)
        outsider = {"epoch": 4, "master": STRANGER, "in_sync": [STRANGER], "members": [*record.members, STRANGER]}
        await refused(scene.put_record(**outsider), "was not in sync")
        node = await scene.replica.put(path, layout.pack(taken), version)
        hand = scene.server._registry
        await hand.put(path, layout.pack(record), node.version)

    play(tmp_path, story)


def test_another_master_is_named_by_an_operators_decision(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        record, _ = await scene.record()
        await refused(scene.govern(Govern(RouteChange.PROMOTE, GROUP, [STRANGER])), "does not live")
        await refused(scene.govern(Govern(RouteChange.PROMOTE, GROUP, [MASTER, REPLICA])), "one leads")
        told = await scene.govern(Govern(RouteChange.PROMOTE, GROUP))
        assert told == f"{REPLICA} leads group {GROUP} from now on, under epoch 4 or a later one"
        after, version = await scene.record()
        assert (after.master, after.epoch) == (REPLICA, 4)
        await scene.server._registry.put(layout.group_path(GROUP), layout.pack(record), version)

    play(tmp_path, story)


def test_every_kind_of_node_has_a_bound_and_the_sentence_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SESSION_NODES_MAX", 3)
    monkeypatch.setattr(limits, "SERVER_GROUPS_MAX", 2)
    monkeypatch.setattr(limits, "GROUP_COPIES_MAX", 4)
    monkeypatch.setattr(limits, "CAREERS_MAX", 1)
    monkeypatch.setattr(limits, "CANDIDATES_MAX", 1)

    async def join(scene: Scene, group: str, directory: int) -> Registered:
        name = f"{directory:016x}"
        path = layout.member_path(group, layout.place_name(name, scene.session))
        return await scene.ask(Act.CREATE, path, member(name), is_ephemeral=True)

    async def stand(scene: Scene, career: str, word: str) -> Registered:
        path = f"/fairway/careers/{career}/{word * 24}-n_"
        return await scene.ask(Act.CREATE, path, is_ephemeral=True, is_numbered=True)

    async def story(scene: Scene) -> None:
        assert (await join(scene, GROUP, 1)).exists
        assert (await join(scene, GROUP, 2)).exists
        assert (await refused(join(scene, GROUP, 3), "group east has 4 registered copies")).code is Code.TOO_LARGE
        made = await join(scene, "west", 3)
        await refused(join(scene, "west", 4), "this session has 3 nodes")
        await refused(stand(scene, "billing", "a"), "this session has 3 nodes")
        await scene.ask(Act.REMOVE, made.path)
        await refused(join(scene, "north", 3), "this registry has 2 groups of servers.*decommission GROUP")
        assert "is forgotten" in await scene.govern(Govern(RouteChange.DECOMMISSION, "west"))
        made = await join(scene, "north", 3)
        await scene.ask(Act.REMOVE, made.path)
        candidate = await stand(scene, "billing", "a")
        await scene.ask(Act.REMOVE, candidate.path)
        await refused(stand(scene, "payments", "a"), "this registry has 1 careers")
        await stand(scene, "billing", "b")
        await refused(stand(scene, "billing", "c"), "this session has 3 nodes")

    play(tmp_path, story)


def test_a_candidate_is_removed_by_its_own_session(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        path = f"/fairway/careers/billing/{'a' * 24}-n_"
        node = await scene.master.create(path, is_ephemeral=True, is_numbered=True)
        await refused(scene.ask(Act.REMOVE, node.path), "belongs to another session")
        await refused(scene.ask(Act.CREATE, path, b"x", is_ephemeral=True, is_numbered=True), "at most 0")
        await scene.master.remove(node.path)

    play(tmp_path, story)


def requests_in_memory() -> int:
    return sum(isinstance(each, ServedRequest) for each in gc.get_objects())


def test_questions_that_wait_are_forgotten_with_their_connection(tmp_path: Path) -> None:
    """Otherwise whoever hangs up and comes again fills the memory: 11 MB for each connection."""

    async def story(scene: Scene) -> None:
        before = requests_in_memory()
        questions: list[ControlMessage] = [Route(asker, ["orders"], 1_000_000, 60_000) for asker in ClientRole]
        seen = await scene.ask(Act.WATCH, layout.group_path(GROUP))
        questions.append(Register(Act.WATCH, scene.session, seen.path, number=seen.number, wait_ms=60_000))
        for question in questions:
            asking = asyncio.ensure_future(scene.stranger.ask(question, ControlMessage))
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        await until(lambda: requests_in_memory() >= before + len(questions))
        scene.stranger.abort()
        await until(lambda: requests_in_memory() <= before)

    play(tmp_path, story)


def test_questions_that_wait_leave_room_for_what_is_urgent(tmp_path: Path) -> None:
    """A session is kept alive, and a route is told, although news is waited for with all the room that there is."""

    async def story(scene: Scene) -> None:
        room = scene.server.waiting
        room.bytes_max = 8 * limits.MIB
        asked = []
        strangers = [await Client.connect(RealNet(), RealClock(), "127.0.0.1", scene.server.port) for _ in range(6)]
        for stranger in strangers:
            opened, _ = await stranger.ask(Register(Act.OPEN, 0, number=10_000), Registered)
            first = Register(Act.WATCH, opened.number, layout.group_path(GROUP))
            seen, _ = await stranger.ask(first, Registered)
            question = msgspec.structs.replace(first, value=b"x" * 6_000, number=seen.number, wait_ms=60_000)
            # 33 find room at most. The server takes 50 ms for each of the others, so more would only take longer.
            asked += [asyncio.ensure_future(stranger.ask(question, Registered)) for _ in range(40)]
            await refused(asyncio.wait_for(asked[-1], 10), "too many bytes wait")
        assert room.bytes_max - room.taken_bytes >= room.bytes_max // 8
        for stranger in strangers:
            stranger.abort()
        await asyncio.gather(*asked, return_exceptions=True)

    play(tmp_path, story)
