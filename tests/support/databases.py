"""Real databases to throw away: a PostgreSQL or a MariaDB in a process of its own, on a socket in a folder of its own.

    with postgresql() as url: ...            SQLAlchemy's address of it: postgresql+psycopg://...
    with mariadb(is_durable=False) as url:   the same, and a commit waits for no disk
    fresh(url)                               one more empty database in that server

Nobody else can reach the socket: its folder belongs to the user that the server runs as. Both servers refuse to run as
root, and are run as the user that their packages have made. They end with the process that started them.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import sqlalchemy as sa

READY_S = 60.0
_NAME = "fairway"
_numbers = count(1)


@contextmanager
def postgresql(directory: Path | None = None, *, is_durable: bool = True) -> Iterator[str]:
    """A PostgreSQL; where no directory is named, or the server could not reach it, in one that is removed again."""
    programs = _postgresql_programs()
    user = _user("postgres")
    with _home(directory, user, "postgresql") as home:
        data = home / "data"
        _call([str(programs / "initdb"), "--no-sync", "--auth=trust", f"--username={_NAME}", "--locale=C",
               "--encoding=UTF8", f"--pgdata={data}"], home, user)  # fmt: skip
        settings = {"listen_addresses": "", "unix_socket_directories": str(home), "shared_buffers": "32MB"}
        if not is_durable:
            settings |= dict.fromkeys(("fsync", "synchronous_commit", "full_page_writes"), "off")
        command = [str(programs / "postgres"), "-D", str(data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        url = f"postgresql+psycopg://{_NAME}@/postgres?host={home}"
        with _running(command, home, user, signal.SIGQUIT), _answering(url, home / ".s.PGSQL.5432", home):
            yield url


@contextmanager
def mariadb(directory: Path | None = None, *, is_durable: bool = True) -> Iterator[str]:
    """A MariaDB; where no directory is named, or the server could not reach it, in one that is removed again."""
    server, install = _program("mariadbd", "/usr/sbin"), _program("mariadb-install-db", "/usr/bin")
    user = _user("mysql")
    with _home(directory, user, "mariadb") as home:
        data, place = home / "data", home / "socket"
        common = ["--no-defaults", f"--datadir={data}", f"--tmpdir={home}", "--innodb-log-file-size=16M"]
        _call([install, *common, "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve",
               "--innodb-flush-log-at-trx-commit=0"], home, user)  # fmt: skip
        durability = ["--innodb-flush-log-at-trx-commit=1"]
        if not is_durable:
            durability = ["--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0"]
        command = [server, *common, *durability, f"--socket={place}", "--skip-networking", f"--pid-file={home}/pid",
                   "--innodb-buffer-pool-size=32M"]  # fmt: skip
        url = f"mysql+pymysql://root@localhost/mysql?unix_socket={place}"
        # its durable state is the log's business, and nobody comes back to it: it need not put its house in order
        with _running(command, home, user, signal.SIGKILL), _answering(url, place, home):
            yield fresh(url)


def fresh(url: str) -> str:
    """The address of a new, empty database in the server that has this address; in PostgreSQL a schema, which is made
    a hundred times faster and looks the same to whoever comes in by it."""
    name = f"{_NAME}_{os.getpid()}_{next(_numbers)}"
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    is_schema = engine.dialect.name == "postgresql"
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE {'SCHEMA' if is_schema else 'DATABASE'} {name}"))
    made = sa.make_url(url)
    made = made.update_query_dict({"options": f"-csearch_path={name}"}) if is_schema else made.set(database=name)
    return made.render_as_string(hide_password=False)


def on_loop(url: str) -> str:
    """The same database through a driver for asyncio."""
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg", "mysql": "mysql+aiomysql"}
    parsed = sa.make_url(url)
    return parsed.set(drivername=drivers[parsed.get_backend_name()]).render_as_string(hide_password=False)


# --- programs and users ----------------------------------------------------------------------------------------------


def _postgresql_programs() -> Path:
    """The folder of the newest; Debian keeps them apart from what is on the PATH."""
    found = shutil.which("postgres")
    if found:
        return Path(found).resolve().parent
    versions = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if not versions:
        raise RuntimeError("no PostgreSQL was found: `make databases` installs one")
    return max(versions, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parent.name)])


def _program(name: str, elsewhere: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=elsewhere)
    if found is None:
        raise RuntimeError(f"no {name} was found: `make databases` installs MariaDB")
    return found


def _user(preferred: str) -> pwd.struct_passwd | None:
    """Whom a server runs as; None: as whoever we are."""
    if os.getuid() != 0:
        return None
    for name in (preferred, "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError(f"a database does not run as root, and there is no user {preferred}: `make databases`")


@contextmanager
def _home(directory: Path | None, user: pwd.struct_passwd | None, name: str) -> Iterator[Path]:
    """A folder that belongs to that user alone."""
    is_reachable = directory is not None and (user is None or _lets_pass(directory))
    home = Path(tempfile.mkdtemp(prefix=f"fairway-{name}-", dir=directory if is_reachable else None))
    try:
        if user is not None:
            os.chown(home, user.pw_uid, user.pw_gid)
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _lets_pass(directory: Path) -> bool:
    """Whether anybody may go through it, from the root on: the folders that tests are given are for us alone."""
    resolved = directory.resolve()
    return all(path.stat().st_mode & 0o001 for path in (resolved, *resolved.parents))


# --- processes -------------------------------------------------------------------------------------------------------


def _call(command: Sequence[str], home: Path, user: pwd.struct_passwd | None) -> None:
    with (home / "log").open("ab") as log:
        done = subprocess.run(command, cwd=home, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False,
                              env=_environment(home), **_identity(user))  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {_last_words(home)}")


@contextmanager
def _running(
    command: Sequence[str], home: Path, user: pwd.struct_passwd | None, farewell: signal.Signals
) -> Iterator[None]:
    """The server; it is told to end as the last thing, and it ends too when we are killed, where the system can."""
    setpriv = shutil.which("setpriv")
    leash = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
    with (home / "log").open("ab") as log:
        server = subprocess.Popen([*leash, *command], cwd=home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                  env=_environment(home), start_new_session=True, **_identity(user))  # fmt: skip
    try:
        yield
    finally:
        server.send_signal(farewell)
        try:
            server.wait(READY_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextmanager
def _answering(url: str, path: Path, home: Path) -> Iterator[None]:
    """Wait until the server answers at this socket."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    deadline = time.monotonic() + READY_S
    while not _is_ready(engine, path):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the database does not start: {_last_words(home)}")
        time.sleep(0.02)
    yield


def _is_ready(engine: sa.Engine, path: Path) -> bool:
    """A driver is asked last: one of them leaves a socket open when nobody listens."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
        engine.connect().close()
    except (OSError, sa.exc.OperationalError):
        return False
    return True


def _identity(user: pwd.struct_passwd | None) -> dict[str, Any]:
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _environment(home: Path) -> dict[str, str]:
    """Nothing of ours: PGHOST or LC_ALL of whoever tests is not the server's business."""
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(home), "LC_ALL": "C"}


def _last_words(home: Path) -> str:
    return (home / "log").read_text(errors="replace")[-1_500:]
