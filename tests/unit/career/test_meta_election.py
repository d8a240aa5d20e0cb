"""Elections at a meta server: a real one on loopback, candidates in threads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairway.career import MetaElection
from fairway.errors import Misuse
from fairway.runtime.process import Child
from tests.support.ports import free_port
from tests.unit.career.stage import Candidate, Clerk, Diary, running

READY_S = 60.0
SESSION_MS = 2_000


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with meta(tmp_path) as child:
        yield _ready(child)


def meta(directory: Path, port: int = 0) -> Child:
    return Child("fairway", "meta", "--registry", f"sqlite:{directory / 'registry'}", "--port", str(port))


def _ready(child: Child) -> str:
    found = re.search(r"meta://127\.0\.0\.1:\d+", child.line(timeout_s=READY_S) or "")
    assert found
    return found[0]


def candidate(who: str, diary: Diary, url: str, session_ms: int = SESSION_MS) -> Candidate:
    return Candidate(Clerk(who, diary), MetaElection(url, "clerk", session_ms=session_ms))


def tokens(*candidates: Candidate) -> list[int]:
    return [token for each in candidates if isinstance(each.career, Clerk) for token in each.career.tokens[:1]]


def test_one_rules_at_a_time_and_tokens_grow(url: str) -> None:
    diary = Diary()
    first = candidate("first", diary, url)
    diary.until("first executes")
    second = candidate("second", diary, url)
    with running(first, second):
        first.end()
        diary.until("second executes")
    assert diary.lines == [
        f"{who} {does}" for who in ("first", "second") for does in ("inaugurates", "executes", "hands over")
    ]
    early, late = tokens(first, second)
    assert early < late


def test_a_restart_of_the_meta_server_deposes_nobody_and_later_tokens_are_larger(tmp_path: Path) -> None:
    diary, port = Diary(), free_port()
    with meta(tmp_path, port) as child:
        first = candidate("first", diary, _ready(child), session_ms=60_000)  # longer than any restart
        diary.until("first executes")
        child.kill()
    with meta(tmp_path, port) as child:
        url = _ready(child)
        with running(first):
            second = candidate("second", diary, url)
            with running(second):
                first.end()
                diary.until("second executes")
    assert diary.lines.count("first inaugurates") == 1
    early, late = tokens(first, second)
    assert early < late


def test_an_election_that_nobody_holds_is_waited_for_and_left(tmp_path: Path) -> None:
    diary, port = Diary(), free_port()
    early = candidate("early", diary, f"meta://127.0.0.1:{port}")
    with meta(tmp_path, port) as child, running(early):
        _ready(child)
        diary.until("early executes")


def test_what_is_written_wrongly_is_said_at_once() -> None:
    with pytest.raises(Misuse, match="meta://HOST:PORT"):
        MetaElection("zookeeper://a:1", "clerk")
    with pytest.raises(Misuse, match="at least"):
        MetaElection("meta://a:1", "clerk", session_ms=10)
    with pytest.raises(Misuse, match="bad group name"):
        MetaElection("meta://a:1", "no/slash")
