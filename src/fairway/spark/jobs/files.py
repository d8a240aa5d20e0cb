"""The files below one root, wherever Spark can read and write. Paths are relative to the root, with `/`.

    HadoopDisk   Hadoop's file systems, which Spark reads and writes: HDFS, object stores, local disks
    LocalDisk    a local disk, through the calls of the operating system
    Files        the files of an archive, over the fastest of the two

A path without a scheme is on the default file system, which is the local disk unless a cluster configures another.

A call into the JVM takes half a millisecond and more. Pip's Spark has no native library of Hadoop, so Hadoop's local
file system starts a process (`chmod`, `readlink`, `ls`) for each file that it creates, renames or lists. Moving one
file took 40 ms beside other work, and an archive of 500 subjects took minutes. The driver's JVM runs on the same
machine as this process, and both see the same files.

Hadoop keeps a checksum beside each local file. `LocalDisk` moves and removes the checksum with its file, and hides it
from listings, as Hadoop does. Whole files are read and written through the JVM everywhere, because Hadoop makes and
checks those checksums. For everything else `Files` uses `LocalDisk` if it can.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from fairway.errors import Misuse, StorageFault

_CHUNK_BYTES: Final = 1 << 20


class NameTaken(StorageFault):
    """A file of that name exists already."""


class Listed(NamedTuple):
    """A file: its path relative to the root, and its size."""

    path: str
    size_bytes: int


class HadoopDisk:
    """Files through the JVM. An operation on all files of an archive is one Spark job, not a call for each file."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self._root = root
        try:
            context: Any = spark.sparkContext
        except Exception as error:
            raise Misuse(
                "the jobs need a classic SparkSession: one over Spark Connect cannot reach the cluster's file systems"
            ) from error
        self._jvm: Any = context._jvm
        configuration: Any = context._jsc.hadoopConfiguration()
        with self._faults("reach", ""):
            self._fs = self._path("").getFileSystem(configuration)
            qualified = self._fs.makeQualified(self._path(""))
            self._context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(qualified.toUri(), configuration)
        self.full_root = str(qualified.toString()).rstrip("/")
        self.scheme, self.root_path = str(qualified.toUri().getScheme()), str(qualified.toUri().getPath())
        self._no_options = context._gateway.new_array(self._jvm.org.apache.hadoop.fs.Options.Rename, 0)

    @property
    def writes_utf_8(self) -> bool:
        """Whether the JVM's names of local files are UTF-8."""
        return str(self._jvm.java.lang.System.getProperty("sun.jnu.encoding")).upper() in {"UTF-8", "UTF8"}

    def exists(self, path: str) -> bool:
        with self._faults("look at", path):
            return bool(self._fs.exists(self._path(path)))

    def is_directory(self, path: str = "") -> bool:
        with self._faults("look at", path):
            return self.exists(path) and bool(self._fs.getFileStatus(self._path(path)).isDirectory())

    def names(self, path: str) -> list[str]:
        with self._faults("list", path):
            return sorted(each.getPath().getName() for each in self._fs.listStatus(self._path(path)))

    def walk(self, path: str) -> Iterator[Listed]:
        """Every file below a directory."""
        with self._faults("list", path):
            found = self._fs.listFiles(self._path(path), True)
            while found.hasNext():
                each = found.next()
                yield Listed(each.getPath().toString().removeprefix(f"{self.full_root}/"), each.getLen())

    def visible(self) -> Iterator[str]:
        """Every file that a plain reader may see: below no directory whose name begins with `_` or `.`."""
        found = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(self._root)
        for row in found.select("path").collect():
            yield str(row[0]).removeprefix(f"{self.full_root}/")

    def read(self, path: str, begin: int = 0) -> bytes:
        """The bytes of a file from `begin` on."""
        with self._faults("read", path):
            stream = self._fs.open(self._path(path))
            try:
                stream.seek(begin)
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

    def tail(self, file: Listed, size_bytes: int) -> bytes:
        """The last bytes of a file, or all of a shorter one."""
        return self.read(file.path, max(file.size_bytes - size_bytes, 0))

    def create(self, path: str, data: bytes) -> None:
        with self._faults("write", path):
            stream = self._fs.create(self._path(path), True)
            for at in range(0, len(data), _CHUNK_BYTES):
                stream.write(bytearray(data[at : at + _CHUNK_BYTES]))
            stream.close()

    def rename(self, path: str, to: str) -> None:
        """Rename a file; `NameTaken` if the name exists, unless another program makes it at this very moment."""
        with self._faults("write", to):
            self._context.rename(self._path(path), self._path(to), self._no_options)

    def make_folder(self, path: str) -> None:
        with self._faults("make", path):
            self._fs.mkdirs(self._path(path))

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with its contents; a missing one is fine."""
        with self._faults("remove", path):
            self._fs.delete(self._path(path), True)

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self._root}/{path}" if path else self._root)

    @contextmanager
    def _faults(self, attempted: str, path: str) -> Iterator[None]:
        """Turn Java's exceptions into errors of Fairway."""
        try:
            yield
        except Py4JJavaError as error:
            cause = str(error.java_exception.toString())
            kind = NameTaken if "FileAlreadyExists" in cause else StorageFault
            named = f"{self._root}/{path}" if path else self._root
            raise kind(f"cannot {attempted} {named}: {cause}") from error


