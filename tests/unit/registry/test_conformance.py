"""What every form of the registry does: the same stories on virtual time, on SQLite and on a real ZooKeeper."""

from __future__ import annotations

import asyncio

import pytest

from fairway.errors import Misuse
from fairway.registry.port import (
    Exists,
    Missing,
    Node,
    NotAllowed,
    Registry,
    SessionOver,
    SessionState,
    VersionMismatch,
)
from fairway.registry.tree import VALUE_BYTES_MAX
from tests.unit.registry.forms import Form, Stage, until


async def gone(registry: Registry, path: str) -> bool:
    return await registry.get(path, fresh=True) is None


def test_node_is_made_with_those_above_it_read_changed_and_removed(form: Form) -> None:
    async def story(stage: Stage) -> None:
        registry = await stage.session()
        assert await registry.get("/a/b/c") is None
        assert await registry.children("/a") == []
        assert await registry.create("/a/b/c", b"one") == Node("/a/b/c", b"one", 0, 0)
        assert await registry.get("/a/b/c") == Node("/a/b/c", b"one", 0, 0)
        assert await registry.get("/a/b") == Node("/a/b", b"", 0, 0)
        await registry.create("/a/a")
        assert await registry.children("/a") == ["a", "b"]
        assert await registry.put("/a/b/c", b"two", 0) == Node("/a/b/c", b"two", 1, 0)
        assert await registry.get("/a/b/c", fresh=True) == Node("/a/b/c", b"two", 1, 0)
        await registry.remove("/a/b/c", 1)
        assert await registry.get("/a/b/c") is None
        assert await registry.children("/a/b") == []
        await registry.create("/a/b/c", b"anew")
        assert await registry.get("/a/b/c") == Node("/a/b/c", b"anew", 0, 0)

    form(story)


def test_what_does_not_fit_changes_nothing_and_names_the_node(form: Form) -> None:
    async def story(stage: Stage) -> None:
        registry = await stage.session()
        await registry.create("/g/one", b"x")
        with pytest.raises(Exists, match="/g/one"):
            await registry.create("/g/one", b"y")
        with pytest.raises(VersionMismatch, match="/g/one"):
            await registry.put("/g/one", b"y", 1)
        with pytest.raises(VersionMismatch, match="/g/one"):
            await registry.remove("/g/one", 7)
        with pytest.raises(Missing, match="/g/two"):
            await registry.put("/g/two", b"y", 0)
        with pytest.raises(Missing, match="/g/two"):
            await registry.remove("/g/two")
        with pytest.raises(NotAllowed, match="/g"):
            await registry.remove("/g")
        with pytest.raises(Exists):
            await registry.create("/")
        with pytest.raises(NotAllowed):
            await registry.remove("/")
        assert await registry.get("/g/one") == Node("/g/one", b"x", 0, 0)

    form(story)


@pytest.mark.parametrize("path", ["", "a", "/a/", "//a", "/a/../b", "/a/./b", "/a\n", "/\x00", "/" + "x" * 2_000])
def test_bad_path_is_the_callers_mistake(path: str) -> None:
    async def story(stage: Stage) -> None:
        registry = await stage.session()
        for call in (registry.get(path), registry.children(path), registry.create(path), registry.remove(path)):
            with pytest.raises(Misuse, match="bad path"):
                await call
        with pytest.raises(Misuse, match="bad path"):
            registry.watch(path, lambda: None)

    from tests.unit.registry.forms import simulated

    simulated(story)


def test_bad_values_and_versions_are_the_callers_mistake(form: Form) -> None:
    async def story(stage: Stage) -> None:
        registry = await stage.session()
        with pytest.raises(Misuse, match="at most"):
            await registry.create("/large", b"x" * (VALUE_BYTES_MAX + 1))
        await registry.create("/large", b"x" * VALUE_BYTES_MAX)
        with pytest.raises(Misuse, match="versions begin with 0"):
            await registry.put("/large", b"", -1)
        with pytest.raises(Misuse, match="versions begin with 0"):
            await registry.remove("/large", -1)
        with pytest.raises(Misuse, match="bad path"):
            await registry.get("large")

    form(story)


