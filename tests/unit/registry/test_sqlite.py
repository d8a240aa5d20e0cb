"""The registry in SQLite: who owns it, what a restart keeps, and the sessions that are lent."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from fairway.errors import DirectoryLocked, DiskFull, Misuse, StorageFault, WrongDirectory
from fairway.registry.port import Node, SessionOver, SessionState
from fairway.registry.sqlite import FILE_NAME, SqliteRegistry
from fairway.runtime.clock import ManualClock
from tests.unit.registry.forms import until


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def test_second_owner_is_refused_with_a_clear_sentence_and_the_directory_is_free_afterwards(tmp_path: Path) -> None:
    async def main() -> None:
        first = await SqliteRegistry.open(str(tmp_path))
        with pytest.raises(DirectoryLocked, match=r"process \d+ is using it; stop it or choose another directory"):
            await SqliteRegistry.open(str(tmp_path))
        assert await first.get("/") is not None
        await first.close()
        second = await SqliteRegistry.open(str(tmp_path))
        await second.close()

    run(main)


def test_restart_keeps_nodes_versions_and_numbers(tmp_path: Path) -> None:
    async def main() -> None:
        registry = await SqliteRegistry.open(str(tmp_path))
        await registry.create("/g/one", b"1")
        await registry.put("/g/one", b"2", 0)
        made = [await registry.create("/line/n-", is_numbered=True) for _ in range(3)]
        await registry.remove(made[-1].path)
        await registry.close()
        registry = await SqliteRegistry.open(str(tmp_path))
        assert await registry.get("/g/one") == Node("/g/one", b"2", 1, 0)
        assert await registry.children("/line") == ["n-0000000000", "n-0000000001"]
        assert (await registry.create("/line/n-", is_numbered=True)).path == "/line/n-0000000003"
        await registry.close()

    run(main)


def test_kill_leaves_what_was_answered_and_the_next_life_removes_what_went_with_the_process(tmp_path: Path) -> None:
    async def main() -> None:
        registry = await SqliteRegistry.open(str(tmp_path))
        await registry.create("/stays", b"x")
        await registry.create("/metas/me", is_ephemeral=True)
        lent = await registry.open_session(60_000)
        await lent.create("/members/other", is_ephemeral=True)
        await registry._keeper.file.run(lambda: None)
        registry._looking.cancel()
        registry._keeper.close()  # as a kill: the session is not ended
        again = await SqliteRegistry.open(str(tmp_path))
        assert await again.get("/stays") == Node("/stays", b"x", 0, 0)
        assert await again.get("/metas/me") is None
        assert await again.get("/members/other") is not None
        resumed = again.session(lent.session_id)
        assert resumed.session_id == lent.session_id
        await resumed.close()
        assert await again.get("/members/other") is None
        with pytest.raises(SessionOver):
            again.session(lent.session_id)
        await again.close()

    run(main)


def test_lent_session_that_is_not_touched_is_over_and_one_that_is_lives(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock()
        registry = await SqliteRegistry.open(str(tmp_path), clock=clock)
        silent, busy = await registry.open_session(2_000), await registry.open_session(2_000)
        states: list[SessionState] = []
        calls: list[None] = []
        silent.on_session = states.append
        registry.watch("/members", lambda: calls.append(None))
        await silent.create("/members/silent", is_ephemeral=True)
        await busy.create("/members/busy", is_ephemeral=True)
        calls.clear()
        certain_ns = silent.certain_until_ns()
        assert certain_ns == clock.monotonic_ns() + 2_000_000_000
        for _ in range(5):
            clock.advance(500)
            busy.touch()
            await asyncio.sleep(0.15)
        await until(lambda: silent.session_id == 0)
        assert clock.monotonic_ns() >= certain_ns
        assert silent.certain_until_ns() == 0
        assert states == [SessionState.OVER]
        await until(lambda: bool(calls))
        assert await registry.children("/members") == ["busy"]
        with pytest.raises(SessionOver):
            await silent.get("/members")
        with pytest.raises(SessionOver):
            silent.touch()
        assert registry.session(busy.session_id) is busy
        await registry.close()

    run(main)


def test_time_that_the_process_itself_was_away_is_not_counted(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock()
        registry = await SqliteRegistry.open(str(tmp_path), clock=clock)
        lent = await registry.open_session(2_000)
        clock.advance(60_000)
        await asyncio.sleep(0.3)
        assert registry.session(lent.session_id) is lent
        await registry.close()

    run(main)


def test_sessions_survive_a_restart_with_their_whole_time_and_expire_then(tmp_path: Path) -> None:
    async def main() -> None:
        registry = await SqliteRegistry.open(str(tmp_path), clock=ManualClock())
        lent = await registry.open_session(2_000)
        await lent.create("/members/m", is_ephemeral=True)
        await registry.close()
        with pytest.raises(SessionOver):
            await lent.get("/members/m")
        clock = ManualClock()
        registry = await SqliteRegistry.open(str(tmp_path), clock=clock)
        clock.advance(900)
        await asyncio.sleep(0.15)
        assert await registry.get("/members/m") is not None
        for _ in range(3):
            clock.advance(900)
            await asyncio.sleep(0.15)
        assert await registry.get("/members/m") is None
        await registry.close()

    run(main)


def test_operator_may_look_at_the_file_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        registry = await SqliteRegistry.open(str(tmp_path))
        await registry.create("/g/one", b"1")
        looking = sqlite3.connect(f"file:{tmp_path / FILE_NAME}?mode=ro", uri=True)
        assert looking.execute("SELECT path FROM nodes ORDER BY path").fetchall() == [("/g",), ("/g/one",)]
        looking.close()
        await registry.put("/g/one", b"2", 0)
        await registry.close()

    run(main)


def test_caller_who_gives_up_does_not_undo_the_change_and_watches_hear_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        registry = await SqliteRegistry.open(str(tmp_path))
        calls: list[None] = []
        registry.watch("/x", lambda: calls.append(None))
        task = asyncio.ensure_future(registry.create("/x"))
        await asyncio.sleep(0)
        task.cancel()
        await until(lambda: bool(calls))
        assert await registry.get("/x") is not None
        await registry.close()

    run(main)


def test_what_is_not_a_registry_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / FILE_NAME).write_bytes(b"not a database, but long enough to be taken for one " * 20)
        with pytest.raises(WrongDirectory, match="not an SQLite file: move it away"):
            await SqliteRegistry.open(str(tmp_path))
        later = tmp_path / "later"
        registry = await SqliteRegistry.open(str(later))
        await registry.close()
        with sqlite3.connect(later / FILE_NAME) as file:
            file.execute("PRAGMA user_version=99")
        file.close()
        with pytest.raises(WrongDirectory, match="later version"):
            await SqliteRegistry.open(str(later))
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StorageFault):
            await SqliteRegistry.open(str(tmp_path / "file"))

    run(main)


@pytest.mark.parametrize("timeout_ms", [0, 10, 10**9])
def test_session_of_no_sensible_length_is_the_callers_mistake(tmp_path: Path, timeout_ms: int) -> None:
    async def main() -> None:
        registry = await SqliteRegistry.open(str(tmp_path))
        with pytest.raises(Misuse, match=f"{timeout_ms} ms"):
            await registry.open_session(timeout_ms)
        await registry.close()

    run(main)


def test_full_disk_refuses_changes_and_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    async def main() -> None:
        registry = await SqliteRegistry.open(str(tmp_path))
        file = registry._keeper.file
        await registry.create("/x", b"small")
        await file.run(lambda: file.read("PRAGMA max_page_count=1"))  # SQLite takes what is there for the least
        with pytest.raises(DiskFull, match="free some, then try again"):
            await registry.put("/x", b"large" * 100_000, 0)
        assert await registry.get("/x") == Node("/x", b"small", 0, 0)
        await file.run(lambda: file.read("PRAGMA max_page_count=100000"))
        await registry.put("/x", b"large" * 100_000, 0)
        await registry.close()

    run(main)


def test_fault_of_the_disk_is_not_forgotten(tmp_path: Path) -> None:
    async def main() -> None:
        registry = await SqliteRegistry.open(str(tmp_path))
        await registry.create("/x", b"1")
        await registry._keeper.file.run(lambda: registry._keeper.file._opened().execute("DROP TABLE nodes"))
        for _ in range(2):
            with pytest.raises(StorageFault, match="cannot be used"):
                await registry.put("/x", b"2", 0)
        assert await registry.get("/x") == Node("/x", b"1", 0, 0)
        with pytest.raises(StorageFault):
            await registry.close()

    run(main)
