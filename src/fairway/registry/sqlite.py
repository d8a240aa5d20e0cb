"""SQLite registry: the registry in a file, for one meta server that serves it to everybody else.

The tree is in memory and on disk. The thread of the file makes each change in this order: decide, write and sync,
apply, report to the watches. Reads use the same thread, so everybody sees all changes in one order.

A directory belongs to one process, by the same lock that guards a broker's. That process has a session of its own,
which lasts as long as the process. It lends sessions to its clients (`open_session`). The lent sessions are on disk
with their nodes, so a client does not lose its session when the meta server restarts: the client has the session's
whole time-out, from the restart on, to send a request. The previous process's own session ends at the restart, with its
nodes.

SQLite does not check its data: it serves a flipped bit in a value, and a flipped bit in a page's cell table makes a row
vanish. Therefore each row has a digest, which shows which row is damaged. One more row, the seal, has the number of all
rows and the XOR of their digests, so a missing or doubled row breaks it. The seal changes in the same transaction as
the rows, at a cost that does not depend on their number. The digests are checked when the file is opened. From then on,
reads use the tree in memory. A damaged registry is refused with the list of its problems, because a wrong epoch or
in-sync set would cost messages. A file of version 1 has no checksums: it gets them when it is opened.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias, TypeVar

import msgspec

from fairway.errors import Code, DiskFull, Misuse, Refused, StorageFault
from fairway.registry.port import Node, RegistryError, SessionOver, SessionState
from fairway.registry.sessions import SessionLeases, SessionWatches, Watching
from fairway.registry.tree import NodeChange, Tree, changed, checked_path, checked_value, checked_version, touched
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng, Rng
from fairway.runtime.sqlite_file import SqliteFile, Statement, has_lost_commits, look

T = TypeVar("T")

FILE_NAME = "registry.sqlite"
SESSION_MS_MIN = 500
SESSION_MS_MAX = 3_600_000
SESSIONS_MAX = 10_000  # a cluster has a few dozen: more are a mistake

_KEY_PATH = "/private/session-key"  # a node like any other, but meta servers show it to nobody
_KEY_BYTES = 32
_LOOK_S = 0.1  # between two checks for expired sessions
_AWAY_NS = 1_000_000_000  # if a check comes so late, this process stood still itself
_FOR_EVER_NS = 1 << 62
_OWNERS_SHARE = 8
_FULL_RETRY_MS = 1_000  # nodes go with their sessions, which makes room
_VERSION = 2  # version 1 had no digests
_SEAL_SCHEMA = "CREATE TABLE seal (id INTEGER PRIMARY KEY, rows INTEGER NOT NULL, digest BLOB NOT NULL)"
_SCHEMA = (
    """CREATE TABLE nodes (path TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL,
                           owner INTEGER NOT NULL, numbered INTEGER NOT NULL, digest BLOB NOT NULL)""",
    """CREATE TABLE sessions (id INTEGER PRIMARY KEY, timeout_ms INTEGER NOT NULL, is_lent INTEGER NOT NULL,
                              digest BLOB NOT NULL)""",
    _SEAL_SCHEMA,
    "INSERT INTO seal VALUES (1, 0, zeroblob(16))",  # of no rows
)
_UPGRADE = (
    "ALTER TABLE nodes ADD COLUMN digest BLOB NOT NULL DEFAULT x''",
    "ALTER TABLE sessions ADD COLUMN digest BLOB NOT NULL DEFAULT x''",
    _SEAL_SCHEMA,
)
# Read the table itself: a damaged index might hide rows.
_NODES = "SELECT path, value, version, owner, numbered{} FROM nodes NOT INDEXED"
_SESSIONS = "SELECT id, timeout_ms, is_lent{} FROM sessions NOT INDEXED"
_SEALS = "SELECT rows, digest FROM seal"
_CHECK = "PRAGMA integrity_check(1)"
_PUT = "INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?, ?)"
_DROP = "DELETE FROM nodes WHERE path = ?"
_OPEN = "INSERT INTO sessions VALUES (?, ?, ?, ?)"
_SEAL = "UPDATE seal SET rows = ?, digest = ? WHERE id = 1"
_CLOSE = "DELETE FROM sessions WHERE id = ?"
_LOG_PROBLEM = f"a frame of its log ({FILE_NAME}-wal) fails its checksum, and acknowledged changes follow it"

_log = logging.getLogger("fairway.registry")


_DIGEST_BYTES = 16
_PROBLEMS_MAX = 100  # listed one by one; a damaged page has hundreds of rows

RowKey: TypeAlias = str | int  # a node's path, or the number of a session
SealedRow: TypeAlias = tuple[Any, ...]

_NODE_HEAD = struct.Struct("<4sIIqqq")  # node, lengths of path and value, version, owner, numbered
_SESSION_HEAD = struct.Struct("<4sqqq")  # sess, id, timeout, lent


def node_digest(path: str, value: bytes, version: int, owner: int, numbered: int) -> bytes:
    name = path.encode()
    head = _NODE_HEAD.pack(b"node", len(name), len(value), version, owner, numbered)
    return blake2b(head + name + value, digest_size=_DIGEST_BYTES).digest()


def session_digest(session: int, timeout_ms: int, is_lent: int) -> bytes:
    return blake2b(_SESSION_HEAD.pack(b"sess", session, timeout_ms, is_lent), digest_size=_DIGEST_BYTES).digest()


class RowChecksums:
    """The digests of all rows, by key, and their seal."""

    def __init__(self) -> None:
        self._digests: dict[RowKey, bytes] = {}
        self._sum = 0

    @property
    def row(self) -> tuple[int, bytes]:
        """The seal as stored: how many rows, and the XOR of their digests."""
        return len(self._digests), self._sum.to_bytes(_DIGEST_BYTES)

    def after(self, changes: Mapping[RowKey, bytes | None]) -> tuple[int, bytes]:
        """The seal to write with these changes. A digest of None removes the row."""
        rows, total = len(self._digests), self._sum
        for key, digest in changes.items():
            before = self._digests.get(key)
            rows += (digest is not None) - (before is not None)
            total ^= _number(before) ^ _number(digest)
        return rows, total.to_bytes(_DIGEST_BYTES)

    def apply(self, changes: Mapping[RowKey, bytes | None]) -> None:
        """Note that these changes were written."""
        self._sum = int.from_bytes(self.after(changes)[1])
        for key, digest in changes.items():
            if digest is None:
                self._digests.pop(key, None)
            else:
                self._digests[key] = digest


def _number(digest: bytes | None) -> int:
    return 0 if digest is None else int.from_bytes(digest)


def _problems(nodes: Iterable[SealedRow], sessions: Iterable[SealedRow], seals: Iterable[SealedRow]) -> list[str]:
    """The problems of a registry's rows, each row with its digest at the end. Empty if all rows are as written."""
    found: list[str] = []
    seen: dict[RowKey, bytes | None] = {}
    for row in nodes:
        _judge(row, f"node {str(row[0])[:100]!r}", _is_node, node_digest, seen, found)
    for row in sessions:
        _judge(row, f"session {str(row[0])[:100]}", _are_numbers, session_digest, seen, found)
    seal = RowChecksums()
    seal.apply(seen)
    if not found and list(seals) != [seal.row]:
        found.append(f"its {len(seen):,} rows are not those that were sealed: some are gone, or the seal is damaged")
    return found