class LocalDisk:
    """Files without the JVM."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def exists(self, path: str) -> bool:
        with _faults("look at", self._path(path)):
            return self._path(path).exists()

    def is_directory(self, path: str = "") -> bool:
        with _faults("look at", self._path(path)):
            return self._path(path).is_dir()

    def names(self, path: str) -> list[str]:
        folder = self._path(path)
        with _faults("list", folder):
            return sorted(each.name for each in folder.iterdir() if not _is_checksum(each))

    def walk(self, path: str) -> Iterator[Listed]:
        """Every file below a directory."""
        folder = self._path(path)
        with _faults("list", folder):
            for each in sorted(folder.iterdir()):
                inner = f"{path}/{each.name}" if path else each.name
                if each.is_dir():
                    yield from self.walk(inner)
                elif not _is_checksum(each):
                    yield Listed(inner, each.stat().st_size)

    def visible(self) -> Iterator[str]:
        """Every file that a plain reader may see: below no directory whose name begins with `_` or `.`.

        Files that other runs remove meanwhile are left out.
        """
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            with _faults("list", self._path(folder)), suppress(FileNotFoundError):
                for each in self._path(folder).iterdir():
                    inner = f"{folder}/{each.name}" if folder else each.name
                    if each.name.startswith(("_", ".")):
                        continue
                    if each.is_dir():
                        waiting.append(inner)
                    else:
                        yield inner

    def tail(self, file: Listed, size_bytes: int) -> bytes:
        """The last bytes of a file, or all of a shorter one."""
        path = self._path(file.path)
        with _faults("read", path), path.open("rb") as stream:
            stream.seek(max(file.size_bytes - size_bytes, 0))
            return stream.read()

    def link(self, path: str, to: str) -> bool:
        """Give the file a second name; False: the file system has no hard links."""
        target = self._path(to)
        try:
            target.hardlink_to(self._path(path))
        except FileExistsError as error:
            raise _taken(target) from error
        except OSError:
            return False
        return True

    def rename(self, path: str, to: str) -> None:
        """Rename a file; `NameTaken` if the name exists, unless another program makes it at this very moment."""
        target = self._path(to)
        with _faults("write", target):
            if target.exists():
                raise _taken(target)
            self._path(path).rename(target)
        self.rename_checksum(path, to)

    def rename_checksum(self, path: str, to: str) -> None:
        """Rename a file's checksum, if it has one: Hadoop reads a file without a checksum unchecked."""
        target = self._path(to)
        with _faults("write the checksum of", target), suppress(FileNotFoundError):
            _checksum(self._path(path)).replace(_checksum(target))

    def make_folder(self, path: str) -> None:
        folder = self._path(path)
        with _faults("make", folder):
            folder.mkdir(parents=True, exist_ok=True)

    def remove(self, path: str) -> None:
        """Remove a file with its checksum, or a directory with its contents; a missing one is fine."""
        target = self._path(path)
        with _faults("remove", target), suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                _checksum(target).unlink(missing_ok=True)
                target.unlink(missing_ok=True)

    def _path(self, path: str) -> Path:
        return self._root / path


def _checksum(file: Path) -> Path:
    return file.with_name(f".{file.name}.crc")


def _is_checksum(file: Path) -> bool:
    return file.name.startswith(".") and file.name.endswith(".crc")


def _taken(target: Path) -> NameTaken:
    return NameTaken(f"cannot write {target}: there is a file of that name")


