"""The keys of the messages that a group by key has not handed out yet.

They stand in the section of a batch that is never compressed, so no batch is opened; but it has to be read, before it
is known whether anything in it may go out. What was found is kept until the cursor has passed it: a pull looks at a few
messages, and the next one goes on there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from fairway import limits
from fairway.batch import layout, section
from fairway.broker import fitting
from fairway.broker.groups import GroupHost
from fairway.broker.reading import MessageReader
from fairway.groups import Handout, Range
from fairway.scheduling import Actor
from fairway.storage.message_log import StoredBatch

WINDOW_MESSAGES = 4_096  # read together: the largest batch; 32 KB in memory for each group by key
LOOK_MESSAGES = 512  # looked at for one pull, at least, and four times as many as it asks for: some cannot go out
_WINDOW_BYTES = 512  # beside the keys
_TRIES_MAX = 4  # where damage is met it is stepped over the next time


class Window(NamedTuple):
    """Keys of messages one behind the other."""

    first: int
    keys: array[int]
    config_version: int  # by whose filter they were found

    @property
    def held_bytes(self) -> int:
        return _WINDOW_BYTES + self.keys.itemsize * len(self.keys)


class Fresh(NamedTuple):
    """What may be handed out for the first time, and its keys; no range: nothing."""

    range: Range | None
    keys: Sequence[int] = ()


class KeyFinder:
    """Looks up keys for all groups of a broker."""

    def __init__(self, reader: MessageReader, bytes_max: int = limits.KEY_WINDOWS_BYTES_MAX) -> None:
        """`bytes_max`: of all windows; beyond it the group that has not pulled for longest loses its own."""
        self._reader = reader
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._windows: OrderedDict[int, Window] = OrderedDict()  # by the group's number; least recently used first

    def fresh(self, actor: Actor, source: GroupHost, messages_max: int, bytes_max: int, look_max: int) -> Fresh | None:
        """From where the group is on, at most `look_max` messages. None: it is being fetched."""
        look = min(max(4 * messages_max, LOOK_MESSAGES), look_max)
        found = _within(self._windows.get(source.id), source, look)
        if found is not None:
            self._windows.move_to_end(source.id)
        for _ in range(_TRIES_MAX if found is None else 0):
            first, law = source.next_fresh, source.law
            fresh = self._reader.fresh(source.subject_id, first, law.config, WINDOW_MESSAGES, bytes_max)
            if fresh is None or not fresh[1]:
                return Fresh(fresh)
            lot = Handout(fresh[0], 1, (fresh,))
            batches = self._reader.batches(actor, source.subject_id, [lot])
            if batches is None:
                return None
            if not fitting.missing([lot], batches):
                window = Window(fresh[0], _keys(batches, fresh), law.config.version)
                self._keep(source.id, window)
                keys = window.keys[:look].tolist()
                return Fresh((fresh[0], len(keys)), keys)
        return found or Fresh(None)

    def forget(self, group_id: int) -> None:
        """The group's window is not to be trusted any more."""
        window = self._windows.pop(group_id, None)
        if window is not None:
            self.held_bytes -= window.held_bytes

    def _keep(self, group_id: int, window: Window) -> None:
        self.forget(group_id)
        self._windows[group_id] = window
        self.held_bytes += window.held_bytes
        while self.held_bytes > self.bytes_max:
            self.forget(next(iter(self._windows)))


def _within(window: Window | None, source: GroupHost, look: int) -> Fresh | None:
    """What is left of the window; None: nothing, or it was made for another place or another filter."""
    if window is None or window.config_version != source.law.config.version:
        return None
    offset = source.next_fresh - window.first
    if not 0 <= offset < len(window.keys):
        return None
    left = window.keys[offset : offset + look].tolist()
    return Fresh((window.first + offset, len(left)), left)


def _keys(batches: Sequence[StoredBatch], wanted: Range) -> array[int]:
    """Of the messages in that range, which the batches hold without a gap."""
    found = array("Q")
    first, end = wanted[0], wanted[0] + wanted[1]
    for stored in batches:
        header = layout.peek(stored.data)
        begin = stored.entry.first_sequence
        low, high = max(first - begin, 0), min(end - begin, header.count)
        hashes = section.key_hashes(stored.data, header)
        found.frombytes(bytes(8 * (high - low)) if hashes is None else hashes[low:high].tobytes())
    return found
