"""How long sessions live when nobody hears of them: the law, on a clock that is an argument."""

from __future__ import annotations

from fairway.registry.port import SessionOver


class SessionLeases:
    """The sessions that are open, and when each of them is over unless it is heard of."""

    def __init__(self) -> None:
        self._timeout_ns: dict[int, int] = {}
        self._due_ns: dict[int, int] = {}

    def open(self, session: int, timeout_ns: int, now_ns: int) -> None:
        self._timeout_ns[session] = timeout_ns
        self._due_ns[session] = now_ns + timeout_ns

    def __contains__(self, session: int) -> bool:
        return session in self._due_ns

    def __len__(self) -> int:
        return len(self._due_ns)

    @property
    def sessions(self) -> list[int]:
        return list(self._due_ns)

    def due_ns(self, session: int) -> int:
        """When it is over unless it is heard of; 0: it is."""
        return self._due_ns.get(session, 0)

    def check(self, session: int) -> None:
        if session not in self._due_ns:
            raise SessionOver(f"registry session {session:x} is over: its nodes are gone, open another")

    def touch(self, session: int, now_ns: int) -> None:
        self.check(session)
        self._due_ns[session] = max(self._due_ns[session], now_ns + self._timeout_ns[session])

    def close(self, session: int) -> None:
        self._due_ns.pop(session, None)
        self._timeout_ns.pop(session, None)

    def expire(self, now_ns: int) -> list[int]:
        """Those whose time is up; they are open no more."""
        over = [session for session, due_ns in self._due_ns.items() if due_ns <= now_ns]
        for session in over:
            self.close(session)
        return over

    def forgive(self, away_ns: int) -> None:
        """We were away ourselves for so long, and could hear of nobody."""
        for session in self._due_ns:
            self._due_ns[session] += away_ns
