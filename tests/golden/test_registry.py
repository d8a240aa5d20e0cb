"""Registries in SQLite of every version are opened, and say what they said.

Both were made by the same steps (`expected` has what came of them), each by the code of its version.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from fairway.registry.port import Node
from fairway.registry.sqlite import FILE_NAME, SqliteRegistry, survey

HERE = Path(__file__).parent
SESSION = 1 << 62 | 2  # the second that was opened; the first was its process's own


def expected() -> dict[str, Node]:
    nodes = [
        Node("/fairway/groups/east", b'{"epoch":4}', 1, 0),
        Node("/fairway/groups/west", bytes(range(256)) * 40, 0, 0),
        Node("/fairway/members/b1", b"broker.example:7420", 0, SESSION),
        *(Node(f"/fairway/subjects/s{number:03d}", b"subject %d" % number, 0, 0) for number in range(60)),
        *(Node(f"/line/n-{number:010d}", b"", 0, 0) for number in range(2)),
        *(Node(path, b"", 0, 0) for path in ("/", "/fairway", "/fairway/groups", "/fairway/members", "/line")),
        *(Node(path, b"", 0, 0) for path in ("/fairway/subjects", "/fairway/metas")),
    ]
    return {node.path: node for node in nodes}


async def content(registry: SqliteRegistry, path: str = "/") -> dict[str, Node]:
    node = await registry.get(path)
    assert node is not None
    found = {path: node}
    for name in await registry.children(path):
        found |= await content(registry, f"{path.rstrip('/')}/{name}")
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_the_golden_registry_is_opened(version: int, tmp_path: Path) -> None:
    shutil.copy(HERE / f"registry_v{version}" / FILE_NAME, tmp_path)
    seen = survey(str(tmp_path))
    assert (seen.version, seen.nodes, seen.sessions, seen.problems) == (version, len(expected()) - 1, 1, [])

    async def main() -> None:
        for _ in range(2):  # and again, as this version has left it
            registry = await SqliteRegistry.open(str(tmp_path))
            assert await content(registry) == expected()
            assert registry.session(SESSION).session_id == SESSION
            await registry.close()
        registry = await SqliteRegistry.open(str(tmp_path))
        assert (await registry.create("/line/n-", is_numbered=True)).path == "/line/n-0000000003"
        await registry.close()

    asyncio.run(main())
    assert survey(str(tmp_path)).version == 2
    assert survey(str(tmp_path)).problems == []
