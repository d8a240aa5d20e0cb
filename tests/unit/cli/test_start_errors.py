"""Every way in which a server or a verb does not start: a sentence with the remedy, and nothing left behind."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fairway
from fairway.runtime.process import Child
from tests.support.ports import free_port
from tests.tidy.source import ROOT
from tests.unit.cli.running import READY_S, Cli, up

NOBODY = Cli("fairway://127.0.0.1:1")

# What each role is started with; DIR is where its data would be.
ROLES = {
    "up": "up --data DIR",
    "broker": "broker --data DIR",
    "copy of a broker": "broker --data DIR --registry meta://127.0.0.1:1 --group east",
    "meta": "meta --registry sqlite:DIR",
    "delay": "delay serve --data DIR --broker 127.0.0.1:1",
    "copy of a delay server": "delay serve --data DIR --registry meta://127.0.0.1:1 --group d1",
}


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def command(role: str, directory: Path) -> list[str]:
    return [word.replace("DIR", str(directory)) for word in ROLES[role].split()]


@pytest.mark.parametrize("role", ROLES)
def test_a_port_in_use_is_a_sentence_with_the_remedy_and_no_directory_is_made(
    role: str, tmp_path: Path, taken: int
) -> None:
    said = NOBODY.fails(*command(role, tmp_path / "data"), "--port", str(taken), status=1)
    assert f"cannot listen on 127.0.0.1:{taken}: another program listens there" in said
    assert "choose another port with --port N (0: any that is free)" in said
    assert "Errno" not in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", ROLES)
def test_a_port_for_probes_in_use_is_told_apart(role: str, tmp_path: Path, taken: int) -> None:
    arguments = (*command(role, tmp_path / "data"), "--port", "0", "--http-port", str(taken))
    assert "choose another port with --http-port N" in NOBODY.fails(*arguments, status=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "/deep/er"])
@pytest.mark.parametrize("role", ROLES)
def test_a_file_where_a_directory_is_meant_is_named(role: str, below: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("mine")
    said = NOBODY.fails(*command(role, Path(f"{tmp_path}/data{below}")), "--port", "0", status=2)
    assert f"{tmp_path / 'data'} is a file, and --" in said
    assert "names a directory: give another path, or move the file away" in said
    assert (tmp_path / "data").read_text() == "mine"


def test_a_file_where_the_log_directory_is_meant_is_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("mine")
    arguments = ("up", "--data", str(tmp_path / "data"), "--log-data", str(tmp_path / "log"), "--port", "0")
    assert "is a file, and --log-data names a directory" in NOBODY.fails(*arguments, status=2)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("scheme", ["fairway", "meta"])
def test_what_an_unreachable_server_is_said_to_need_starts_one_there(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{scheme}://127.0.0.1:{free_port()}"
    with pytest.raises(fairway.Unreachable) as unreachable:
        fairway.connect(url)
    hint = re.search(r"`fairway ([^`]+)`", str(unreachable.value))
    assert hint
    monkeypatch.chdir(tmp_path)
    with Child("fairway", *shlex.split(hint[1])) as server:
        assert f"ready at {url}" in (server.line(timeout_s=READY_S) or "")
        with fairway.connect(url):
            pass


def test_meta_says_one_port() -> None:
    ports = re.findall(r"\b208\d\d\b", NOBODY.run("meta", "--help"))
    assert set(ports) == {"20882"}


# --- what is on disk --------------------------------------------------------------------------------------------------


def _answer(*arguments: str, is_weak: bool = False) -> tuple[int, str]:
    """Exit status and stderr of a process of its own; `is_weak`: without root's right to read everything."""
    command = [sys.executable, "-m", "fairway", *arguments]
    if is_weak and os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root reads everything, and there is no setpriv to take that right away")
        rights = "-dac_override,-dac_read_search"
        command = ["setpriv", "--bounding-set", rights, "--inh-caps", rights, *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FAIRWAY_URL": NOBODY.url, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_S, check=False, env=environment)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of a broker and a delay server that have something."""
    data = tmp_path_factory.mktemp("used") / "data"
    with up(data) as (child, url):
        cli = Cli(url)
        cli.run("produce", "s", "x")
        cli.run("produce", "s", "x", "--after", "1d")
        child.terminate()
        assert child.wait(timeout_s=READY_S) == 0
    return data


@pytest.mark.parametrize(
    "name", ["identity", "retention", "actions/ballast", "delay/identity", "delay/schedule/manifest", "messages"]
)
def test_a_wrong_kind_of_file_is_one_sentence(name: str, used: Path, tmp_path: Path) -> None:
    """Found by trying: a fault of the delay server's buckets closed the disk under the log's first commit, and a
    traceback of that came before the sentence."""
    data = tmp_path / "data"
    shutil.copytree(used, data)
    if (data / name).is_dir():
        shutil.rmtree(data / name)
        (data / name).write_text("a file")
    else:
        (data / name).unlink()
        (data / name).mkdir()
    status, said = _answer("up", "--data", str(data), "--port", "0")
    assert status == 1
    assert said.count("\n") == 1, said
    assert f"{data / name}" in said
    assert "move it away: it is none of Fairway's" in said


@pytest.mark.parametrize("name", ["identity", "messages", "delay", "delay/schedule/manifest"])
@pytest.mark.parametrize("verb", ["up --port 0 --data", "verify"])
def test_what_may_not_be_read_is_one_sentence(verb: str, name: str, used: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(used, data)
    mode = (data / name).stat().st_mode
    (data / name).chmod(0)
    status, said = _answer(*verb.split(), str(data), is_weak=True)
    (data / name).chmod(mode)
    assert status == 1
    assert said.count("\n") == 1, said
    assert f"{data / name}" in said
    assert os.strerror(errno.EACCES) in said


@pytest.mark.parametrize("role", ["up", "meta", "delay"])
def test_a_directory_that_may_not_be_entered_is_one_sentence(role: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0)
    status, said = _answer(*command(role, closed / "data"), "--port", "0", is_weak=True)
    closed.chmod(0o700)
    assert status == 1
    assert said.count("\n") == 1, said
    assert f"{closed}" in said
    assert os.strerror(errno.EACCES) in said


@pytest.mark.parametrize("role", ROLES)
def test_a_path_that_is_too_long_is_one_sentence(role: str, tmp_path: Path) -> None:
    said = NOBODY.fails(*command(role, tmp_path / ("x" * 300)), "--port", "0", status=1)
    assert said.count("\n") == 1
    assert os.strerror(errno.ENAMETOOLONG) in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["verify", "inspect"])
def test_looking_at_a_path_that_is_too_long_is_one_sentence(verb: str) -> None:
    said = NOBODY.fails(*verb.split(), "x" * 300, status=1)
    assert said.count("\n") == 1
    assert os.strerror(errno.ENAMETOOLONG) in said


def test_doctor_says_that_a_directory_may_not_be_entered(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0)
    status, said = _answer("doctor", "--data", str(closed / "data"), is_weak=True)
    closed.chmod(0o700)
    assert (status, said) == (1, "")


def test_settings_that_are_nested_too_deeply_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "fairway.toml").write_text(f"port = {'[' * 20_000}")
    said = NOBODY.fails("up", "--config", str(tmp_path / "fairway.toml"), "--data", "x", status=2)
    assert "fairway.toml cannot be read: its values are nested too deeply" in said
    assert said.count("\n") == 1


