"""Files wherever Spark can write them: a path without a scheme is on the default file system, which is the local disk
unless a cluster says otherwise.

Whole files are read and written through the JVM everywhere, since Hadoop makes and checks the checksums that lie beside
local files. All else goes by the shortest way that the disk has (`disks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from fairway.errors import StorageFault
from fairway.spark.jobs.disks import HadoopDisk, Listed, LocalDisk

_TAIL_BYTES: Final = 32 << 10  # of a Parquet file: the footer of a few row groups
_FOOTER_LENGTH: Final = slice(-8, -4)  # the last four bytes are the magic
_LOCAL: Final = "file"
# File systems on which a rename fails if the name is taken, however many try it at once.
EXCLUSIVE: Final = (_LOCAL, "hdfs")


class Footer(NamedTuple):
    """What a Parquet file says of itself: its rows, and between which values a column of numbers lies."""

    rows: int
    least: int
    most: int


class Files:
    """The files below one root. Paths are relative to it, with `/`."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self.root = root.rstrip("/") or "/"
        self._hadoop = HadoopDisk(spark, self.root)
        self.full_root, self.scheme = self._hadoop.full_root, self._hadoop.scheme
        self._local = LocalDisk(self._hadoop.root_path) if _is_local(self._hadoop) else None
        self._disk: HadoopDisk | LocalDisk = self._local or self._hadoop
        self._folders: set[str] = set()  # that are there

    def full(self, path: str) -> str:
        """The path as Spark takes it."""
        return f"{self.root}/{path}" if path else self.root

    def exists(self, path: str = "") -> bool:
        return self._disk.exists(path)

    def is_directory(self, path: str = "") -> bool:
        return self._disk.is_directory(path)

    def names(self, path: str) -> list[str]:
        """What is in a directory; nothing, where there is none."""
        return self._disk.names(path) if self.exists(path) else []

    def walk(self, path: str = "") -> Iterator[Listed]:
        """Every file below a directory."""
        if self.exists(path):
            yield from self._disk.walk(path)

    def all_data(self) -> set[str]:
        """Every file that a plain reader may see: below no directory whose name begins with `_` or `.`."""
        return set(self._disk.visible())

    def read(self, path: str) -> bytes:
        return self._hadoop.read(path)

    def write(self, path: str, data: bytes, *, temporary: str) -> None:
        """Whole or not at all: written under another name, then renamed. `Taken` if there is one of that name."""
        self._hadoop.create(temporary, data)
        self.claim(temporary, path)

    def claim(self, path: str, to: str) -> None:
        """Rename a file. Of all that claim the same name at once, one gets it; for the others it is `Taken`.

        A rename on a local disk looks whether the name is taken, and then renames: two can get it. A hard link cannot
        be had twice. HDFS decides in one step. On a local disk without hard links only the rename is left.
        """
        if self._local is not None and self._link(path, to):
            self._carry_checksum(path, to)
            self.remove(path)
        else:
            self.move(path, to)

    def _link(self, path: str, to: str) -> bool:
        """Whether the file has its other name now."""
        self.make_folder(to.rpartition("/")[0])
        return self._local is not None and self._local.link(path, to)

    def _carry_checksum(self, path: str, to: str) -> None:
        if self._local is not None:
            self._local.rename_checksum(path, to)

    def move(self, path: str, to: str) -> None:
        """`Taken` if there is one of that name, and nobody makes it at this very moment."""
        self.make_folder(to.rpartition("/")[0])
        self._disk.rename(path, to)

    def make_folder(self, path: str) -> None:
        if path not in self._folders:
            self._disk.make_folder(path)
            self._folders.add(path)

    def remove(self, path: str) -> None:
        """A file, or a directory with all that is in it; one that is gone already is fine."""
        self._disk.remove(path)

    def remove_all(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.remove(path)

    def footer(self, file: Listed, column: str) -> Footer:
        """From the end of a Parquet file alone."""
        tail = self._disk.tail(file, _TAIL_BYTES)
        wanted = int.from_bytes(tail[_FOOTER_LENGTH], "little") + 8
        if wanted > len(tail):
            tail = self._disk.tail(file, wanted)
        try:
            return _footer(pq.read_metadata(pa.BufferReader(tail)), column)
        except pa.ArrowException as error:
            raise StorageFault(f"{self.full(file.path)} is not a whole Parquet file: {error}") from error


def _is_local(disk: HadoopDisk) -> bool:
    """Whether the operating system finds the files under the names that the JVM gives them. A JVM in a locale without
    UTF-8 writes `?` for letters that the locale lacks; names of subjects are plain, a path may have such letters."""
    return disk.scheme == _LOCAL and (disk.root_path.isascii() or disk.writes_utf_8)


def _footer(metadata: pq.FileMetaData, column: str) -> Footer:
    chunks = [
        metadata.row_group(at).column(place)
        for at in range(metadata.num_row_groups)
        for place in range(metadata.num_columns)
    ]
    values = [chunk.statistics for chunk in chunks if chunk.path_in_schema == column]
    if not metadata.num_rows or not values:
        return Footer(0, 0, 0)
    if not all(each is not None and each.has_min_max for each in values):
        raise StorageFault(f"a Parquet file does not say between which values {column} lies")
    return Footer(metadata.num_rows, min(each.min for each in values), max(each.max for each in values))
