"""`fairway.elect` and `fairway.aio.elect`: a career, and where its elections are held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairway.career.candidacy import Candidacy
from fairway.career.candidacy_aio import AioCandidacy
from fairway.career.careers import AioCareer, Career, name_of
from fairway.career.election import Election
from fairway.career.zookeeper import SESSION_MS, ZooKeeperElection
from fairway.errors import Misuse

FOLDER = "/fairway/careers"


def elect(
    career: Career,
    *,
    zookeeper: str = "",
    path: str = "",
    session_ms: int = SESSION_MS,
    client_options: Mapping[str, Any] | None = None,
    election: Election | None = None,
) -> None:
    """Be a candidate for a career, and rule when elected, until SIGTERM or SIGINT; then hand over, and return.

    `zookeeper` as "one:2181,two:2181"; `path` is where the candidates stand in line, `/fairway/careers/<name>` unless
    told otherwise; a leader that vanishes is replaced after `session_ms`. `client_options` go to kazoo's client. Any
    other `election` may be given instead.
    """
    Candidacy(career, _election(career, zookeeper, path, session_ms, client_options, election)).run()


async def elect_async(
    career: AioCareer,
    *,
    zookeeper: str = "",
    path: str = "",
    session_ms: int = SESSION_MS,
    client_options: Mapping[str, Any] | None = None,
    election: Election | None = None,
) -> None:
    """As `fairway.elect`, with a career of coroutines. Cancelling it hands over, too."""
    await AioCandidacy(career, _election(career, zookeeper, path, session_ms, client_options, election)).run()


def _election(
    career: Career | AioCareer,
    zookeeper: str,
    path: str,
    session_ms: int,
    client_options: Mapping[str, Any] | None,
    election: Election | None,
) -> Election:
    if bool(zookeeper) == (election is not None):
        raise Misuse("say where the election is held: zookeeper='host:2181', or election=..., and not both")
    if election is not None:
        return election
    place = path or f"{FOLDER}/{name_of(career)}"
    return ZooKeeperElection(zookeeper, place, session_ms=session_ms, client_options=client_options)
