"""Which connection acts for which consumer: the one whose JOIN under the consumer's id was accepted last.

The requests of a consumer name it by its id, which everybody can know. So the broker binds the id to the connection
that joined, and refuses every other connection:

    another connection is bound, and open    FENCED: a later JOIN was accepted, or this connection never joined
    no connection is bound                   NOT_A_MEMBER: the broker has restarted, or the bound connection has ended

Either way the consumer has to JOIN, where it shows its secret (`groups.membership`). A restart forgets all bindings.
"""

from __future__ import annotations

from fairway.errors import Code, Refused
from fairway.groups import GroupStateMachine
from fairway.names import ConsumerName
from fairway.serving.requests import Requester

FENCED = Refused(Code.FENCED, "another connection has joined as this consumer: stop, or join with its secret")
NOT_JOINED = Refused(Code.NOT_A_MEMBER, "this connection has not joined as this consumer: join")


class ConsumerSessions:
    """The connections of one group's consumers."""

    def __init__(self) -> None:
        self._bound: dict[ConsumerName, Requester] = {}

    def bind(self, name: ConsumerName, session: Requester) -> bool:
        """A JOIN was accepted: this connection acts for the consumer. Whether another one, which is open, no longer
        does."""
        before = self._bound.get(name)
        self._bound[name] = session
        return before is not None and before is not session and not before.is_gone

    def check(self, name: ConsumerName, session: Requester, law: GroupStateMachine) -> None:
        """Refuse a connection that may not act for the consumer. Of a consumer that is no member, the law says so."""
        bound = self._bound.get(name)
        if bound is session:
            return
        if bound is not None and not bound.is_gone:
            raise FENCED
        if law.has_member(name):
            raise NOT_JOINED

    def address(self, name: ConsumerName) -> str:
        session = self._bound.get(name)
        return "" if session is None or session.is_gone else session.address

    def has_other(self, name: ConsumerName, session: Requester) -> bool:
        """Whether a connection that is open, and is not this one, acts for the consumer."""
        bound = self._bound.get(name)
        return bound is not None and bound is not session and not bound.is_gone

    def release(self, name: ConsumerName) -> None:
        """The consumer has left."""
        self._bound.pop(name, None)

    def prune(self) -> None:
        """Forget connections that have ended."""
        self._bound = {name: session for name, session in self._bound.items() if not session.is_gone}
