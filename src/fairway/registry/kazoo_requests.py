"""Two requests of ZooKeeper 3.6 that kazoo does not have: a watch on a whole tree, and many reads in one.

Kazoo serializes a request by its `serialize`, and reads the answer by its `deserialize`. A server before 3.6 answers
both with `UnimplementedError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

PERSISTENT_RECURSIVE = 1
_GET_DATA = 4
_ERROR = -1


@dataclass(frozen=True, slots=True)
class AddWatch:
    """From now on, tell of every change at or below a node, on this connection."""

    path: str
    mode: int = PERSISTENT_RECURSIVE

    type: ClassVar = 106

    def serialize(self) -> bytearray:
        from kazoo.protocol.serialization import int_struct, write_string

        return bytearray(write_string(self.path) + int_struct.pack(self.mode))

    @classmethod
    def deserialize(cls, _data: bytes, _offset: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class ReadMany:
    """The values of many nodes. Each answer is (value, stat), or an error of kazoo's."""

    paths: Sequence[str]

    type: ClassVar = 22

    def serialize(self) -> bytearray:
        from kazoo.protocol.serialization import multiheader_struct, write_string

        parts = bytearray()
        for path in self.paths:
            parts += multiheader_struct.pack(_GET_DATA, False, _ERROR)
            parts += write_string(path)
            parts.append(0)  # no watch
        parts += multiheader_struct.pack(_ERROR, True, _ERROR)
        return parts

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> list[Any]:
        from kazoo.exceptions import EXCEPTIONS
        from kazoo.protocol.serialization import int_struct, multiheader_struct, read_buffer, stat_struct
        from kazoo.protocol.states import ZnodeStat

        found: list[Any] = []
        while True:
            kind, is_done, _ = multiheader_struct.unpack_from(data, offset)
            offset += multiheader_struct.size
            if is_done:
                return found
            if kind == _ERROR:
                found.append(EXCEPTIONS[int_struct.unpack_from(data, offset)[0]]())
                offset += int_struct.size
            else:
                value, offset = read_buffer(data, offset)
                found.append((value, ZnodeStat._make(stat_struct.unpack_from(data, offset))))
                offset += stat_struct.size
