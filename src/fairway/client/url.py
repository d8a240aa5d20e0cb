"""`fairway://host:port[,host:port...]`: where to find a broker. Parsed once, when a client is made."""

from __future__ import annotations

from typing import NamedTuple, Self

from fairway.errors import Misuse
from fairway.world.net import PORT_MAX

SCHEME = "fairway://"
DEFAULT_PORT = 20880
_REMEDY = f"write {SCHEME}HOST:PORT, for example {SCHEME}127.0.0.1:{DEFAULT_PORT}"


class Address(NamedTuple):
    """One place to dial."""

    host: str
    port: int

    @classmethod
    def parse(cls, raw: str) -> Self:
        """`host`, `host:port`, `[v6]:port`."""
        host, port = _split(raw)
        if not host:
            raise Misuse(f"no host in {raw!r}: {_REMEDY}")
        if not (port.isascii() and port.isdigit() and 1 <= int(port) <= PORT_MAX):
            raise Misuse(f"no such port: {port!r}; use 1 to {PORT_MAX}")
        return cls(host, int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def _split(raw: str) -> tuple[str, str]:
    if raw.startswith("["):
        host, closed, rest = raw[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise Misuse(f"bad address {raw!r}: an IPv6 address stands in brackets, as in [::1]:{DEFAULT_PORT}")
        return host, rest[1:] or str(DEFAULT_PORT)
    host, _, port = raw.partition(":")
    if ":" in port:
        raise Misuse(f"bad address {raw!r}: an IPv6 address stands in brackets, as in [::1]:{DEFAULT_PORT}")
    return host, port or str(DEFAULT_PORT)


def parse(url: str) -> tuple[Address, ...]:
    """The addresses of a URL, in the order in which they are tried; `Misuse` names what is wrong."""
    if not isinstance(url, str):
        raise Misuse(f"a URL is a str, not {type(url).__name__}: {_REMEDY}")
    scheme, found, rest = url.partition("://")
    if not found or f"{scheme}://" != SCHEME:
        raise Misuse(f"bad URL {url!r}: {_REMEDY}")
    return tuple(Address.parse(raw) for raw in rest.removesuffix("/").split(","))
