"""Addresses of registries, as operators write them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fairway.errors import Misuse, Unreachable
from fairway.registry.sqlite import SqliteRegistry
from fairway.registry.urls import open_registry, parse_sqlite, parse_zookeeper
from fairway.registry.zookeeper import ZooKeeperRegistry
from tests.support.ports import free_port


def test_sqlite_directory_is_opened(tmp_path: Path) -> None:
    async def main() -> None:
        registry = await open_registry(f"sqlite:{tmp_path / 'new' / 'meta'}")
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
        ("", "write sqlite:DIR, or zookeeper://HOST:PORT"),
        ("redis://x", "write sqlite:DIR, or zookeeper://HOST:PORT"),
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
        asyncio.run(open_registry(url))


def test_nobody_there_is_unreachable_and_names_the_address() -> None:
    port = free_port()
    with pytest.raises(Unreachable, match=f"no ZooKeeper answers at 127.0.0.1:{port}"):
        asyncio.run(ZooKeeperRegistry.open(f"127.0.0.1:{port}", open_s=0.3))
