"""Remains that a crash may leave behind and a kill rarely does.

A SIGKILL leaves whole writes; a power cut may leave a part of one, or a file that was created and never written. Both
are planted here, strictly behind the log's end, where nothing was ever acknowledged.
"""

from __future__ import annotations

import random
from pathlib import Path

from fairway.storage import action_log, message_log, segment

_TAIL_BYTES_MAX = 5_000


def plant(root: Path, rng: random.Random) -> None:
    """A torn tail and a newborn segment in each log that has begun."""
    for directory in (message_log.DIRECTORY, action_log.DIRECTORY):
        sizes = {
            base: path.stat().st_size
            for path in (root / directory).glob("*" + segment.SUFFIX)
            if (base := segment.base_of(path.name)) is not None and path.stat().st_size
        }
        if sizes:
            newest = max(sizes)
            tail = _tail(root / segment.file_name(directory, newest), rng)
            (root / segment.file_name(directory, newest + sizes[newest] + len(tail))).touch()


def _tail(newest: Path, rng: random.Random) -> bytes:
    """Zeros, noise, or the beginning of what could have been a record."""
    size = rng.randrange(1, _TAIL_BYTES_MAX)
    data = newest.read_bytes()
    tail = rng.choice((bytes(size), rng.randbytes(size), data[segment.HEADER_BYTES :][:size] or b"\0"))
    with newest.open("ab") as file:
        file.write(tail)
    return tail
