"""The keys of fresh messages, for groups that keep the order of keys.

A batch stores key hashes in a section that is never compressed, so the broker does not decompress the batch. But the
broker has to read the batch before it knows whether a message may go out. `KeyFinder` keeps the keys it has read until
the cursor has passed them. A pull looks at a few messages, and the next pull goes on from there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from fairway import limits
from fairway.batch import layout
from fairway.broker import response_bounds
from fairway.broker.groups import GroupHost
from fairway.broker.message_reader import MessageReader
from fairway.groups import Handout, Range
from fairway.scheduling import Actor
from fairway.storage.message_log import StoredBatch

WINDOW_MESSAGES = 4_096  # read together: the largest batch; 32 KB in memory for each such group
LOOK_MESSAGES = 512  # a pull looks at least at so many, and at four times as many as it asks for: some cannot go out
_WINDOW_BYTES = 512  # beside the keys
_TRIES_MAX = 4  # where a try meets damage, the next try steps over it


class Window(NamedTuple):
    """The keys of consecutive messages."""

    first: int
    keys: array[int]
    config_version: int  # the configuration whose filter chose the messages

    @property
    def held_bytes(self) -> int:
        return _WINDOW_BYTES + self.keys.itemsize * len(self.keys)


class Fresh(NamedTuple):
    """The messages that may be handed out for the first time, and their keys. No range: nothing."""

    range: Range | None
    keys: Sequence[int] = ()


class KeyFinder:
    """Looks up keys for all groups of a broker."""

    def __init__(self, reader: MessageReader, bytes_max: int = limits.KEY_WINDOWS_BYTES_MAX) -> None:
        """`bytes_max`: of all windows; beyond it the least recently used window goes."""
        self._reader = reader
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._windows: OrderedDict[int, Window] = OrderedDict()  # by the group's number; least recently used first

    def fresh(self, actor: Actor, source: GroupHost, messages_max: int, bytes_max: int, look_max: int) -> Fresh | None:
        """The group's next fresh messages, at most `look_max`. None: a fetch is under way."""
        look = min(max(4 * messages_max, LOOK_MESSAGES), look_max)
        found = _within(self._windows.get(source.id), source, look)
        if found is not None:
            self._windows.move_to_end(source.id)
        for _ in range(_TRIES_MAX if found is None else 0):
            first, state_machine = source.next_fresh, source.state_machine
            fresh = self._reader.fresh(source.subject_id, first, state_machine.config, WINDOW_MESSAGES, bytes_max)
            if fresh is None or not fresh[1]:
                return Fresh(fresh)
            lot = Handout(fresh[0], 1, (fresh,))
            batches = self._reader.batches(actor, source.subject_id, [lot])
            if batches is None:
                return None
            if not response_bounds.missing([lot], batches):
                window = Window(fresh[0], _keys(batches, fresh), state_machine.config.version)
                self._keep(source.id, window)
                keys = window.keys[:look].tolist()
                return Fresh((fresh[0], len(keys)), keys)
        return found or Fresh(None)

    def forget(self, group_id: int) -> None:
        """Drop the group's window, which may be wrong."""
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
    """The rest of the window; None: nothing is left, or the window is for another place or another filter."""
    if window is None or window.config_version != source.state_machine.config.version:
        return None
    offset = source.next_fresh - window.first
    if not 0 <= offset < len(window.keys):
        return None
    left = window.keys[offset : offset + look].tolist()
    return Fresh((window.first + offset, len(left)), left)


def _keys(batches: Sequence[StoredBatch], wanted: Range) -> array[int]:
    """The keys of the messages in that range, which the batches hold without a gap."""
    found = array("Q")
    first, end = wanted[0], wanted[0] + wanted[1]
    for stored in batches:
        header = layout.peek(stored.data)
        begin = stored.entry.first_sequence
        low, high = max(first - begin, 0), min(end - begin, header.count)
        hashes = layout.key_hashes(stored.data, header)
        found.frombytes(bytes(8 * (high - low)) if hashes is None else hashes[low:high].tobytes())
    return found
