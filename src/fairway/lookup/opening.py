"""Registries by their address, those that meta servers keep included.

sqlite:DIR                          a file in that directory, for one meta server
zookeeper://HOST:PORT,…[/ROOT]      everything is kept below ROOT
meta://HOST:PORT                    that of a meta server with an SQLite registry, over the wire
"""

from __future__ import annotations

from fairway.errors import Misuse
from fairway.lookup.remote import RemoteRegistry
from fairway.redaction import without_password
from fairway.registry import opening
from fairway.registry.port import Registry
from fairway.world.clock import Clock
from fairway.world.dialing import Address
from fairway.world.net import PORT_MAX, Net
from fairway.world.rng import Rng

META = "meta://"
META_PORT = 20882
SESSION_MS = opening.SESSION_MS


async def open_registry(
    url: str, net: Net, clock: Clock, rng: Rng, *, session_ms: int = SESSION_MS, name: str = "fairway"
) -> Registry:
    """The registry at that address, with a session that is open; `Misuse` says how addresses are written."""
    if url.startswith(META):
        return await RemoteRegistry.open(net, clock, rng, parse_meta(url), session_ms=session_ms, name=name)
    if not url.startswith(("sqlite:", "zookeeper://")):
        raise Misuse(
            f"no registry at {without_password(url)!r}: write meta://HOST:PORT, zookeeper://HOST:PORT,... or sqlite:DIR"
        )
    return await opening.open_registry(url, session_ms=session_ms, clock=clock)


def parse_meta(url: str) -> tuple[Address, ...]:
    """`meta://HOST[:PORT],...`; also of an URL with another scheme the places behind it."""
    places = url.partition("://")[2].partition("?")[0].rstrip("/")
    if not places:
        raise Misuse(
            f"no meta server in {without_password(url)!r}: write {META}HOST:PORT, several with commas between them"
        )
    return tuple(_address(place, url) for place in places.split(","))


def _address(raw: str, url: str) -> Address:
    host, _, port = raw.rpartition(":") if raw.count(":") == 1 or "]:" in raw else (raw, "", str(META_PORT))
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and 1 <= int(port) <= PORT_MAX
    if not host or not is_port or "@" in raw:
        what = f"bad place {without_password(raw)!r} in {without_password(url)!r}"
        raise Misuse(f"{what}: write HOST:PORT, for example {META}127.0.0.1:{META_PORT}")
    return host, int(port)
