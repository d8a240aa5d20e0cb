"""Parses the URLs of clients, once for each client.

fairway://host:port[,host:port...][?delay=host:port[,...]]    a broker, and a delay server if that is elsewhere;
                                                              several addresses are copies of one broker
meta://host:port[,host:port...]                               meta servers of a cluster, which know the rest
"""

from __future__ import annotations

from typing import NamedTuple, Self

from fairway.errors import Misuse
from fairway.redaction import without_password
from fairway.runtime.net import PORT_MAX

SCHEME = "fairway://"
META_SCHEME = "meta://"
DEFAULT_PORT = 20880
META_PORT = 20882
_REMEDY = f"write {SCHEME}HOST:PORT, for example {SCHEME}127.0.0.1:{DEFAULT_PORT}"


class BrokerAddress(NamedTuple):
    """One host and port to dial."""

    host: str
    port: int

    @classmethod
    def parse(cls, raw: str, default_port: int = DEFAULT_PORT) -> Self:
        """Parse `host`, `host:port` or `[v6]:port`."""
        if "@" in raw:
            raise Misuse(f"bad address {without_password(raw)!r}: it has no user and no password; {_REMEDY}")
        host, port = _split(raw, default_port)
        if not host:
            raise Misuse(f"no host in {raw!r}: {_REMEDY}")
        if not (port.isascii() and port.isdigit() and 1 <= int(port) <= PORT_MAX):
            raise Misuse(f"no such port: {port!r}; use 1 to {PORT_MAX}")
        return cls(host, int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def _split(raw: str, default_port: int) -> tuple[str, str]:
    if raw.startswith("["):
        host, closed, rest = raw[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise Misuse(f"bad address {raw!r}: an IPv6 address stands in brackets, as in [::1]:{DEFAULT_PORT}")
        return host, rest[1:] or str(default_port)
    host, _, port = raw.partition(":")
    if ":" in port:
        raise Misuse(f"bad address {raw!r}: an IPv6 address stands in brackets, as in [::1]:{DEFAULT_PORT}")
    return host, port or str(default_port)


class ClientTarget(NamedTuple):
    """The servers that a URL names, in the order of dialing."""

    brokers: tuple[BrokerAddress, ...]  # copies of one broker; empty in a cluster
    delay: tuple[BrokerAddress, ...] = ()  # empty: the broker runs the delay server itself
    meta: tuple[BrokerAddress, ...] = ()  # the meta servers of a cluster


def parse_any(url: str) -> ClientTarget:
    """Parse the URL of a broker or of a cluster. Raises `Misuse` with a remedy."""
    if not str(url).startswith(META_SCHEME):
        return parse(url)
    where, asked, _ = url.removeprefix(META_SCHEME).partition("?")
    if asked:
        shown = without_password(url)
        raise Misuse(f"bad URL {shown!r}: a meta server knows the delay servers; write {META_SCHEME}HOST:PORT alone")
    return ClientTarget((), meta=_addresses(where.removesuffix("/"), META_PORT))


def parse(url: str) -> ClientTarget:
    """Parse the URL of one broker. Raises `Misuse` with a remedy."""
    if not isinstance(url, str):
        raise Misuse(f"a URL is a str, not {type(url).__name__}: {_REMEDY}")
    if url.startswith(META_SCHEME):
        raise Misuse(
            f"{without_password(url)!r} is a whole cluster, and this goes to one broker group: write "
            f"{SCHEME}HOST:PORT of its brokers, with commas between them (`fairway cluster` shows them)"
        )
    scheme, found, rest = url.partition("://")
    if not found or f"{scheme}://" != SCHEME:
        raise Misuse(f"bad URL {without_password(url)!r}: {_REMEDY}")
    brokers, asked, query = rest.partition("?")
    return ClientTarget(_addresses(brokers.removesuffix("/")), _delay(query) if asked else ())


def _addresses(raw: str, default_port: int = DEFAULT_PORT) -> tuple[BrokerAddress, ...]:
    return tuple(BrokerAddress.parse(each, default_port) for each in raw.split(","))


def _delay(query: str) -> tuple[BrokerAddress, ...]:
    """Parse the query of a broker's URL: `delay=` once, and nothing else."""
    name, equals, value = query.partition("=")
    if name != "delay" or not equals or "&" in value:
        shown = without_password(f"?{query}")
        raise Misuse(f"bad URL: {shown} says nothing; write ?delay=HOST:PORT for a delay server that is elsewhere")
    return _addresses(value)