def _judge(
    row: SealedRow, name: str, is_whole: Any, digest_of: Any, seen: dict[RowKey, bytes | None], found: list[str]
) -> None:
    *values, digest = row
    if not is_whole(values) or digest_of(*values) != digest:
        wrong = f"{name} fails its checksum"
    elif values[0] in seen:
        wrong = f"{name} is there twice"
    else:
        seen[values[0]] = digest
        return
    if len(found) < _PROBLEMS_MAX:
        found.append(wrong)


def _is_node(values: SealedRow) -> bool:
    path, value, *numbers = values
    return isinstance(path, str) and isinstance(value, bytes) and _are_numbers(numbers)


def _are_numbers(values: Iterable[object]) -> bool:
    return all(isinstance(each, int) and -(1 << 63) <= each < 1 << 63 for each in values)


class _Keeper:
    """The tree and its file. Methods that begin with `do_` run on the file's thread."""

    def __init__(self, disk: RealDisk, file: SqliteFile, clock: Clock, rng: Rng) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = clock
        self.rng = rng
        self.file = file
        self.leases = SessionLeases()  # of the lent sessions
        self.sessions: dict[int, SqliteSession] = {}
        self.ending: dict[int, None] = {}  # over, but their nodes still exist
        self._disk = disk
        self.tree = Tree()  # on the file's thread, too
        self._seal = RowChecksums()
        self.bytes_max = sys.maxsize  # of all nodes

    def do_load(self) -> list[tuple[int, int]]:
        """Read the tree. Return the lent sessions with their time-outs. `StorageFault` if anything is not as it was
        written."""
        nodes, sessions = _sound_rows(self.file)
        for path, value, version, owner, numbered, _ in sorted(nodes):
            self.tree.apply([NodeChange(path, Node(path, value, version, owner), numbered)])
        self._seal.apply({row[0]: row[-1] for row in (*nodes, *sessions)})
        lent = []
        for session, timeout_ms, is_lent, _ in sessions:
            if is_lent:
                lent.append((session, timeout_ms))
            else:
                self.do_end(session)
        return lent

    def do_open(self, session: int, timeout_ms: int, is_lent: bool) -> None:
        digest = session_digest(session, timeout_ms, is_lent)
        self._do_write({session: digest}, [(_OPEN, (session, timeout_ms, is_lent, digest))])

    def do_end(self, session: int) -> None:
        self.do_change(self.tree.end(session), closed=session)

    def do_grow(self, changes: list[NodeChange], *, is_lent: bool) -> Node:
        """Change nodes; `Refused` if they would take more memory than allowed. An eighth is reserved for the owner, for
        subjects and operators' decisions."""
        growth = self.tree.growth_bytes(changes)
        reserved = self.bytes_max // _OWNERS_SHARE if is_lent else 0
        if growth > 0 and self.tree.held_bytes + growth > self.bytes_max - reserved:
            raise Refused(
                Code.BUSY,
                f"the nodes of this registry take {self.tree.held_bytes:,} bytes, and there is no memory for more: "
                "remove what is not needed, or give the meta server more (--memory-mib)",
                retry_after_ms=_FULL_RETRY_MS,
            )
        return self.do_change(changes)

    def do_change(self, changes: list[NodeChange], closed: int | None = None) -> Node:
        digests: dict[RowKey, bytes | None] = {change.path: _digest(change) for change in changes}
        statements = list(map(_statement, changes))
        if closed is not None:
            digests[closed] = None
            statements.append((_CLOSE, (closed,)))
        self._do_write(digests, statements)
        self.tree.apply(changes)
        self.file.post(self._tell, touched(changes), changed(changes))
        last = changes[-1].node if changes else None
        return last or Node("", b"", 0, 0)

    def _do_write(self, digests: Mapping[RowKey, bytes | None], statements: list[Statement]) -> None:
        """Write the rows and their seal, all or none."""
        self.file.write([*statements, (_SEAL, self._seal.after(digests))])
        self._seal.apply(digests)

    def _tell(self, paths: list[str], below: list[str]) -> None:
        for session in list(self.sessions.values()):
            session.watches.tell(paths)
            session.watches.tell_below(below)

    # --- on the loop -------------------------------------------------------------------------------------------------

    async def open(self, timeout_ms: int, *, is_lent: bool) -> SqliteSession:
        number = self.rng.bits(62) | 1 << 62  # random: a new file must not know old sessions
        await self.file.run(lambda: self.do_open(number, timeout_ms, is_lent))
        return self.admit(number, is_lent=is_lent)

    def admit(self, number: int, *, is_lent: bool) -> SqliteSession:
        session = SqliteSession(self, number, is_lent=is_lent)
        self.sessions[number] = session
        return session

    async def end(self, number: int) -> None:
        """End a session, and remove its nodes."""
        self.leases.close(number)
        session = self.sessions.pop(number, None)
        if session is not None:
            self.ending[number] = None
            session.ended()
        await self.file.run(lambda: self.do_end(number))
        self.ending.pop(number, None)

    async def look(self) -> None:
        """End expired sessions, again and again."""
        before_ns = self.clock.monotonic_ns()
        while True:
            await asyncio.sleep(_LOOK_S)
            now_ns = self.clock.monotonic_ns()
            if now_ns - before_ns > _AWAY_NS:
                self.leases.forgive(now_ns - before_ns)
            before_ns = now_ns
            for number in [*self.leases.expire(now_ns), *self.ending]:
                try:
                    await self.end(number)
                except DiskFull as fault:  # it is in `ending`, and tried again
                    _log.warning("a session's nodes cannot be removed: %s", fault)
            if not self.file.is_folded:
                await self.file.run(self.file.fold)

    def close(self) -> None:
        self.file.close()
        self._disk.close()