@contextmanager
def _faults(attempted: str, path: Path) -> Iterator[None]:
    """Turn errors of the operating system into errors of Fairway."""
    try:
        yield
    except OSError as error:
        raise StorageFault(f"cannot {attempted} {path}: {error.strerror or error}") from error


_TAIL_BYTES: Final = 32 << 10  # of a Parquet file: holds the footer of a few row groups
_FOOTER_LENGTH: Final = slice(-8, -4)  # the last four bytes are the magic
_LOCAL: Final = "file"
# File systems on which a rename fails if the name is taken, however many programs try it at once.
EXCLUSIVE: Final = (_LOCAL, "hdfs")


class Footer(NamedTuple):
    """From a Parquet file's footer: the number of rows, and the least and greatest value of a column."""

    rows: int
    least: int
    most: int


class Files:
    """The files below one root. Paths are relative to it, with `/`."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self.root = root.rstrip("/") or "/"
        self._hadoop = HadoopDisk(spark, self.root)
        self.full_root, self.scheme = self._hadoop.full_root, self._hadoop.scheme
        # Only if the operating system finds the files under the JVM's names. A JVM in a locale without UTF-8 writes `?`
        # for letters that the locale lacks. Names of subjects are ASCII, but a path may have such letters.
        is_named = self._hadoop.root_path.isascii() or self._hadoop.writes_utf_8
        self._local = LocalDisk(self._hadoop.root_path) if self.scheme == _LOCAL and is_named else None
        self._disk: HadoopDisk | LocalDisk = self._local or self._hadoop
        self.read, self.is_directory, self.remove = self._hadoop.read, self._disk.is_directory, self._disk.remove
        self._folders: set[str] = set()  # known to exist

    def full(self, path: str) -> str:
        """The path in Spark's form."""
        return f"{self.root}/{path}" if path else self.root

    def exists(self, path: str = "") -> bool:
        return self._disk.exists(path)

    def names(self, path: str) -> list[str]:
        """The names in a directory; empty if it does not exist."""
        return self._disk.names(path) if self.exists(path) else []

    def walk(self, path: str = "") -> Iterator[Listed]:
        """Every file below a directory."""
        if self.exists(path):
            yield from self._disk.walk(path)

    def all_data(self) -> set[str]:
        """Every file that a plain reader may see: below no directory whose name begins with `_` or `.`."""
        return set(self._disk.visible())

    def write(self, path: str, data: bytes, *, temporary: str) -> None:
        """Write a file whole or not at all: under another name, then renamed. `NameTaken` if the name exists."""
        self._hadoop.create(temporary, data)
        self.claim(temporary, path)

    def claim(self, path: str, to: str) -> None:
        """Rename a file. Of all programs that claim the same name at once, one gets it; the others get `NameTaken`.

        A rename on a local disk checks whether the name is taken, and then renames: two programs could both succeed. A
        hard link can be made only once. HDFS decides in one step. Local disks without hard links only have the rename.
        """
        if self._local is not None and self._link(path, to):
            self._carry_checksum(path, to)
            self.remove(path)
        else:
            self.move(path, to)

    def _link(self, path: str, to: str) -> bool:
        """Give the file its second name; False: that is not possible here."""
        self.make_folder(to.rpartition("/")[0])
        return self._local is not None and self._local.link(path, to)

    def _carry_checksum(self, path: str, to: str) -> None:
        if self._local is not None:
            self._local.rename_checksum(path, to)

    def move(self, path: str, to: str) -> None:
        """Rename a file; `NameTaken` if the name exists, unless another program makes it at this very moment."""
        self.make_folder(to.rpartition("/")[0])
        self._disk.rename(path, to)

    def make_folder(self, path: str) -> None:
        if path not in self._folders:
            self._disk.make_folder(path)
            self._folders.add(path)

    def remove_all(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.remove(path)

    def footer(self, file: Listed, column: str) -> Footer:
        """Read the footer from the end of a Parquet file, without the rest."""
        tail = self._disk.tail(file, _TAIL_BYTES)
        wanted = int.from_bytes(tail[_FOOTER_LENGTH], "little") + 8
        if wanted > len(tail):
            tail = self._disk.tail(file, wanted)
        try:
            return _footer(pq.read_metadata(pa.BufferReader(tail)), column)
        except pa.ArrowException as error:
            raise StorageFault(f"{self.full(file.path)} is not a whole Parquet file: {error}") from error


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
