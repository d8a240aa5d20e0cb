"""A copy's own node in the registry, and the registered copies that a master accepts.

`CopyRegistration` keeps the ephemeral node that says that a copy lives, where, and in which role. The node's name has
the data directory, the session, and how often the copy has left. So no two lives of a copy share a name. A copy that
led under a node must not lead once that node is gone. And the registry may carry out a request to remove the old node
late, when the copy has long made a new one. Under the same name it would remove the new node, and with it the right to
lead.

Two processes with copies of one directory cannot both register: otherwise a copy that was in sync once would vouch for
one that is not. So after a copy has made its node, it looks for others of its directory, and leaves if it finds one.
All sessions see all changes in one order, so the owner of the later of two nodes sees the earlier.

`RegisteredCopies` are the copies of a group as its master last saw them: which copy may follow, and with which secret.
The copy's lifecycle passes them to its leader after each look at the registry. When the leader has to refuse a FOLLOW
for what it last saw, it looks once more, at most once a second: refused copies must not flood the registry.

A copy's node has the verifier of a secret. Only the process that runs the copy knows the secret, and it shows the
secret with FOLLOW. The master remembers the verifier when the node is gone: a copy that has lost its session goes on
following, and no other may follow under its id. The copy's next node decides from then on: a process that has just
started has another secret, and a process of an earlier version has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from fairway import limits
from fairway.batch.identity import is_same
from fairway.errors import Code, FairwayError, Refused, RemoteProtocolError, WrongDirectory
from fairway.registry.layout import NAME_SEPARATOR, RegisteredCopy, member_path, members_path, pack, place_name, unpack
from fairway.registry.port import Exists, Missing, Node, Registry, VersionMismatch
from fairway.replication.leadership import living
from fairway.runtime.clock import Clock

_NS_PER_MS = 1_000_000
_LEAVE_S = 1.0  # for a registry to answer a copy that leaves; the session ends by itself
_SESSIONS = 3  # how many sessions to wait for another process: the node of a dead process is gone after one


class CopyRegistration:
    """The node of one copy. Each new session needs a new node."""

    def __init__(self, registry: Registry, clock: Clock, group: str, session_ms: int) -> None:
        self.shown: RegisteredCopy | None = None  # what the node says
        self.why = ""  # why the copy cannot register
        self._registry = registry
        self._clock = clock
        self._group = group
        self._patience_ns = _SESSIONS * session_ms * _NS_PER_MS
        self._node: Node | None = None
        self._taken_since_ns: int | None = None
        self._left = 0  # how often it has left

    @property
    def session(self) -> int:
        """The session that owns the node; 0: there is no node."""
        return 0 if self._node is None else self._node.owner

    async def take(self, shown: RegisteredCopy) -> bool:
        """Make the node, or change it to say this. False: another process still has it. `WrongDirectory` where that
        process lives."""
        known = self._node
        if known is None or known.owner != self._registry.session_id or known.path != self._path(shown):
            return await self._enter(shown)
        if shown != self.shown:
            try:
                self._node = await self._registry.put(known.path, pack(shown), known.version)
            except (Missing, VersionMismatch):
                self._node = None
                return False
            self.shown = shown
        return True

    async def leave(self) -> None:
        """Remove the node, so that the others see at once that this copy is gone."""
        node, self._node, self.shown = self._node, None, None
        self._left += node is not None
        if node is not None and node.owner == self._registry.session_id:
            await self._remove(node)

    async def _remove(self, node: Node) -> None:
        with suppress(FairwayError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._registry.remove(node.path)

    def _path(self, shown: RegisteredCopy) -> str:
        return member_path(self._group, place_name(shown.directory, self._registry.session_id, self._left))

    async def _enter(self, shown: RegisteredCopy) -> bool:
        if not await self._is_vacant(shown) or not self._registry.session_id:
            return False
        path = self._path(shown)
        try:
            node = await self._registry.create(path, pack(shown), is_ephemeral=True)
        except Exists:  # by a request whose answer was lost
            found = await self._registry.get(path, fresh=True)
            if found is None or found.owner != self._registry.session_id:
                return False
            node = found
        is_ours = (node.path, node.owner) == (self._path(shown), self._registry.session_id)  # no other session began
        if not is_ours or not await self._is_vacant(shown):
            await self._remove(node)
            return False
        self._node, self._taken_since_ns, self.why = node, None, ""
        self.shown = shown if node.value == pack(shown) else None
        return True

    async def _is_vacant(self, shown: RegisteredCopy) -> bool:
        """Whether the directory has no other node. Removes nodes that this copy has left, in an earlier session or
        under another name."""
        registry, own_path = self._registry, self._path(shown)
        for name in await registry.children(members_path(self._group)):
            path = member_path(self._group, name)
            if path == own_path or name.partition(NAME_SEPARATOR)[0] != shown.directory:
                continue
            node = await registry.get(path)
            if node is None:
                continue
            other = _read(path, node.value)
            # no other process listens there
            is_ours = other is None or (other.host, other.port) == (shown.host, shown.port)
            if not is_ours and other is not None:
                self._wait_for(other)
                return False
            try:
                await registry.remove(path)
            except Missing:
                continue
            except Refused:  # the connection of the earlier process is not known to be gone yet
                if other is not None:
                    self._wait_for(other)
                return False
        return True

    def _wait_for(self, other: RegisteredCopy) -> None:
        now_ns = self._clock.monotonic_ns()
        if self._taken_since_ns is None:
            self._taken_since_ns = now_ns
        where = f"{other.host}:{other.port}"
        self.why = f"the one who is registered with this data directory, at {where}, is waited out"
        if now_ns - self._taken_since_ns > self._patience_ns:
            raise WrongDirectory(
                f"another process, at {where}, lives with the same data directory id {other.directory}: this directory "
                "is a copy of that one's. A replica begins with an empty directory, and is filled by its master"
            )


def _read(path: str, value: bytes) -> RegisteredCopy | None:
    """The record of a node, if it is readable."""
    try:
        return unpack(RegisteredCopy, path, value)
    except RemoteProtocolError:
        return None


_LOOK_PAUSE_NS = 1_000_000_000  # between two looks for copies that follow and are not known to be registered


class RegisteredCopies:
    """The registered copies of one group, for one epoch of its master. `retry_after_ms`: for refused copies."""

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
        """Take over what the registry says. Remembers copies that are no longer registered only if the group knows
        them: so memory is bounded, whatever registers and leaves again."""
        self._directories = frozenset(members)
        kept = {each: verifier for each, verifier in self._verifiers.items() if each in known and each not in members}
        self._verifiers = {**kept, **{each: member.verifier for each, member in members.items() if member.verifier}}

    def seek(self, now_ns: int) -> None:
        """Have `look` read the registry, if the last look is long enough ago."""
        self.is_look_due = self.is_look_due or now_ns - self._looked_ns >= _LOOK_PAUSE_NS

    async def look(self, now_ns: int, known: Collection[str]) -> None:
        """Read the registry, if a look is due."""
        if self.is_look_due:
            self.is_look_due, self._looked_ns = False, now_ns
            self.update(await living(self._registry, self._group), known)

    def accepts(self, directory: str, shown: bytes) -> bool:
        """Whether a client that has shown the secret of this verifier may act as the copy."""
        verifier = self._verifiers.get(directory)
        return verifier is None or is_same(verifier, shown)

    def check(self, directory: str, shown: bytes, known: Collection[str], now_ns: int) -> None:
        """`Refused` where a FOLLOW is not from a copy of the group. `shown`: the verifier of its secret. `known`: the
        copies that the group knows; they may follow while the registry does not show them."""
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
        """Refuse, and look again: perhaps the copy has registered just now."""
        self.seek(now_ns)
        raise Refused(Code.FENCED, sentence, retry_after_ms=self._retry_after_ms)
