"""The highest epoch that this copy has promised to serve: a small file in its data directory.

It is published before the first acknowledgement under a new epoch, and before a copy leads one. Whoever has promised an
epoch follows no earlier one, also after a restart, and also where its logs have been cut back below it.
"""

from __future__ import annotations

import asyncio
import struct

from fairway.batch import checksum
from fairway.errors import NoSuchFile, StorageFault
from fairway.world.disk import Disk

FILE = "promise"
MAGIC = b"FWYPRM\r\n"
_COVERED = struct.Struct("<8sQ")
_CRC = struct.Struct("<I")


class EpochPromise:
    """Of one data directory; `epoch` is 0 where nothing was ever promised."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.epoch = _read(disk)

    async def keep(self, epoch: int) -> None:
        """Return once it is on disk that this epoch is served, and none below."""
        if epoch <= self.epoch:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(fault: StorageFault | None) -> None:
            if future.done():
                return
            if fault is None:
                future.set_result(None)
            else:
                future.set_exception(fault)

        covered = _COVERED.pack(MAGIC, epoch)
        self._disk.publish_later(FILE, [covered, _CRC.pack(checksum(covered))], done)
        await future
        self.epoch = max(self.epoch, epoch)


def _read(disk: Disk) -> int:
    try:
        file = disk.open(FILE)
    except NoSuchFile:
        return 0
    try:
        data = file.read(0, _COVERED.size + _CRC.size)
    finally:
        file.close()
    covered, crc = data[: _COVERED.size], data[_COVERED.size :]
    if not covered.startswith(MAGIC) or crc != _CRC.pack(checksum(covered)):
        raise StorageFault(
            f"the file {FILE} is damaged, and so it is not known which masters this copy may follow: start with an "
            "empty directory, which is filled from the master"
        )
    return int(_COVERED.unpack(covered)[1])