def _statement(change: NodeChange) -> Statement:
    if change.node is None:
        return _DROP, (change.path,)
    node = change.node
    return _PUT, (node.path, node.value, node.version, node.owner, change.numbered, _digest(change))


def _digest(change: NodeChange) -> bytes | None:
    node = change.node
    return None if node is None else node_digest(node.path, node.value, node.version, node.owner, change.numbered)


# --- opening a file ----------------------------------------------------------------------------------------------


def _sound_rows(file: SqliteFile) -> tuple[list[SealedRow], list[SealedRow]]:
    """All nodes and all sessions. Damage outside the rows (an index, the list of free pages) is rebuilt."""
    nodes, sessions = _sealed_rows(file)
    if file.read(_CHECK) != [("ok",)]:
        for statement in ("REINDEX", "VACUUM"):
            file.read(statement)
        nodes, sessions = _sealed_rows(file)
        found = file.read(_CHECK)
        if found != [("ok",)]:
            raise _damaged(file.path, [str(found[0][0])])
        _log.warning("%s was damaged beside its rows, and was made anew from them: check the disk", file.path)
    return nodes, sessions


def _sealed_rows(file: SqliteFile) -> tuple[list[SealedRow], list[SealedRow]]:
    nodes, sessions = file.read(_NODES.format(", digest")), file.read(_SESSIONS.format(", digest"))
    problems = _problems(nodes, sessions, file.read(_SEALS))
    if problems:
        raise _damaged(file.path, problems)
    return nodes, sessions


