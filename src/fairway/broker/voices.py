"""Who speaks for a consumer: the connection that joined last. An older one of the same name is fenced.

After a restart of the broker nobody has joined yet; then the first connection that speaks for a name is its voice."""

from __future__ import annotations

from fairway.errors import Code, Refused
from fairway.names import Consumer
from fairway.serving.requests import Asker

FENCED = Refused(Code.FENCED, "another connection has joined under this consumer's name since: stop, or join again")


class Voices:
    """The connections of one group's consumers."""

    def __init__(self) -> None:
        self._sessions: dict[Consumer, Asker] = {}

    def give(self, name: Consumer, session: Asker) -> bool:
        """It speaks for the name from now on; whether that silences another one that lives."""
        before = self._sessions.get(name)
        self._sessions[name] = session
        return before is not None and before is not session and not before.is_gone

    def check(self, name: Consumer, session: Asker) -> None:
        """Refuse whoever does not speak for the name."""
        voice = self._sessions.get(name)
        if voice is session:
            return
        if voice is not None and not voice.is_gone:
            raise FENCED
        self._sessions[name] = session

    def address(self, name: Consumer) -> str:
        session = self._sessions.get(name)
        return "" if session is None or session.is_gone else session.address

    def has_other(self, name: Consumer, session: Asker) -> bool:
        """Whether a connection that lives, and is not this one, speaks for the name."""
        voice = self._sessions.get(name)
        return voice is not None and voice is not session and not voice.is_gone

    def drop(self, name: Consumer) -> None:
        self._sessions.pop(name, None)

    def prune(self) -> None:
        """Forget connections that are gone."""
        self._sessions = {name: session for name, session in self._sessions.items() if not session.is_gone}
