"""A replica brings what has rotted on its master, which says in its answers what it wants (`repairs`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fairway import limits
from fairway.errors import RemoteProtocolError
from fairway.protocol import Bytes, ControlMessage
from fairway.protocol.frames import stretch
from fairway.protocol.replicating import ACTIONS, MESSAGES, Give, Want
from fairway.replication.wire import OnResponse
from fairway.storage.log import Damaged
from fairway.storage.store import Store

BYTES_MAX = limits.MIB  # in one GIVE, unless a record is larger


class MasterConnection(Protocol):
    """The connection to the master."""

    def send(self, message: ControlMessage, told: OnResponse, attachments: Sequence[Bytes] = ()) -> None: ...


def give(store: Store, way: MasterConnection, epoch: int, want: Want) -> None:
    """Send it, or say why it is not to be had here. It was asked for because it was lost: the loop may wait for it."""
    if want.log not in (MESSAGES, ACTIONS):
        raise RemoteProtocolError(f"the master wants something of log {want.log}: there are two, 0 and 1")
    directory_id = store.identity.directory_id
    try:
        chunk = store.read_chunk(want.log, want.position, min(want.size, BYTES_MAX))
        sentence = "" if chunk is not None else "this copy does not reach so far"
    except Damaged as damaged:
        chunk, sentence = None, str(damaged)
    attached = [] if chunk is None else [stretch(chunk.data)]
    way.send(Give(epoch, directory_id, want.log, want.position, sentence), _nothing, attached)


def _nothing(_message: ControlMessage, _attachments: Sequence[Bytes]) -> None:
    """If the master wants more, it says so."""