def _damaged(path: str, problems: Sequence[str]) -> StorageFault:
    more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
    return StorageFault(
        f"{path} is damaged: {problems[0]}{more}. Stop all brokers and delay servers, then restore a backup of it; "
        "without one, move the file away, and the servers begin with an empty registry (docs/internals/registry.md). "
        f"In both cases move {FILE_NAME}-wal and {FILE_NAME}-shm away too, if they are there"
    )


def _upgrade(file: SqliteFile, found: int) -> list[Statement]:
    """Give the rows of a version 1 file their digests. SQLite's own check must find nothing. Damage that SQLite does
    not find was served by version 1 as well."""
    state = file.read(_CHECK)
    if state != [("ok",)]:
        raise _damaged(file.path, [str(state[0][0])])
    sealed = RowChecksums()
    statements: list[Statement] = [(sql, ()) for sql in _UPGRADE]
    for row in file.read(_NODES.format("")):
        digest = node_digest(*row)
        sealed.apply({row[0]: digest})
        statements.append(("UPDATE nodes SET digest = ? WHERE path = ?", (digest, row[0])))
    for row in file.read(_SESSIONS.format("")):
        digest = session_digest(*row)
        sealed.apply({row[0]: digest})
        statements.append(("UPDATE sessions SET digest = ? WHERE id = ?", (digest, row[0])))
    _log.info("%s is of version %d: its rows get checksums", file.path, found)
    return [*statements, ("INSERT INTO seal VALUES (1, ?, ?)", sealed.row)]


class RegistrySurvey(msgspec.Struct, frozen=True):
    """The report of `fairway verify` about a registry in SQLite."""

    file: str
    version: int  # 1: its rows have no checksums yet
    nodes: int
    sessions: int
    problems: list[str]

    @property
    def is_sound(self) -> bool:
        return not self.problems


