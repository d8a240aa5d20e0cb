"""Registries by their URL, as operators write it.

sqlite:DIR                          a file in that directory, for one meta server
zookeeper://HOST:PORT,…[/ROOT]      everything is kept below ROOT
"""

from __future__ import annotations

import re

from fairway.errors import Misuse
from fairway.redaction import without_password
from fairway.registry.port import Registry
from fairway.runtime.clock import Clock

SESSION_MS = 10_000

_SQLITE = "sqlite:"
_ZOOKEEPER = "zookeeper://"
_SERVER = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_PORT_MAX = 65_535
_FORMS = "write sqlite:DIR, or zookeeper://HOST:PORT,HOST:PORT"


async def open_registry(url: str, *, session_ms: int = SESSION_MS, clock: Clock | None = None) -> Registry:
    """Open the registry at that URL, with an open session. `session_ms` is for ZooKeeper, which may grant more or
    less."""
    if url.startswith(_ZOOKEEPER):
        hosts, root = parse_zookeeper(url)
        from fairway.registry.zookeeper import ZooKeeperRegistry

        return await ZooKeeperRegistry.open(hosts, root=root, session_ms=session_ms, clock=clock)
    directory = parse_sqlite(url)
    from fairway.registry.sqlite import SqliteRegistry

    return await SqliteRegistry.open(directory, clock=clock)


def is_sqlite(url: str) -> bool:
    return url.startswith(_SQLITE)


def parse_sqlite(url: str) -> str:
    """The directory."""
    directory = url.removeprefix(_SQLITE)
    if directory == url:
        raise Misuse(f"no registry at {without_password(url)!r}: {_FORMS}")
    if not directory or directory.startswith("//"):
        raise Misuse(f"no directory in {without_password(url)!r}: write sqlite:DIR, such as sqlite:data/meta")
    return directory


def parse_zookeeper(url: str) -> tuple[str, str]:
    """The servers, and the node below which everything is kept; "": the root."""
    servers, slash, root = url.removeprefix(_ZOOKEEPER).partition("/")
    for server in servers.split(","):
        found = _SERVER.fullmatch(server)
        if found is None or not 0 < int(found[1]) <= _PORT_MAX:
            raise Misuse(f"bad server {without_password(server)!r} in {without_password(url)!r}: {_FORMS}")
    root = root.rstrip("/")
    return servers, f"{slash}{root}" if root else ""