def test_an_outbox_with_a_driver_for_asyncio_is_one_sentence() -> None:
    said = NOBODY.fails("outbox", "status", "--database", "sqlite+aiosqlite:///shop.db", status=2)
    assert "names a driver for asyncio: name another" in said
    assert said.count("\n") == 1


# --- consume ----------------------------------------------------------------------------------------------------------


def test_consuming_what_does_not_exist_says_what_it_makes(cli: Cli) -> None:
    printed, said = cli.both("consume", "misspelt", "-g", "g", "--idle-s", "0.1")
    assert printed == ""
    assert said == "fairway consume: subject misspelt does not exist yet: making it, with group g, and waiting\n"
    assert cli.both("consume", "misspelt", "-g", "g", "--idle-s", "0.1") == ("", "")
    _, said = cli.both("consume", "misspelt", "-g", "other", "--start", "latest", "--idle-s", "0.1")
    assert said == "fairway consume: group other on misspelt is new, and begins at the latest message\n"


def test_consuming_without_create_refuses_what_does_not_exist_and_makes_nothing(cli: Cli) -> None:
    said = cli.fails("consume", "absent", "-g", "g", "--no-create", status=1)
    assert "there is no subject absent: send something to it, or leave out --no-create" in said
    assert "absent" not in cli.run("subjects")
    cli.run("produce", "present", stdin=b"a\n")
    said = cli.fails("consume", "present", "-g", "g", "--no-create", status=1)
    assert "there is no group g on present: leave out --no-create to make it" in said
    assert cli.run("consume", "present", "-g", "g", "-n", "1") == "a\n"
    assert cli.both("consume", "present", "-g", "g", "--no-create", "--idle-s", "0.1") == ("", "")


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------

_SLOW_IMPORT = """
import time
print("importing", flush=True)
time.sleep(60)
"""


def test_ctrl_c_while_the_command_line_is_being_imported_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(_SLOW_IMPORT)
    process = subprocess.Popen(
        [sys.executable, "-c", "from fairway_cli import main; main()", "up"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130


def test_the_console_script_is_the_one_that_ends_quietly() -> None:
    assert 'fairway = "fairway_cli:main"' in (ROOT / "pyproject.toml").read_text()


_INTERRUPTED_BEFORE_IT_LISTENS = """
import os, signal
from fairway.runtime import service

listen = service.asked_to_end

def asked_to_end():
    os.kill(os.getpid(), signal.SIGINT)
    return listen()

service.asked_to_end = asked_to_end
from fairway_cli import main
main()
"""


@pytest.mark.parametrize("role", ROLES)
def test_ctrl_c_before_a_server_listens_to_signals_ends_it_with_nothing_made(tmp_path: Path, role: str) -> None:
    arguments = shlex.split(ROLES[role].replace("DIR", "data"))
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_BEFORE_IT_LISTENS, *arguments, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not (tmp_path / "data").exists()