def survey(directory: str) -> RegistrySurvey:
    """Read and check every row, also while another process owns the directory. Changes nothing."""
    path = f"{directory}/{FILE_NAME}"
    try:
        if has_lost_commits(path):
            return RegistrySurvey(path, 0, 0, 0, [_LOG_PROBLEM])
        [[(version,)], state] = look(path, "PRAGMA user_version", _CHECK)
        if version > _VERSION:
            return RegistrySurvey(path, version, 0, 0, ["a later version of Fairway wrote it: use that one, or newer"])
        is_sealed = version == _VERSION
        queries = [each.format(", digest" if is_sealed else "") for each in (_NODES, _SESSIONS)]
        nodes, sessions, *seals = look(path, *queries, *([_SEALS] if is_sealed else []))
    except StorageFault as fault:
        return RegistrySurvey(path, 0, 0, 0, [str(fault)])
    problems = [] if state == [("ok",)] else [f"SQLite says: {state[0][0]}"]
    if is_sealed:
        problems += _problems(nodes, sessions, seals[0])
    return RegistrySurvey(path, version, len(nodes), len(sessions), problems)


class SqliteSession:
    """A `Registry`. A lent session ends unless it is used or touched in time, and no other session follows on it."""

    def __init__(self, keeper: _Keeper, number: int, *, is_lent: bool) -> None:
        self.on_session: Callable[[SessionState], None] = lambda _: None
        self.watches = SessionWatches(keeper.loop)
        self._keeper = keeper
        self._number = number
        self._is_lent = is_lent
        self._is_over = False

    @property
    def session_id(self) -> int:
        return 0 if self._is_over else self._number

    def certain_until_ns(self) -> int:
        if self._is_over:
            return 0
        return self._keeper.leases.due_ns(self._number) if self._is_lent else _FOR_EVER_NS

    def touch(self) -> None:
        """Renew the session, because its client has sent something."""
        if self._is_over:
            raise SessionOver(f"registry session {self._number:x} is over: its nodes are gone, open another")
        if self._keeper.file.is_closed:
            raise SessionOver("the registry is closed")
        if self._is_lent:
            self._keeper.leases.touch(self._number, self._keeper.clock.monotonic_ns())

    async def get(self, path: str, *, fresh: bool = False) -> Node | None:
        """Read a node. Every read is fresh."""
        checked_path(path)
        return await self._run(lambda: self._keeper.tree.get(path))

    async def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        wanted = [checked_path(path) for path in paths]
        return await self._run(lambda: [self._keeper.tree.get(path) for path in wanted])

    async def children(self, path: str) -> list[str]:
        checked_path(path)
        return await self._run(lambda: self._keeper.tree.children(path))

    async def create(
        self, path: str, value: bytes = b"", *, is_ephemeral: bool = False, is_numbered: bool = False
    ) -> Node:
        checked_path(path)
        checked_value(path, value)
        keeper, owner = self._keeper, self._number if is_ephemeral else 0
        return await self._run(
            lambda: keeper.do_grow(
                keeper.tree.create(path, value, owner=owner, is_numbered=is_numbered), is_lent=self._is_lent
            )
        )

    async def put(self, path: str, value: bytes, version: int) -> Node:
        checked_path(path)
        checked_value(path, value)
        checked_version(path, version)
        keeper = self._keeper
        return await self._run(lambda: keeper.do_grow(keeper.tree.put(path, value, version), is_lent=self._is_lent))

    async def remove(self, path: str, version: int | None = None) -> None:
        checked_path(path)
        checked_version(path, version)
        await self._run(lambda: self._keeper.do_change(self._keeper.tree.remove(path, version)))

    async def owned(self) -> list[str]:
        """The ephemeral nodes of this session."""
        return await self._run(lambda: self._keeper.tree.owned(self._number))

    def watch(self, path: str, changed: Callable[[], None]) -> Watching:
        return self.watches.add(checked_path(path), changed)

    def watch_tree(self, path: str, changed: Callable[[str], None]) -> Watching:
        watching = self.watches.add_tree(checked_path(path), changed)
        self._keeper.loop.call_soon(watching.call, path)
        return watching

    async def close(self) -> None:
        if not self._is_over:
            self.on_session = lambda _: None
            await self._keeper.end(self._number)

    def ended(self) -> None:
        """The session has expired, or was closed."""
        self._is_over = True
        self.watches.tell_all()
        self._keeper.loop.call_soon(lambda: self.on_session(SessionState.OVER))

    async def _run(self, job: Callable[[], T]) -> T:
        self.touch()
        return await self._keeper.file.run(job)


