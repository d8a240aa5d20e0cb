"""Two ways to the files below one root. Paths are relative to it, with `/`.

    HadoopDisk   the file systems of Hadoop, which Spark reads and writes: HDFS, object stores, local disks
    LocalDisk    a local disk, by the calls of the operating system

A call into the JVM takes half a millisecond and more. Pip's Spark has no native library of Hadoop, so that Hadoop's
local file system starts a process (`chmod`, `readlink`, `ls`) for each file that it creates, renames or lists: moving
one file took 40 ms beside other work, and an archive of 500 subjects minutes. The driver's JVM runs on the same machine
as this process, and both see the same files.

Hadoop keeps a checksum beside each local file. `LocalDisk` moves and removes the checksum with its file, and hides it
from listings, as Hadoop does.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from fairway.errors import Misuse, StorageFault

_CHUNK_BYTES: Final = 1 << 20


class NameTaken(StorageFault):
    """There is a file of that name already."""


class Listed(NamedTuple):
    """A file: its path relative to the root, and its size."""

    path: str
    size_bytes: int


class HadoopDisk:
    """Files through the JVM. What concerns all files of an archive is one job of Spark, not a call for each."""

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

    def is_directory(self, path: str) -> bool:
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

    def read(self, path: str) -> bytes:
        with self._faults("read", path):
            stream = self._fs.open(self._path(path))
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

    def tail(self, file: Listed, size_bytes: int) -> bytes:
        """The last bytes of a file, or all of a shorter one."""
        with self._faults("read", file.path):
            stream = self._fs.open(self._path(file.path))
            try:
                stream.seek(max(file.size_bytes - size_bytes, 0))
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

    def create(self, path: str, data: bytes) -> None:
        with self._faults("write", path):
            stream = self._fs.create(self._path(path), True)
            for at in range(0, len(data), _CHUNK_BYTES):
                stream.write(bytearray(data[at : at + _CHUNK_BYTES]))
            stream.close()

    def rename(self, path: str, to: str) -> None:
        """`NameTaken` if there is one of that name, and nobody makes it at this very moment."""
        with self._faults("write", to):
            self._context.rename(self._path(path), self._path(to), self._no_options)

    def make_folder(self, path: str) -> None:
        with self._faults("make", path):
            self._fs.mkdirs(self._path(path))

    def remove(self, path: str) -> None:
        """A file, or a directory with all that is in it; one that is gone already is fine."""
        with self._faults("remove", path):
            self._fs.delete(self._path(path), True)

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self._root}/{path}" if path else self._root)

    @contextmanager
    def _faults(self, attempted: str, path: str) -> Iterator[None]:
        """Java's exceptions in our own words."""
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

    def is_directory(self, path: str) -> bool:
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

        Other runs may remove files meanwhile; whatever vanishes is left out.
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
        """Whether the file has its other name now; a file system without hard links cannot do that."""
        target = self._path(to)
        try:
            target.hardlink_to(self._path(path))
        except FileExistsError as error:
            raise _taken(target) from error
        except OSError:
            return False
        return True

    def rename(self, path: str, to: str) -> None:
        """`NameTaken` if there is one of that name, and nobody makes it at this very moment."""
        target = self._path(to)
        with _faults("write", target):
            if target.exists():
                raise _taken(target)
            self._path(path).rename(target)
        self.rename_checksum(path, to)

    def rename_checksum(self, path: str, to: str) -> None:
        """A file without a checksum is read unchecked."""
        target = self._path(to)
        with _faults("write the checksum of", target), suppress(FileNotFoundError):
            _checksum(self._path(path)).replace(_checksum(target))

    def make_folder(self, path: str) -> None:
        folder = self._path(path)
        with _faults("make", folder):
            folder.mkdir(parents=True, exist_ok=True)

    def remove(self, path: str) -> None:
        """A file with its checksum, or a directory with all that is in it; one that is gone already is fine."""
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
    """The operating system's errors in our own words."""
    try:
        yield
    except OSError as error:
        raise StorageFault(f"cannot {attempted} {path}: {error.strerror or error}") from error
