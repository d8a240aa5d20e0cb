"""The memory of registry nodes: counted with every change, refused where it is full, freed by what removes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from fairway.errors import Code, Refused
from fairway.limits import KIB
from fairway.registry.port import Exists, Missing, NotAllowed, VersionMismatch
from fairway.registry.sqlite import SqliteRegistry
from fairway.registry.tree import Tree, node_bytes

BYTES_MAX = 64 * KIB


def test_the_count_is_the_sum_of_the_nodes_whatever_changes() -> None:
    rng, tree = random.Random(3), Tree()
    empty = tree.held_bytes
    for _ in range(3_000):
        path = f"/{rng.choice('abc')}" + f"/{rng.choice('def')}" * rng.randrange(2)
        try:
            match rng.randrange(4):
                case 0:
                    changes = tree.create(path, bytes(rng.randrange(500)), owner=rng.choice((0, 0, 5)))
                case 1:
                    node = tree.get(path)
                    changes = tree.put(path, bytes(rng.randrange(500)), 0 if node is None else node.version)
                case 2:
                    changes = tree.remove(path)
                case _:
                    changes = tree.end(5)
        except (Exists, Missing, NotAllowed, VersionMismatch):
            continue
        before, growth = tree.held_bytes, tree.growth_bytes(changes)
        tree.apply(changes)
        assert tree.held_bytes == before + growth
        paths = [f"/{top}" for top in "abc"] + [f"/{top}/{low}" for top in "abc" for low in "def"]
        assert tree.held_bytes == empty + sum(node_bytes(each, tree.get(each)) for each in paths)
    assert tree.copy().held_bytes == tree.held_bytes


def test_what_grows_is_refused_where_memory_is_full_and_what_removes_is_not(tmp_path: Path) -> None:
    async def story() -> None:
        owner = await SqliteRegistry.open(str(tmp_path))
        owner.bound(BYTES_MAX)
        guest = await owner.open_session(10_000)

        async def fill() -> None:
            for number in range(1_000):
                await guest.create(f"/guest/{number}", bytes(1_000), is_ephemeral=True)

        with pytest.raises(Refused, match="--memory-mib") as caught:
            await fill()
        assert caught.value.code is Code.BUSY
        assert caught.value.retry_after_ms
        assert owner.held_bytes <= BYTES_MAX * 7 // 8
        with pytest.raises(Refused):
            await guest.put("/guest/0", bytes(3_000), 0)
        await guest.put("/guest/0", b"", 0)
        await owner.create("/subjects/orders", bytes(1_000))
        for number in (1, 2, 3):
            await guest.remove(f"/guest/{number}")
        await guest.create("/guest/again", bytes(1_000))
        held = owner.held_bytes
        await guest.close()
        assert owner.held_bytes < held // 4
        await owner.close()

    asyncio.run(story())


def test_a_registry_with_more_than_its_bound_opens_and_only_growth_is_refused(tmp_path: Path) -> None:
    async def fill() -> int:
        owner = await SqliteRegistry.open(str(tmp_path))
        for number in range(100):
            await owner.create(f"/many/{number}", bytes(1_000))
        held = owner.held_bytes
        await owner.close()
        return held

    async def open_again(held: int) -> None:
        owner = await SqliteRegistry.open(str(tmp_path))
        owner.bound(BYTES_MAX)
        assert owner.held_bytes == held > BYTES_MAX
        with pytest.raises(Refused):
            await owner.create("/many/more", b"")
        for number in range(100):
            await owner.remove(f"/many/{number}")
        await owner.create("/many/more", b"")
        await owner.close()

    asyncio.run(open_again(asyncio.run(fill())))