class SqliteRegistry(SqliteSession):
    """The session of the process that owns the directory. It lends sessions to clients."""

    def __init__(self, keeper: _Keeper, number: int) -> None:
        super().__init__(keeper, number, is_lent=False)
        self._fault: StorageFault | None = None
        self._failed = asyncio.Event()
        keeper.file.on_fault = self._fail
        self._looking = keeper.loop.create_task(keeper.look(), name="registry-leases")

    @classmethod
    async def open(cls, directory: str, *, clock: Clock | None = None, rng: Rng | None = None) -> SqliteRegistry:
        """Open the registry in a directory. `DirectoryLocked` if another process has it."""
        disk = RealDisk(directory, post=asyncio.get_running_loop().call_soon_threadsafe)
        try:
            disk.lock()
            path = f"{directory}/{FILE_NAME}"
            if has_lost_commits(path):  # SQLite would drop them, and shorten the log when it closes the file
                raise _damaged(path, [_LOG_PROBLEM])
            file = SqliteFile(path)
            await file.open(_SCHEMA, _VERSION, lambda found: _upgrade(file, found))
            disk.watch(file.poison)
        except BaseException:
            disk.close()
            raise
        keeper = _Keeper(disk, file, clock or RealClock(), rng or RealRng())
        try:
            for number, timeout_ms in await file.run(keeper.do_load):
                keeper.leases.open(number, timeout_ms * 1_000_000, keeper.clock.monotonic_ns())
                keeper.admit(number, is_lent=True)
            own = await keeper.open(0, is_lent=False)
        except BaseException:
            keeper.close()
            raise
        registry = keeper.sessions[own.session_id] = cls(keeper, own.session_id)
        return registry

    def bound(self, bytes_max: int) -> None:
        """Bound the memory of new nodes; existing nodes stay."""
        self._keeper.bytes_max = bytes_max

    @property
    def held_bytes(self) -> int:
        """Memory of all nodes, as an estimate."""
        return self._keeper.tree.held_bytes

    def _fail(self, fault: StorageFault) -> None:
        self._fault = fault
        self._failed.set()

    async def failed(self) -> None:
        """Return when the file cannot be written any more. Then `close` raises the reason."""
        await self._failed.wait()

    async def session_key(self) -> bytes:
        """A secret key, known to nobody else; the same as long as the file exists."""
        node = await self.get(_KEY_PATH)
        if node is None:
            key = self._keeper.rng.bits(8 * _KEY_BYTES).to_bytes(_KEY_BYTES, "little")
            node = await self.create(_KEY_PATH, key)
        return node.value

    async def open_session(self, timeout_ms: int) -> SqliteSession:
        """Lend a session to a client of this process. It ends when it was not used or touched for so long."""
        if not SESSION_MS_MIN <= timeout_ms <= SESSION_MS_MAX:
            raise Misuse(f"a registry session of {timeout_ms} ms: from {SESSION_MS_MIN} to {SESSION_MS_MAX}")
        if len(self._keeper.leases) >= SESSIONS_MAX:
            raise RegistryError(f"{SESSIONS_MAX} registry sessions are open: no more")
        self.touch()
        session = await self._keeper.open(timeout_ms, is_lent=True)
        self._keeper.leases.open(session.session_id, timeout_ms * 1_000_000, self._keeper.clock.monotonic_ns())
        return session

    def session(self, number: int) -> SqliteSession:
        """A lent session, perhaps from before a restart. `SessionOver` if it has ended."""
        self._keeper.leases.check(number)
        return self._keeper.sessions[number]

    async def close(self) -> None:
        """Close the registry. Lent sessions stay for the next process that opens the directory."""
        if self._is_over:
            return
        self._looking.cancel()
        await asyncio.wait([self._looking])
        try:
            if self._fault is None:
                await super().close()
        finally:
            self._keeper.close()
            if self._fault is not None:
                raise self._fault
            if not self._looking.cancelled() and isinstance(fault := self._looking.exception(), StorageFault):
                raise fault
