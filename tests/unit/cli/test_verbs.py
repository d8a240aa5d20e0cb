"""Rules for every verb: unreachable is status 3, help is quick and light, an error names the missing package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fairway.__main__ import app
from fairway.cli import output
from fairway.errors import Misuse, NotSent, StorageFault, Unreachable
from tests.tidy.source import ROOT
from tests.unit.cli.running import Cli, up

NOBODY = Cli("fairway://127.0.0.1:1")  # nothing listens on the port of tcpmux
VERBS = [
    ("produce", "s", "x"),
    ("consume", "s", "-g", "g"),
    ("tail", "s"),
    ("subjects",),
    ("groups",),
    ("lag",),
    ("seek", "s", "g", "earliest"),
    ("weight", "s", "g", "1"),
    ("pause", "s", "g"),
    ("resume", "s", "g"),
    ("dead", "list", "s", "g"),
    ("dead", "show", "s", "g", "x"),
    ("dead", "redrive", "s", "g", "--all"),
    ("top", "--once"),
    ("bench",),
]
BLOCKED = (
    "import sys\n"
    "sys.modules.update(dict.fromkeys(['numpy', 'pyarrow', 'prometheus_client', 'uvloop']))\n"
    "from fairway.__main__ import main\n"
    "main()\n"
)


@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_nobody_there_is_status_3(arguments: tuple[str, ...]) -> None:
    said = NOBODY.fails(*arguments, status=3)
    assert "no broker at fairway://127.0.0.1:1" in said
    assert said.count("\n") == 1


def test_a_url_that_is_none_is_usage() -> None:
    assert "fairway://HOST:PORT" in NOBODY.fails("subjects", "--url", "http://127.0.0.1", status=2)


def test_patience_waits_for_a_broker(tmp_path: Path) -> None:
    with up(tmp_path / "data") as (child, url):
        child.kill()
        with up_at(tmp_path / "data", url):
            assert "no subjects yet" in NOBODY.run("subjects", "--url", url, "--patience-s", "60")


def up_at(data: Path, url: str) -> subprocess.Popen[bytes]:
    """A broker that is not ready yet; leaving its `with` ends it."""

    class Ending(subprocess.Popen[bytes]):
        def __exit__(self, *_: object) -> None:
            self.terminate()
            self.wait(30)

    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "fairway", "up", "--data", str(data), "--port", port]
    return Ending(command, stdout=subprocess.DEVNULL, env={"PYTHONPATH": str(ROOT / "src")})


def test_every_verb_has_help() -> None:
    shown = NOBODY.run("--help")
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    for verb in [*verbs, "dead", "config", "demo"]:
        assert f" {verb} " in shown
        assert "Usage: " in NOBODY.run(verb, "--help")
    assert "4 found damage or imbalance" in shown


def _without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PYTHONPATH": str(ROOT / "src")},
    )


def test_the_core_install_is_enough_for_the_verbs_of_a_client(cli: Cli) -> None:
    for arguments, words in (
        (("produce", "light", "x", "y"), "2 messages stored"),
        (("consume", "light", "-g", "g", "-n", "2"), "x\ny\n"),
        (("tail", "light", "--from", "earliest", "-n", "1"), "x\n"),
        (("top", "--once", "--interval-s", "0.1"), "light"),
        (("doctor",), "pip install 'fairway[server]'"),
    ):
        done = _without_extras(*arguments, "--url", cli.url)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout


def test_help_needs_no_server_and_no_table() -> None:
    program = (
        "import sys, fairway.__main__\n"
        "heavy = ('fairway.broker', 'fairway.storage', 'rich.live')\n"
        "sys.exit(', '.join(name for name in sys.modules if name.startswith(heavy)) or None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (Misuse("no such port"), 2, "fairway v: no such port\n"),
        (Unreachable("nobody"), 3, "fairway v: nobody\n"),
        (TimeoutError("no answer"), 3, "fairway v: no answer\n"),
        (StorageFault("disk"), 1, "fairway v: disk\n"),
        (ExceptionGroup("", [NotSent("a"), NotSent("b"), NotSent("a")]), 1, "fairway v: a\nfairway v: b\n"),
        (
            ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.lib"),
            1,
            "fairway v: this needs pyarrow.lib: pip install 'fairway[arrow]'\n",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_sentences(error: Exception, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    with pytest.raises(typer.Exit) as ended, output.failures("v"):
        raise error
    assert (ended.value.exit_code, capsys.readouterr().err) == (status, said)


def test_an_error_nobody_meant_is_not_hidden() -> None:
    for error in (ModuleNotFoundError("x", name="x"), ExceptionGroup("", [KeyError("x")]), KeyError("x")):
        with pytest.raises(type(error)), output.failures("v"):
            raise error
