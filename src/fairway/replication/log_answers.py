"""What a master answers about its logs alone: how far they reach, which records they hold, bytes to repair a copy with.

Anybody may be told so, whether it follows or not: nothing here changes anything.
"""

from __future__ import annotations

from fairway.errors import Code, Refused
from fairway.protocol.replicating import ACTIONS, MESSAGES, Compare, Compared, LogExtent, Mend, Mended, RecordMark
from fairway.storage import copying
from fairway.storage.log import Damaged, Log
from fairway.storage.store import Store

COMPARED_MAX = 1_024
_LOGS = (MESSAGES, ACTIONS)


def extent(store: Store, log: int) -> LogExtent:
    of = _log(store, log)
    return LogExtent(of.log_id, store.first_bases()[log], store.ends()[log], of.committed_end)


def compare(store: Store, asked: Compare) -> Compared:
    """Epoch and checksum of the records at these positions."""
    _log(store, asked.log)
    if len(asked.positions) > COMPARED_MAX:
        raise Refused(Code.BAD_REQUEST, f"{len(asked.positions)} positions at once: at most {COMPARED_MAX}")
    marks = store.marks(asked.log, asked.positions)
    if copying.ROTTEN_MARK in marks and not asked.knows_rot:
        position = asked.positions[marks.index(copying.ROTTEN_MARK)]
        raise Refused(Code.DAMAGED, f"what was at {position} of log {asked.log} has rotted: nobody can compare")
    return Compared([RecordMark(epoch, crc) for epoch, crc in marks])


def mend(store: Store, asked: Mend, bytes_max: int) -> tuple[Mended, bytes]:
    """Whole records, from one on that begins there, below the committed end."""
    of = _log(store, asked.log)
    rest = of.committed_end - asked.position
    if rest <= 0:
        raise Refused(Code.BAD_REQUEST, "only what is committed can be mended with")
    try:
        chunk = store.read_chunk(asked.log, asked.position, min(asked.size, rest, bytes_max))
    except Damaged as damaged:
        raise Refused(Code.DAMAGED, str(damaged)) from damaged
    if chunk is None or chunk.position + len(chunk.data) > of.committed_end:
        raise Refused(Code.BAD_REQUEST, "only what is committed can be mended with")
    return Mended(chunk.position), chunk.data


def _log(store: Store, log: int) -> Log:
    if log not in _LOGS:
        raise Refused(Code.BAD_REQUEST, f"there is no log {log}: 0 is that of messages, 1 that of actions")
    return store.messages.log if log == MESSAGES else store.actions.log