def test_of_many_who_change_the_same_version_one_does(form: Form) -> None:
    async def story(stage: Stage) -> None:
        registries = [await stage.session() for _ in range(3)]
        await registries[0].create("/node", b"")

        async def change(registry: Registry, word: bytes) -> Node | VersionMismatch:
            try:
                return await registry.put("/node", word, 0)
            except VersionMismatch as error:
                return error

        outcomes = await asyncio.gather(*(change(each, b"%d" % n) for n, each in enumerate(registries * 3)))
        won = [each for each in outcomes if isinstance(each, Node)]
        assert len(won) == 1
        for registry in registries:
            assert await registry.get("/node", fresh=True) == won[0]

    form(story)


def test_numbered_nodes_have_growing_numbers_of_ten_digits(form: Form) -> None:
    async def story(stage: Stage) -> None:
        first, second = await stage.session(), await stage.session()
        made = [await each.create("/line/n-", b"", is_numbered=True) for each in (first, second, first, second)]
        await first.remove(made[3].path)
        made.append(await second.create("/line/n-", is_numbered=True, is_ephemeral=True))
        names = [node.path.removeprefix("/line/") for node in made]
        assert names == sorted(set(names))
        assert all(name.startswith("n-") and len(name) == 12 and name[2:].isdigit() for name in names)
        assert made[4].owner == second.session_id
        assert await first.get(made[4].path, fresh=True) == made[4]

    form(story)


def test_ephemeral_nodes_go_with_their_session_and_have_nothing_below(form: Form) -> None:
    async def story(stage: Stage) -> None:
        stays, goes = await stage.session(), await stage.session()
        made = await goes.create("/members/goes", b"here", is_ephemeral=True)
        assert made.owner == goes.session_id != 0
        await stays.create("/members/stays", is_ephemeral=True)
        with pytest.raises(NotAllowed, match="/members/goes"):
            await stays.create("/members/goes/child")
        with pytest.raises(NotAllowed, match="/members/goes"):
            await stays.create("/members/goes/child/of/child")
        changed = await stays.put("/members/goes", b"still here", 0)
        assert changed.owner == made.owner
        await goes.close()
        await until(lambda: gone(stays, "/members/goes"))
        assert await stays.children("/members") == ["stays"]
        assert goes.session_id == 0
        with pytest.raises(SessionOver):
            await goes.get("/members")
        await goes.close()

    form(story)


def test_watch_is_called_after_every_kind_of_change_by_anybody(form: Form) -> None:
    async def story(stage: Stage) -> None:
        watcher, other = await stage.session(), await stage.session()
        seen: list[tuple[bytes | None, list[str]]] = []

        async def look() -> None:
            node = await watcher.get("/w")
            seen.append((None if node is None else node.value, await watcher.children("/w")))

        tasks: list[asyncio.Task[None]] = []
        watch = watcher.watch("/w", lambda: tasks.append(asyncio.ensure_future(look())))
        for change, expected in (
            (other.create("/w", b"1"), (b"1", [])),
            (other.put("/w", b"2", 0), (b"2", [])),
            (watcher.put("/w", b"3", 1), (b"3", [])),
            (other.create("/w/child"), (b"3", ["child"])),
            (other.remove("/w/child"), (b"3", [])),
            (other.remove("/w"), (None, [])),
            (other.create("/w", b"4"), (b"4", [])),
        ):
            await change
            await until(lambda expected=expected: bool(seen) and seen[-1] == expected)
        watch.cancel()
        await asyncio.gather(*tasks)
        count = len(tasks)
        await other.put("/w", b"5", 0)
        await other.put("/w", b"6", 1)
        assert await watcher.get("/w", fresh=True) == Node("/w", b"6", 2, 0)
        assert len(tasks) == count

    form(story)


def test_watch_of_members_is_called_when_a_session_goes(form: Form) -> None:
    async def story(stage: Stage) -> None:
        watcher, member = await stage.session(), await stage.session()
        await member.create("/members/m", is_ephemeral=True)
        calls: list[None] = []
        lists: list[list[str]] = []
        watcher.watch("/members", lambda: calls.append(None))
        await member.close()

        async def is_empty() -> bool:
            if calls:
                calls.clear()
                lists.append(await watcher.children("/members"))
            return bool(lists) and lists[-1] == []

        await until(is_empty)

    form(story)


