"""Files wherever Spark can write them, through the file systems that Spark itself uses: a path without a scheme is on
the default one, which is the local disk unless a cluster says otherwise.

Every call into the JVM takes about half a millisecond. So nothing here makes a call for each part of a file, and what
concerns all files of an archive is one job of Spark (`bench/spark_archive.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from fairway.errors import Misuse, StorageFault

_CHUNK_BYTES: Final = 1 << 20
_TAIL_BYTES: Final = 32 << 10  # of a Parquet file: the footer of a few row groups
_FOOTER_LENGTH: Final = slice(-8, -4)  # the last four bytes are the magic
_LOCAL: Final = "file"
# File systems on which a rename fails if the name is taken, however many try it at once.
EXCLUSIVE: Final = (_LOCAL, "hdfs")


class Taken(StorageFault):
    """There is a file of that name already."""


class Listed(NamedTuple):
    """A file: its path relative to the root, and its size."""

    path: str
    size_bytes: int


class Footer(NamedTuple):
    """What a Parquet file says of itself: its rows, and between which values a column of numbers lies."""

    rows: int
    least: int
    most: int


class Files:
    """The files below one root. Paths are relative to it, with `/`."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self.root = root.rstrip("/") or "/"
        try:
            context: Any = spark.sparkContext
        except Exception as error:
            raise Misuse(
                "the jobs need a classic SparkSession: one over Spark Connect cannot reach the cluster's file systems"
            ) from error
        self._jvm: Any = context._jvm
        self._conf: Any = context._jsc.hadoopConfiguration()
        with self._faults("reach", ""):
            self._fs = self._path("").getFileSystem(self._conf)
            qualified = self._fs.makeQualified(self._path(""))
            self._context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(qualified.toUri(), self._conf)
        self.full_root = str(qualified.toString()).rstrip("/")
        self.scheme, self._local_root = str(qualified.toUri().getScheme()), str(qualified.toUri().getPath())
        self._folders: set[str] = set()  # that are there
        self._no_options = context._gateway.new_array(self._jvm.org.apache.hadoop.fs.Options.Rename, 0)

    def full(self, path: str) -> str:
        """The path as Spark takes it."""
        return f"{self.root}/{path}" if path else self.root

    def exists(self, path: str = "") -> bool:
        with self._faults("look at", path):
            return bool(self._fs.exists(self._path(path)))

    def is_directory(self, path: str = "") -> bool:
        with self._faults("look at", path):
            return self.exists(path) and bool(self._fs.getFileStatus(self._path(path)).isDirectory())

    def names(self, path: str) -> list[str]:
        """What is in a directory; nothing, where there is none."""
        if not self.exists(path):
            return []
        with self._faults("list", path):
            return sorted(each.getPath().getName() for each in self._fs.listStatus(self._path(path)))

    def walk(self, path: str = "") -> Iterator[Listed]:
        """Every file below a directory."""
        if not self.exists(path):
            return
        with self._faults("list", path):
            found = self._fs.listFiles(self._path(path), True)
            while found.hasNext():
                each = found.next()
                yield Listed(each.getPath().toString().removeprefix(f"{self.full_root}/"), each.getLen())

    def all_data(self) -> set[str]:
        """Every file that a plain reader may see: below no directory whose name begins with `_` or `.`."""
        found = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(self.root)
        prefix = f"{self.full_root}/"
        return {str(row[0]).removeprefix(prefix) for row in found.select("path").collect()}

    def read(self, path: str) -> bytes:
        with self._faults("read", path):
            stream = self._fs.open(self._path(path))
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

    def write(self, path: str, data: bytes, *, temporary: str) -> None:
        """Whole or not at all: written under another name, then renamed. `Taken` if there is one of that name."""
        with self._faults("write", path):
            stream = self._fs.create(self._path(temporary), True)
            for at in range(0, len(data), _CHUNK_BYTES):
                stream.write(bytearray(data[at : at + _CHUNK_BYTES]))
            stream.close()
        self.claim(temporary, path)

    def claim(self, path: str, to: str) -> None:
        """Rename a file. Of all that claim the same name at once, one gets it; for the others it is `Taken`.

        Hadoop's rename on a local disk looks whether the name is taken, and then renames: two can get it. A hard link
        cannot be had twice. HDFS decides in one step. On a local disk without hard links only Hadoop's way is left.
        """
        if self.scheme == _LOCAL and self._link(path, to):
            self._carry_checksum(path, to)
            self.remove(path)
        else:
            self.move(path, to)

    def _link(self, path: str, to: str) -> bool:
        """Whether the file has its other name now."""
        self.make_folder(to.rpartition("/")[0])
        try:
            Path(self._local_root, to).hardlink_to(Path(self._local_root, path))
        except FileExistsError as error:
            raise Taken(f"cannot write {self.full(to)}: there is a file of that name") from error
        except OSError:
            return False
        return True

    def _carry_checksum(self, path: str, to: str) -> None:
        """Hadoop keeps it beside a local file. A file without one is read unchecked."""
        source, target = (Path(self._local_root, each) for each in (path, to))
        try:
            source.with_name(f".{source.name}.crc").replace(target.with_name(f".{target.name}.crc"))
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageFault(f"cannot write the checksum of {self.full(to)}: {error}") from error

    def move(self, path: str, to: str) -> None:
        """`Taken` if there is one of that name, and nobody makes it at this very moment."""
        self.make_folder(to.rpartition("/")[0])
        with self._faults("write", to):
            self._context.rename(self._path(path), self._path(to), self._no_options)

    def make_folder(self, path: str) -> None:
        if path not in self._folders:
            with self._faults("make", path):
                self._fs.mkdirs(self._path(path))
            self._folders.add(path)

    def remove(self, path: str) -> None:
        """A file, or a directory with all that is in it; one that is gone already is fine."""
        with self._faults("remove", path):
            self._fs.delete(self._path(path), True)

    def remove_all(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.remove(path)

    def footer(self, file: Listed, column: str) -> Footer:
        """From the end of a Parquet file alone."""
        tail = self._tail(file, _TAIL_BYTES)
        wanted = int.from_bytes(tail[_FOOTER_LENGTH], "little") + 8
        if wanted > len(tail):
            tail = self._tail(file, wanted)
        try:
            return _footer(pq.read_metadata(pa.BufferReader(tail)), column)
        except pa.ArrowException as error:
            raise StorageFault(f"{self.full(file.path)} is not a whole Parquet file: {error}") from error

    def _tail(self, file: Listed, size_bytes: int) -> bytes:
        with self._faults("read", file.path):
            stream = self._fs.open(self._path(file.path))
            try:
                stream.seek(max(file.size_bytes - size_bytes, 0))
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.full(path))

    @contextmanager
    def _faults(self, attempted: str, path: str) -> Iterator[None]:
        """Java's exceptions in our own words."""
        try:
            yield
        except Py4JJavaError as error:
            cause = str(error.java_exception.toString())
            kind = Taken if "FileAlreadyExists" in cause else StorageFault
            raise kind(f"cannot {attempted} {self.full(path)}: {cause}") from error


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
