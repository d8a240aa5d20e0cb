"""A file system whose power can be cut: ext4 in an image file, mounted through a loop device.

The cut is the kernel's own (`EXT4_IOC_SHUTDOWN` without a flush of the journal): from that instant nothing reaches the
image any more, and what was only in memory is gone. Mounting it again replays the journal, as after a real one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_SHUTDOWN = 0x8004587D
_WITHOUT_LOG_FLUSH = struct.pack("<I", 2)
_IMAGE_BYTES = 64 * 1024 * 1024  # sparse
_TRIES = 50


class NotAllowed(Exception):
    """This machine, or this user on it, cannot mount an image."""


class Rack:
    """One image and its mount point; `cut` and `restore` the power."""

    def __init__(self, folder: Path, image_bytes: int = _IMAGE_BYTES) -> None:
        self._image = folder / "image"
        self._image_bytes = image_bytes
        self.mounted_at = folder / "mounted"

    @property
    def root(self) -> Path:
        """Where a store may live."""
        return self.mounted_at / "data"

    def build(self) -> None:
        self.mounted_at.mkdir()
        with self._image.open("wb") as image:
            image.truncate(self._image_bytes)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self.mount()

    def mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.mounted_at))

    def cut(self) -> None:
        fd = os.open(self.mounted_at, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, _WITHOUT_LOG_FLUSH)
        except OSError as error:
            raise NotAllowed(f"the power of ext4 cannot be cut here: {error.strerror}") from error
        finally:
            os.close(fd)

    def restore(self) -> None:
        self.unmount()
        self.mount()

    def unmount(self) -> None:
        for _ in range(_TRIES):  # a process that was just killed may hold it for a moment
            if not self.mounted_at.is_mount():
                return
            if subprocess.run(["umount", str(self.mounted_at)], capture_output=True, check=False).returncode:
                time.sleep(0.1)
        subprocess.run(["umount", "--lazy", str(self.mounted_at)], capture_output=True, check=False)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotAllowed(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise NotAllowed(f"{command[0]}: {(done.stderr or done.stdout).strip()}")


@contextlib.contextmanager
def rack(image_bytes: int = _IMAGE_BYTES) -> Iterator[Rack]:
    """A mounted image, unmounted and removed at the end, whatever happens; `NotAllowed` where that cannot be had."""
    folder = Path(tempfile.mkdtemp(prefix="fairway-power-"))
    made = Rack(folder, image_bytes)

    def clear() -> None:
        made.unmount()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(clear)
    try:
        made.build()
        yield made
    finally:
        clear()
        atexit.unregister(clear)
