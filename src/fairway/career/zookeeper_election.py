"""Election on ZooKeeper: a queue of nodes, each of which vanishes when its candidate resigns or its session ends.

This is the well-known recipe. A candidate creates an ephemeral, numbered node, and the smallest number leads. Each
candidate watches only the node before its own, so that one candidate wakes when a leader goes, not all. Whatever wakes
it, the candidate reads the whole queue again before it believes that it is elected. The recipe leaves four questions
open:

Token. The token is the transaction id that created the own node (its `czxid`). ZooKeeper numbers all its changes in one
order. Earlier nodes in the queue were created earlier, and a leader always follows on one of them. So each term's token
is larger than those of all terms before. This also holds if the folder of the queue is removed and created again, where
node numbers start over. It does not hold for an ensemble whose data is wiped: then fences loudly refuse everybody until
an operator resets them.

Certainty. The servers end a session after a time-out, T, without news of its client. So a leadership is certain for
less than T after the last answered question was sent. A server informs the others up to half a tick late; a session
lasts at least two ticks, so that is at most T/4. A leadership is certain for 2 T/3 after the question, and counts as
lost after T. The election asks six questions in T. It also believes kazoo's SUSPENDED as soon as that arrives. T is the
time-out that the servers grant.

Lost answers. If the connection breaks while the node is being created, the node may or may not exist. Therefore each
attempt has a random word in the node's name, and the election searches the queue for the word before it creates another
node.

Resignation. If a resignation cannot be sent, the election ends the session instead, and campaigns again with a new one.
So a living process never leaves a node behind.

One thread asks all questions (`ElectionThread`). The candidate and kazoo's threads only leave notes for it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from fairway.career.election import ElectionListener, ElectionTask, ElectionThread
from fairway.career.state_machine import Confirmation
from fairway.errors import FairwayError, Misuse
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.rng import RealRng, Rng
from fairway.runtime.threads import Workers

SESSION_MS = 10_000  # short enough for a quick takeover, long enough for a GC pause or a server's failover
SESSION_MS_MIN = 100

_CERTAIN = 2 / 3  # of the session's time-out
_ASKED_PER_SESSION = 6
_DROP_S = 2.0  # for a client to close its session
_RETRY_S = 0.2  # after a question that failed for a passing reason
_RECONNECT = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 1.0}
_MARK = "-n_"
_PLACE = re.compile(rf"[0-9a-f]{{24}}{_MARK}-?\d+")

_log = logging.getLogger("fairway.career")


class ElectionFailed(FairwayError):
    """ZooKeeper refuses a request that the election needs; the sentence says which."""


class ZooKeeperElection(ElectionThread):
    """One candidate's place in a queue on ZooKeeper."""

    def __init__(
        self,
        hosts: str,
        path: str,
        *,
        session_ms: int = SESSION_MS,
        client_options: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> None:
        """`hosts` as "one:2181,two:2181"; `path` is the folder of the queue, created if necessary. `client_options` go
        to `kazoo.client.KazooClient`: TLS, credentials, access lists."""
        if not path.startswith("/") or path.endswith("/"):
            raise Misuse(f"path {path!r} of an election: it begins with a slash and ends without one")
        if session_ms < SESSION_MS_MIN:
            raise Misuse(f"session_ms={session_ms}: at least {SESSION_MS_MIN}")
        super().__init__()
        self._make_client = _client_maker(hosts, session_ms, client_options or {})
        self._path = path
        self._clock = clock or RealClock()
        self._rng = rng or RealRng()
        self._client: Any = None
        self.session_ms = float(session_ms)  # as requested; later as granted by the servers
        self._word = ""  # of this campaign
        self._node = ""
        self._is_session_over = False

    def _attend(self, listener: ElectionListener) -> float | None:
        from kazoo.exceptions import ConnectionLoss, KazooException, OperationTimeoutError, SessionExpiredError
        from kazoo.handlers.threading import KazooTimeoutError

        try:
            return self._pursue(listener)
        except (ConnectionLoss, SessionExpiredError, OperationTimeoutError, KazooTimeoutError) as error:
            _log.debug("election %s: %r, asked again soon", self._path, error)
            return _RETRY_S
        except KazooException as error:
            sentence = f"ZooKeeper refuses {self._path}: {type(error).__name__} {error}".rstrip()
            self._fail(listener, ElectionFailed(sentence), error)
            return None

    def _pursue(self, listener: ElectionListener) -> float | None:
        from kazoo.exceptions import AuthFailedError
        from kazoo.protocol.states import KeeperState

        if self._client is None:
            self._open_client()
        if self._is_session_over:
            self._is_session_over = False
            self._lose(listener)
        if not self._client.connected:
            if self._client.client_state == KeeperState.AUTH_FAILED:
                raise AuthFailedError
            self._suspend(listener)
            return None
        if self._is_elected:
            self._confirm(listener)
        elif self._node or self._stand():
            self._look(listener)
        return self.session_ms / 1e3 / _ASKED_PER_SESSION if self._is_elected else None

    # --- campaign, look, confirm -------------------------------------------------------------------------------------

    def _stand(self) -> bool:
        """Create a node in the queue."""
        self._ask("ensure_path", self._path)
        self._word = self._word or f"{self._rng.bits(96):024x}"
        mine = [name for name in self._ask("get_children", self._path) if name.startswith(self._word)]
        if mine:  # created by a request whose answer was lost
            node = f"{self._path}/{mine[0]}"
            found = self._ask("exists", node)
            session = self._client.client_id
            if found is None or session is None or found.ephemeralOwner != session[0]:
                self._word = ""
                self._notes.put(ElectionTask.LOOK)
                return False
        else:
            prefix = f"{self._path}/{self._word}{_MARK}"
            node, found = self._ask("create", prefix, ephemeral=True, sequence=True, include_data=True)
        self._node, self._token = node, found.czxid
        return True

    def _look(self, listener: ElectionListener) -> None:
        """Is the own node the first in the queue? If not, watch the node before it."""
        own = self._node.rpartition("/")[2]
        while True:
            asked_ns = self._clock.monotonic_ns()
            line = sorted(filter(_PLACE.fullmatch, self._ask("get_children", self._path)), key=_number_of)
            is_first = line[:1] == [own]
            if own not in line or (is_first and not self._holds()):
                self._forget()  # somebody removed it, or its session is over
                self._notes.put(ElectionTask.LOOK)
                return
            if is_first:
                self._is_elected, self._is_suspended = True, False
                listener.elected(self._confirmation(asked_ns))
                return
            place = line.index(own)
            if self._ask("exists", f"{self._path}/{line[place - 1]}", watch=self._on_watch) is not None:
                return

    def _confirm(self, listener: ElectionListener) -> None:
        asked_ns = self._clock.monotonic_ns()
        if not self._holds():
            self._lose(listener)
            return
        self._is_suspended = False
        listener.confirmed(self._confirmation(asked_ns))

    def _holds(self) -> bool:
        """Whether the own node exists. The question is a transaction that changes nothing, which only a majority of the
        servers can commit: a server that is cut off from the others still answers plain reads."""
        change = self._client.transaction()
        change.check(self._node, -1)
        [found] = change.commit_async().get(timeout=self.session_ms / 1e3)
        return found is True

    def _confirmation(self, asked_ns: int) -> Confirmation:
        session_ns = self.session_ms * 1e6
        return Confirmation(self._token, asked_ns + int(_CERTAIN * session_ns), asked_ns + int(session_ns))

    def _ask(self, request: str, *args: Any, **options: Any) -> Any:
        """No request takes longer than a session lasts: a candidate without connection must still read a note to
        end."""
        return getattr(self._client, f"{request}_async")(*args, **options).get(timeout=self.session_ms / 1e3)

    # --- going -------------------------------------------------------------------------------------------------------

    def _withdraw(self) -> None:
        from kazoo.exceptions import KazooException, NoNodeError
        from kazoo.handlers.threading import KazooTimeoutError

        try:
            if self._node and self._client is not None and self._client.connected:
                self._ask("delete", self._node)
                self._word = ""
        except NoNodeError:
            self._word = ""
        except (KazooException, KazooTimeoutError) as error:
            _log.debug("election %s: the node cannot be deleted, the session is ended: %r", self._path, error)
        if self._word:
            self._drop_client()
        self._forget()

    def _leave(self) -> None:
        self._drop_client()

    def _forget(self) -> None:
        super()._forget()
        self._word = self._node = ""

    # --- kazoo's client ----------------------------------------------------------------------------------------------

    def _open_client(self) -> None:
        from kazoo.client import KazooState

        client = self._client = self._make_client()
        self._is_session_over = False

        def on_state(state: str) -> None:
            if client is self._client:  # a dropped client may still report that it is closed
                self._is_session_over = self._is_session_over or state == KazooState.LOST
                self._notes.put(ElectionTask.LOOK)

        client.add_listener(on_state)
        _listen_to_grants(client, self._on_granted)
        client.start_async()

    def _drop_client(self) -> None:
        """End the session. Kazoo may wait for a connection that never comes; a thread of its own waits with it."""
        client, self._client = self._client, None
        if client is None:
            return
        dropping = Workers()
        dropping.start("fairway-election-drop", lambda: _stop(client))
        if unfinished := dropping.join(_DROP_S):
            _log.debug("election %s: %s goes on by itself", self._path, unfinished)

    def _on_granted(self, session_ms: float) -> None:
        self.session_ms = session_ms

    def _on_watch(self, _event: object) -> None:
        self._notes.put(ElectionTask.LOOK)


def _number_of(name: str) -> int:
    """The number of a node. Past 2**31 nodes ZooKeeper goes on with negative numbers, which come later, not first."""
    number = int(name.rpartition(_MARK)[2])
    return number if number >= 0 else number + (1 << 32)


def _client_maker(hosts: str, session_ms: int, options: Mapping[str, Any]) -> Callable[[], Any]:
    """Make a factory of clients. A missing library or a wrong address raises at once, before a thread starts."""
    try:
        from kazoo.client import KazooClient
    except ImportError as error:
        raise Misuse("an election on ZooKeeper needs kazoo: pip install 'fairway[zookeeper]'") from error
    given = {"connection_retry": _RECONNECT, "command_retry": _RECONNECT, **options}
    return lambda: KazooClient(hosts, timeout=session_ms / 1e3, **given)


def _stop(client: Any) -> None:
    from kazoo.exceptions import KazooException

    try:
        client.stop()
        client.close()
    except KazooException as error:  # the client cannot be stopped: its nodes end with its session
        _log.debug("a client of ZooKeeper did not stop: %r", error)


def _listen_to_grants(client: Any, on_granted: Callable[[float], None]) -> None:
    """Report the time-out that the servers granted. Kazoo does not expose it, but waits for an answer for two thirds of
    it."""
    connect = client._connection._connect

    def connected(*where: Any) -> Any:
        waits_ms, dials_ms = connect(*where)
        on_granted(waits_ms * 3 / 2)
        return waits_ms, dials_ms

    client._connection._connect = connected
