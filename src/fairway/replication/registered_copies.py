"""The copies that are registered in a group, as its master last saw them: which copy may follow, and with which secret.

The member tells its leader whenever it has looked. A FOLLOW that the leader has to refuse for what it last saw makes it
look once more, at most once a second: whoever asks in vain must not flood the registry.

The node of a copy has the verifier of a secret. Only the process that runs the copy knows that secret, and it shows the
secret with FOLLOW. The master remembers the verifier when the node is gone: a copy that has lost its session goes on to
follow, and nobody else may follow under its id. The next node of the copy says what counts from then on: a process that
has just started has another secret, and a process of an earlier version has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from fairway import limits
from fairway.batch.secret import is_same
from fairway.errors import Code, Refused
from fairway.registry.layout import RegisteredCopy
from fairway.registry.port import Registry
from fairway.replication.node import living

_LOOK_PAUSE_NS = 1_000_000_000  # between two looks for copies that follow and are not known to be registered


class RegisteredCopies:
    """Of one group, for one reign of its master. `retry_after_ms`: for copies that are refused."""

    def __init__(
        self,
        registry: Registry,
        group: str,
        in_sync: Iterable[str],
        members: Mapping[str, RegisteredCopy],
        *,
        retry_after_ms: int,
    ) -> None:
        self._registry = registry
        self._group = group
        self._retry_after_ms = retry_after_ms
        self._verifiers: dict[str, bytes] = {}
        self._looked_ns = -_LOOK_PAUSE_NS
        self.is_look_due = False
        self.update(members, ())
        self._directories = frozenset({*in_sync, *members})

    def __contains__(self, directory: str) -> bool:
        return directory in self._directories

    def update(self, members: Mapping[str, RegisteredCopy], known: Collection[str]) -> None:
        """The registry was read. Of copies that are not registered any more, only those that the group knows are
        remembered: so memory is bounded, whoever registers and goes again."""
        self._directories = frozenset(members)
        kept = {each: verifier for each, verifier in self._verifiers.items() if each in known and each not in members}
        self._verifiers = {**kept, **{each: member.verifier for each, member in members.items() if member.verifier}}

    def seek(self, now_ns: int) -> None:
        """The registry may have news of a copy: look again, if the last look is long enough ago."""
        self.is_look_due = self.is_look_due or now_ns - self._looked_ns >= _LOOK_PAUSE_NS

    async def look(self, now_ns: int, known: Collection[str]) -> None:
        """Read the registry, if a look is due."""
        if self.is_look_due:
            self.is_look_due, self._looked_ns = False, now_ns
            self.update(await living(self._registry, self._group), known)

    def accepts(self, directory: str, shown: bytes) -> bool:
        """Whether whoever has shown the secret of this verifier may act as the copy."""
        verifier = self._verifiers.get(directory)
        return verifier is None or is_same(verifier, shown)

    def check(self, directory: str, shown: bytes, known: Collection[str], now_ns: int) -> None:
        """`Refused` where a FOLLOW is not that of a copy of the group. `shown`: the verifier of its secret. `known`:
        the copies that the group knows; they may follow while the registry does not answer them."""
        is_known = directory in known
        if not is_known and directory not in self:
            self._refuse(
                f"directory {directory} is not registered in group {self._group}: register it, then follow", now_ns
            )
        if not is_known and len(known) >= limits.GROUP_COPIES_MAX:
            raise Refused(
                Code.TOO_LARGE,
                f"group {self._group} knows {len(known)} copies and takes no more: "
                f"`fairway cluster decommission {self._group} --copy ID` forgets one that is gone for good",
            )
        if not self.accepts(directory, shown):
            what = "another secret" if shown else "no secret"
            self._refuse(
                f"directory {directory} of group {self._group} was registered with a secret, and this FOLLOW shows "
                f"{what}: only the process that registered it may follow under its id; register one of your own",
                now_ns,
            )

    def _refuse(self, sentence: str, now_ns: int) -> None:
        """Perhaps the copy has registered just now."""
        self.seek(now_ns)
        raise Refused(Code.FENCED, sentence, retry_after_ms=self._retry_after_ms)
