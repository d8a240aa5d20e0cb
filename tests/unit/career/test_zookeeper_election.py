"""Elections on a real ZooKeeper: the line, who watches whom, and what becomes of sessions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
from kazoo.client import KazooClient

import fairway
import fairway.aio
from fairway.career import ElectionFailed, ZooKeeperElection
from fairway.errors import Misuse
from tests.support import zookeeper
from tests.support.zookeeper import Ensemble
from tests.unit.career.stage import Candidate, Clerk, Diary, running, until

pytestmark = pytest.mark.xdist_group("zookeeper")

SESSION_MS = 2_000


@pytest.fixture(scope="module")
def ensemble() -> Ensemble:
    return zookeeper.shared()


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    return f"/tests/{request.node.name}"


@pytest.fixture
def client(ensemble: Ensemble) -> Iterator[KazooClient]:
    found = KazooClient(ensemble.hosts)
    found.start()
    yield found
    found.stop()
    found.close()


def candidate(who: str, diary: Diary, ensemble: Ensemble, path: str) -> Candidate:
    return Candidate(Clerk(who, diary), ZooKeeperElection(ensemble.hosts, path, session_ms=SESSION_MS))


def in_line(client: KazooClient, path: str, count: int) -> list[str]:
    """Wait until so many stand in line; their nodes, in order."""

    def found() -> list[str]:
        return client.get_children(path) if client.exists(path) else []

    until(lambda: len(found()) == count)
    return sorted(found(), key=lambda name: name[-10:])


def test_one_rules_at_a_time_in_the_order_of_the_line(ensemble: Ensemble, client: KazooClient, path: str) -> None:
    diary = Diary()
    first = candidate("first", diary, ensemble, path)
    diary.until("first executes")
    second = candidate("second", diary, ensemble, path)
    in_line(client, path, 2)
    third = candidate("third", diary, ensemble, path)
    in_line(client, path, 3)
    with running(first, second, third):
        first.end()
        diary.until("second executes")
        second.end()
        diary.until("third executes")
    assert diary.lines == [f"{who} {does}" for who in ("first", "second", "third")
                           for does in ("inaugurates", "executes", "hands over")]  # fmt: skip
    tokens = [each.career.tokens[0] for each in (first, second, third) if isinstance(each.career, Clerk)]
    assert tokens == sorted(set(tokens))
    assert client.get_children(path) == []


def test_each_watches_only_the_one_before_it(ensemble: Ensemble, client: KazooClient, path: str) -> None:
    diary = Diary()
    everybody = [candidate(f"c{number}", diary, ensemble, path) for number in range(6)]
    with running(*everybody):
        line = in_line(client, path, 6)

        def watched() -> list[str]:
            return sorted(re.findall(rf"^{path}\S*", ensemble.servers[0].ask("wchp"), re.MULTILINE))

        until(lambda: len(watched()) == 5)
        assert watched() == sorted(f"{path}/{name}" for name in line[:-1])
        assert int(ensemble.servers[0].ask("wchs").partition("Total watches:")[2]) == 5


def test_candidate_whose_session_expires_while_it_waits_stands_again(
    ensemble: Ensemble, client: KazooClient, path: str
) -> None:
    diary = Diary()
    first = candidate("first", diary, ensemble, path)
    diary.until("first executes")
    second = candidate("second", diary, ensemble, path)
    with running(first, second):
        line = in_line(client, path, 2)
        expire(second)
        until(lambda: in_line(client, path, 2)[1] != line[1])
        assert in_line(client, path, 2)[0] == line[0]
        first.end()
        diary.until("second executes")


def test_leader_whose_session_expires_hands_over_and_stands_again(ensemble: Ensemble, path: str) -> None:
    diary = Diary()
    first = candidate("first", diary, ensemble, path)
    diary.until("first executes")
    with running(first):
        expire(first)
        diary.until("first executes", times=2)
        assert [line.removeprefix("first ") for line in diary.lines] == [
            "inaugurates", "executes", "hands over", "inaugurates", "executes"
        ]  # fmt: skip
        assert isinstance(first.career, Clerk)
        assert first.career.tokens == sorted(set(first.career.tokens))


def test_connection_that_is_found_again_in_time_is_no_change_of_office(
    ensemble: Ensemble, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Diary()
    first = candidate("first", diary, ensemble, path)
    diary.until("first executes")
    second = candidate("second", diary, ensemble, path)
    with running(first, second):
        drop_connection(first)
        until(lambda: "career clerk: the session is suspended" in caplog.text)
        assert isinstance(first.career, Clerk)
        pieces = first.career.pieces
        until(lambda: isinstance(first.career, Clerk) and first.career.pieces > pieces + 2)
        assert diary.lines == ["first inaugurates", "first executes"]


def test_node_that_somebody_removes_is_an_office_lost(ensemble: Ensemble, client: KazooClient, path: str) -> None:
    diary = Diary()
    first = candidate("first", diary, ensemble, path)
    diary.until("first executes")
    second = candidate("second", diary, ensemble, path)
    with running(first, second):
        line = in_line(client, path, 2)
        client.delete(f"{path}/{line[0]}")
        diary.until("second executes")
        diary.until("first hands over")


def test_granted_session_counts_and_not_the_one_that_was_asked_for(ensemble: Ensemble, path: str) -> None:
    """The servers grant at most twenty ticks."""
    diary = Diary()
    election = ZooKeeperElection(ensemble.hosts, path, session_ms=600_000)
    with running(Candidate(Clerk("first", diary), election)):
        diary.until("first executes")
        assert election.session_ms == 20 * zookeeper.TICK_MS


def test_strangers_in_the_folder_are_no_candidates(ensemble: Ensemble, client: KazooClient, path: str) -> None:
    client.create(f"{path}/a-note-of-the-operator", makepath=True)
    client.create(f"{path}/x-n_0000000000")
    diary = Diary()
    with running(candidate("first", diary, ensemble, path)):
        diary.until("first executes")


def test_refusal_of_zookeeper_ends_the_candidacy_with_a_word(
    ensemble: Ensemble, client: KazooClient, path: str
) -> None:
    from kazoo.security import READ_ACL_UNSAFE

    client.create(path, makepath=True, acl=READ_ACL_UNSAFE)
    refused = candidate("first", Diary(), ensemble, path)
    refused.join()
    assert isinstance(refused.raised, ElectionFailed)
    assert re.search(f"ZooKeeper refuses {re.escape(path)}: NoAuthError", str(refused.raised))


def test_elect_runs_a_career_to_its_end(ensemble: Ensemble, path: str) -> None:
    diary = Diary()

    class Once(Clerk):
        def execute(self, token: int) -> bool:
            super().execute(token)
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        fairway.elect(Once("only", diary), zookeeper=ensemble.hosts, path=path, session_ms=SESSION_MS)
    assert diary.lines == ["only inaugurates", "only executes", "only hands over"]


def test_careers_of_coroutines_take_turns(ensemble: Ensemble, path: str) -> None:
    lines: list[str] = []

    class Aio(fairway.aio.Career):
        name = "aio"

        def __init__(self, who: str) -> None:
            self.who = who
            self.left = 3

        async def inaugurate(self) -> None:
            lines.append(f"{self.who} inaugurates")

        async def execute(self, token: int) -> bool:
            await asyncio.sleep(0.01)
            self.left -= 1
            if self.left < 0:
                raise InterruptedError(self.who)
            return self.left > 0

        async def hand_over(self) -> None:
            lines.append(f"{self.who} hands over")

    async def story() -> None:
        options = {"zookeeper": ensemble.hosts, "path": path, "session_ms": SESSION_MS}
        found = await asyncio.gather(
            *(fairway.aio.elect(Aio(who), **options) for who in ("first", "second")),  # type: ignore[arg-type]
            return_exceptions=True,
        )
        assert [str(error) for error in found] == ["first", "second"]

    asyncio.run(story())
    one, other = lines[0].split()[0], {"first": "second", "second": "first"}[lines[0].split()[0]]
    turn = ("inaugurates", "hands over")
    assert lines == [f"{who} {does}" for who in (one, other, one, other) for does in turn]


def test_where_it_is_held_must_be_said() -> None:
    with pytest.raises(Misuse, match="say where the election is held"):
        fairway.elect(Clerk("x", Diary()))
    with pytest.raises(Misuse, match="begins with a slash"):
        ZooKeeperElection("127.0.0.1:1", "careers")
    with pytest.raises(Misuse, match="at least 100"):
        ZooKeeperElection("127.0.0.1:1", "/careers", session_ms=5)


# --- what happens to sessions ----------------------------------------------------------------------------------------


def expire(candidate_: Candidate) -> None:
    """End its session from outside: whoever connects with its number and password may close it."""
    held = _client_of(candidate_)
    assert held.client_id is not None
    thief = KazooClient(",".join(f"{host}:{port}" for host, port in held.hosts), client_id=held.client_id)
    thief.start()
    thief.stop()
    thief.close()


def drop_connection(candidate_: Candidate) -> None:
    _client_of(candidate_)._connection._socket.shutdown(2)


def _client_of(candidate_: Candidate) -> KazooClient:
    assert isinstance(candidate_.election, ZooKeeperElection)
    return candidate_.election._client
