"""Text of other users is escaped on an operator's terminal, and reaches a pipe as it is."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairway.errors import Code, Refused
from fairway.protocol import ControlMessage
from fairway.protocol.admin_messages import BrokerState, Describe, Described, GroupDescription, SubjectDescription
from fairway.protocol.route_messages import Copy, GroupRoute, Routed, SubjectRoute
from tests.support.stub_server import Reply, StubServer
from tests.unit.cli.running import Cli, on_terminal
from tests.unit.runtime.test_terminal import watched

WAIT_S = 60.0
HOSTILE = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red]y[/red][link=https://example.org]z[/link]"
SHOWN = "x\\u001b]0;owned\\u0007\\u001b[2J\\u009b31m\\u202e[red]y[/red][link=https://example.org]z[/link]"
OWN = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")  # styles and the cursor, as rich writes them


def check(shown: str, *, times: int = 1) -> None:
    """Nothing that was hostile is obeyed, and everything is there to read."""
    flat = OWN.sub("", shown.replace("\x1b[2J", "CLEARED"))
    bad = set(flat) & {"\x1b", "\x07", "\x9b", "\x7f", "\u202e"}
    assert not bad, f"{bad} in {flat!r}"
    assert "CLEARED" not in flat
    assert "".join(flat.split()).count(SHOWN) >= times, flat


@pytest.fixture(scope="module")
def dead(cli: Cli) -> str:
    """The id of a dead letter of `g` on `hostile`, all of whose fields are hostile."""
    with cli.client() as client:
        client.send("hostile", HOSTILE.encode(), key=HOSTILE, tags=["t"], headers={"name": HOSTILE}).result()
        with client.consumer("hostile", "g") as consumer:
            message = consumer.poll(WAIT_S)
            assert message is not None
            message.reject(HOSTILE)
            assert consumer.flush(WAIT_S)
    for _ in range(600):
        if found := cli.json("dead", "list", "hostile", "g")["letters"]:
            return str(found[0]["id"])
    raise AssertionError("the dead letter did not arrive")


def test_dead_letters(cli: Cli, dead: str) -> None:
    check(on_terminal(cli.url, "dead", "list", "hostile", "g", columns=600))
    check(on_terminal(cli.url, "dead", "show", "hostile", "g", dead, columns=600), times=4)
    assert HOSTILE in cli.run("dead", "show", "hostile", "g", dead)


def test_payloads(cli: Cli, dead: str) -> None:
    check(on_terminal(cli.url, "tail", "hostile", "--from", "earliest", "--no-follow"))
    check(on_terminal(cli.url, "consume", "hostile", "-g", "other", "-n", "1"))
    assert cli.run("tail", "hostile", "--from", "earliest", "--no-follow") == f"{HOSTILE}\n"


def test_json_on_a_terminal_is_the_same_document(cli: Cli, dead: str) -> None:
    for words in (("tail", "hostile", "--from", "earliest", "--no-follow"), ("dead", "show", "hostile", "g", dead)):
        shown = on_terminal(cli.url, *words, "--json")
        check(shown)
        assert json.loads(shown)["payload"] == HOSTILE


def test_trace(cli: Cli, dead: str) -> None:
    check(on_terminal(cli.url, "trace", dead, columns=600), times=2)


def test_delayed_messages(cli: Cli) -> None:
    with cli.client() as client:
        client.send("later", b"x", key=HOSTILE, after=datetime.timedelta(days=1)).result()
    check(on_terminal(cli.url, "delay", "list", columns=600))


class Hostile(StubServer):
    """Answers with names that no honest server has, or with a refusal."""

    def handle(self, message: ControlMessage, reply: Reply) -> None:
        if not isinstance(message, Describe):
            reply(Refused(Code.OTHER, HOSTILE))
            return
        broker = BrokerState(HOSTILE, 0, 1, True, False, 0, 1, durability="sync")
        group = GroupDescription(HOSTILE, *(0,) * 11, 1.0, False, 0, 0)
        reply(Described(broker, [SubjectDescription(HOSTILE, 0, 1, False, 1, groups=[group])]))


class HostileMeta(StubServer):
    """A meta server whose every sentence is hostile."""

    def handle(self, message: ControlMessage, reply: Reply) -> None:
        copy = Copy(HOSTILE, f"127.0.0.1:{self.port}", HOSTILE)
        group = GroupRoute(HOSTILE, HOSTILE, 1, "", [], is_writable=False, why=HOSTILE, copies=[copy])
        reply(Routed(1, [SubjectRoute(HOSTILE, [], [], why=HOSTILE)], [group], metas=[HOSTILE]))


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    with Hostile() as server:
        yield f"fairway://127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    "words", ["lag", "lag --json", "groups", "subjects --all", "top --once --interval-s 0.1", "doctor"]
)
def test_names_of_a_server(words: str, hostile: str) -> None:
    check(on_terminal(hostile, *words.split(), columns=600))


@pytest.mark.parametrize("words", [("seek", "s", "g", "earliest"), ("tail", "s", "--no-follow")], ids=" ".join)
def test_refusals_of_a_server(words: tuple[str, ...], hostile: str) -> None:
    check(on_terminal(hostile, *words, status=1))


@pytest.mark.parametrize("words", [("cluster",), ("subject", "show"), ("cluster", "--check")], ids=" ".join)
def test_sentences_of_a_meta_server(words: tuple[str, ...]) -> None:
    with HostileMeta() as server:
        status = 4 if "--check" in words else 0
        check(on_terminal(f"meta://127.0.0.1:{server.port}", *words, status=status, columns=900))


def test_a_directory_with_a_hostile_name(tmp_path: Path) -> None:
    named = tmp_path / HOSTILE.replace("/", "")
    shown = on_terminal("fairway://127.0.0.1:1", "verify", str(named), status=1)
    assert "\\u001b]0;owned" in shown
    assert not {"\x07", "\x9b", "\u202e"} & set(shown)


def test_the_lines_of_a_job_on_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    from fairway.spark.jobs import job

    screen = watched(monkeypatch)
    job.tell(None, False, [HOSTILE])  # type: ignore[arg-type]
    check(screen.text)
