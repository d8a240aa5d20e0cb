"""Files wherever Spark can write them, through the file systems that Spark itself uses: a path without a scheme is on
the default one, which is the local disk unless a cluster says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from fairway.errors import Misuse, StorageFault

_CHUNK_BYTES = 1 << 20


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
        self.move(temporary, path)

    def move(self, path: str, to: str) -> None:
        """`Taken` if there is one of that name."""
        with self._faults("write", to):
            target = self._path(to)
            if not self._fs.exists(target.getParent()):
                self._fs.mkdirs(target.getParent())
            self._context.rename(self._path(path), target, self._no_options)

    def remove(self, path: str) -> None:
        """A file, or a directory with all that is in it; one that is gone already is fine."""
        with self._faults("remove", path):
            self._fs.delete(self._path(path), True)

    def remove_all(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.remove(path)

    def footer(self, path: str, column: str) -> Footer:
        """From the end of a Parquet file alone."""
        with self._faults("read", path):
            hadoop = self._jvm.org.apache.parquet.hadoop
            source = hadoop.util.HadoopInputFile.fromPath(self._path(path), self._conf)
            reader = hadoop.ParquetFileReader.open(source)
            try:
                parts = [
                    (block.getRowCount(), part.getStatistics())
                    for block in reader.getFooter().getBlocks()
                    for part in block.getColumns()
                    if part.getPath().toDotString() == column
                ]
            finally:
                reader.close()
            if not parts:
                return Footer(0, 0, 0)
            least, most = min(each.genericGetMin() for _, each in parts), max(each.genericGetMax() for _, each in parts)
            return Footer(sum(rows for rows, _ in parts), least, most)

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