def test_two_watches_of_one_node_are_both_called_and_cancelled_alone(form: Form) -> None:
    async def story(stage: Stage) -> None:
        registry = await stage.session()
        calls: list[str] = []
        first = registry.watch("/w", lambda: calls.append("first"))
        registry.watch("/w", lambda: calls.append("second"))
        await registry.create("/w")
        await until(lambda: {"first", "second"} <= set(calls))
        await asyncio.sleep(0.2)
        first.cancel()
        calls.clear()
        await registry.put("/w", b"", 0)
        await until(lambda: bool(calls))
        assert set(calls) == {"second"}

    form(story)


def test_session_is_certain_while_all_is_well_and_no_more_once_it_is_closed(form: Form) -> None:
    from fairway.runtime.clock import RealClock

    async def story(stage: Stage) -> None:
        registry = await stage.session()
        states: list[SessionState] = []
        registry.on_session = states.append
        loop = asyncio.get_running_loop()
        now_ns = getattr(loop, "now_ns", RealClock().monotonic_ns)
        begun = loop.time()
        while loop.time() < begun + 0.7:
            assert registry.certain_until_ns() > now_ns()
            await asyncio.sleep(0.05)
        await registry.close()
        assert registry.certain_until_ns() < now_ns()
        assert states == []

    form(story)


def test_many_nodes_are_read_in_order_and_missing_ones_are_none(form: Form) -> None:
    async def story(stage: Stage) -> None:
        registry = await stage.session()
        assert await registry.get_many([]) == []
        for number in range(250):
            await registry.create(f"/n/{number}", b"" if number % 2 else f"{number}".encode())
        await registry.put("/n/4", b"changed", 0)
        paths = [f"/n/{number}" for number in range(251)]
        found = await registry.get_many(paths)
        assert found[4] == Node("/n/4", b"changed", 1, 0)
        assert found[250] is None
        assert found[:4] == [Node(f"/n/{at}", b"" if at % 2 else f"{at}".encode(), 0, 0) for at in range(4)]
        assert [node.path for node in found[:250] if node is not None] == paths[:250]

    form(story)


def test_tree_watch_names_what_was_made_changed_or_removed_below_by_anybody(form: Form) -> None:
    async def story(stage: Stage) -> None:
        mine, other = await stage.session(), await stage.session()
        told: list[str] = []
        watch = mine.watch_tree("/t/subjects", told.append)
        await until(lambda: "/t/subjects" in told)  # it begins: anything may have changed before
        told.clear()
        await other.create("/t/subjects/a", b"1")
        await until(lambda: "/t/subjects/a" in told)
        told.clear()
        await other.put("/t/subjects/a", b"2", 0)
        await mine.create("/t/subjects/b/deep")
        await until(lambda: {"/t/subjects/a", "/t/subjects/b", "/t/subjects/b/deep"} <= set(told))
        told.clear()
        await other.remove("/t/subjects/a")
        await until(lambda: "/t/subjects/a" in told)
        assert await mine.get("/t/subjects/a") is None, "whoever reads when told sees it"
        told.clear()
        await other.create("/t/subjects-of-others")
        await other.create("/t/elsewhere/a")
        await other.create("/t/subjects/c")
        await until(lambda: "/t/subjects/c" in told)
        assert set(told) == {"/t/subjects/c"}
        watch.cancel()
        await other.create("/t/subjects/d")
        await asyncio.sleep(0.2)
        assert "/t/subjects/d" not in told

    form(story)


def test_tree_watch_is_told_of_a_thousand_changes(form: Form) -> None:
    async def story(stage: Stage) -> None:
        mine, other = await stage.session(), await stage.session()
        told: set[str] = set()
        mine.watch_tree("/many", told.add)
        await until(lambda: "/many" in told)
        paths = {f"/many/{number}" for number in range(1_000)}
        for path in sorted(paths):
            await other.create(path)
        await until(lambda: paths <= told)

    form(story)
