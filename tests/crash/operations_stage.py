"""A cluster for the procedures of docs/how-to/operations.md: real processes, and the commands as the page has them.

The page has addresses, directories and ids of its own. Whatever it names so is called by what it is here, and nothing
else in a command is changed; at the end of a procedure the page must have had the very commands that were run.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fairway.runtime.process import Child
from tests.crash.operations_shop import PATIENCE_S
from tests.support.ports import free_port
from tests.support.zookeeper import Ensemble
from tests.tidy.source import ROOT
from tests.unit.cli.running import Cli

PAGE = ROOT / "docs/how-to/operations.md"
SESSION_MS = 2_000
_LOOK_S = 0.3  # a look takes 50 ms
_SERVERS = ("fairway meta", "fairway broker --group", "fairway delay serve")  # what ends only when it is told to
_META_PORTS = ("20882", "20883")


def documented(title: str) -> list[str]:
    """The commands of one part of the page, without comments."""
    page = PAGE.read_text("utf-8")
    part = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    assert part, f"{PAGE.name} has no part {title!r}"
    return [re.sub(r"\s+#.*$", "", line[2:]) for line in part[1].split("\n") if line.startswith("$ ")]


class Stage:
    """One cluster, and how to look after it."""

    def __init__(self, root: Path, zookeeper: Ensemble, stack: ExitStack) -> None:
        self.zookeeper = zookeeper
        self.copies: dict[str, str] = {}  # by the id that the page has: the one that the copy has here
        self._root = root
        self._stack = stack
        self._ports: dict[str, int] = {}  # by the page's
        self._servers: dict[str, Child] = {}  # by directory, or port
        self._commands: list[str] = []
        self.cli = Cli("meta://" + ",".join(f"127.0.0.1:{self._port(each)}" for each in _META_PORTS))

    @contextmanager
    def procedure(self, title: str) -> Iterator[None]:
        """What is run in it is what the page says."""
        self._commands.clear()
        yield
        assert self._commands == documented(title)

    def run(self, line: str, status: int = 0) -> str:
        """A command of the page: what it says. A server is started, and goes on."""
        self._commands.append(line)
        line = self._here(line)
        words = shlex.split(line)
        if line.startswith(_SERVERS):
            self._start(words[1:])
            return ""
        if words[0] == "fairway":
            return self._said(*words[1:], status=status)
        subprocess.run(["sh", "-c", line], check=True)
        return ""

    def insist(self, line: str) -> str:
        """Run it again and again, until it is not refused."""

        def is_done() -> bool:
            try:
                said.append(self.run(line))
            except AssertionError:  # another exit status
                self._commands.pop()
            return bool(said)

        said: list[str] = []
        self.until(line, is_done)
        return said[0]

    def _here(self, line: str) -> str:
        """The command with what its names mean here."""
        line = line.replace("/var/lib/fairway", str(self._root))
        line = re.sub(r"(?<=--port )\d{5}", lambda found: str(self._port(found[0])), line)
        for shown, directory in self.copies.items():
            line = line.replace(shown, directory)
        return line

    def _said(self, *arguments: str, status: int = 0) -> str:
        """What the command line says, on stdout and on stderr."""
        patience = str(PATIENCE_S)
        said = self.cli.both(*arguments, status=status, FAIRWAY_REGISTRY=self._registry, FAIRWAY_PATIENCE_S=patience)
        return "".join(said)

    @property
    def _registry(self) -> str:
        return f"zookeeper://{self.zookeeper.hosts}"

    def _port(self, shown: str) -> int:
        return self._ports.setdefault(shown, free_port())

    # --- servers -----------------------------------------------------------------------------------------------------

    def _start(self, words: list[str]) -> None:
        name = Path(words[words.index("--data" if "--data" in words else "--port") + 1]).name
        words += ["--registry", self._registry, "--session-ms", str(SESSION_MS)]
        child = Child("fairway", *words, errors_to=self._root / f"{name}.log")
        self._servers[name] = self._stack.enter_context(child)

    def end(self, port: int) -> int:
        """SIGTERM for the meta server that has this port on the page; its exit status."""
        name = str(self._port(str(port)))
        self._servers[name].terminate()
        return self.ended(name)

    def shut(self, name: str) -> None:
        """SIGTERM for the server with this directory, and its end."""
        self._servers[name].terminate()
        assert self.ended(name) == 0

    def ended(self, name: str) -> int:
        """The exit status of a server that was told to end."""
        return self._servers[name].wait(timeout_s=PATIENCE_S)

    def wipe_zookeeper(self) -> None:
        """While it does not run."""
        for path in self._root.glob("zookeeper/*/data/version-2"):
            shutil.rmtree(path)

    def words_of(self, name: str) -> str:
        """What a server has said on stderr."""
        return (self._root / f"{name}.log").read_text("utf-8")

    def aside(self, name: str) -> set[str]:
        """What a copy keeps aside."""
        return {path.name for path in (self._root / name / "aside").glob("*")}

    # --- looking -----------------------------------------------------------------------------------------------------

    def look(self) -> Any:
        """As `fairway cluster --json` has it."""
        return json.loads(self._said("cluster", "--json"))

    def group(self, name: str) -> Any:
        """Empty: there is none."""
        return next((each for each in self.look()["groups"] if each["name"] == name), {"copies": [], "master": ""})

    def address(self, port: int) -> str:
        """Where the server listens that has this port on the page."""
        return f"127.0.0.1:{self._port(str(port))}"

    def id_at(self, group: str, port: int) -> str:
        """Of the copy that lives there. A copy whose session the registry has just given up registers again."""
        found: list[str] = []

        def is_there() -> bool:
            copies = self.group(group)["copies"]
            found[:] = [str(each["directory"]) for each in copies if each["address"] == self.address(port)]
            return bool(found)

        self.until(f"a copy of {group} lives at {self.address(port)}", is_there)
        return found[0]

    def until(self, what: str, is_so: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < end, f"in vain: {what}\n{self._said('cluster')}{self._last_words()}"
            time.sleep(_LOOK_S)

    def until_in_sync(self, group: str, copies: int) -> None:
        def is_so() -> bool:
            found = self.group(group)
            return bool(found["master"]) and sum(each["is_in_sync"] for each in found["copies"]) == copies

        self.until(f"{copies} copies of {group} in sync, and one of them leads", is_so)

    def lead(self, group: str, port: int) -> None:
        """See to it that the copy there is the master. It may have become one by itself just before."""

        def is_master() -> bool:
            return bool(self.group(group)["master"] == self.address(port))

        if not is_master():
            try:
                self._said("broker", "promote", group, "--to", self.id_at(group, port))
            except AssertionError as refused:
                if "already" not in str(refused):
                    raise
        self.until(f"{self.address(port)} leads {group}", is_master)

    def _last_words(self) -> str:
        return "".join(f"--- {path.name}\n{path.read_text('utf-8')[-2_000:]}" for path in self._root.glob("*.log"))
