"""What the documentation shows is run: every ```python block, and every `$ fairway ...` line of a ```console block.

The blocks of one document share one namespace and one temporary directory; its console lines run after its Python. A
line that is meant to fail says so: `$ fairway verify DIR  # exit 4`. A block that cannot run is preceded by a comment
that says why: `<!-- not run: it ends only when it is told to -->`.

A block that is a file is preceded by its name. It is written before anything runs, so that others may import it, and

    <!-- file: shop.py -->                          no more than that
    <!-- file: test_shop.py -->                     pytest runs it
    <!-- file: report.py, run after the commands --> it runs when all console lines have run
    <!-- file: hotel.py, until SIGTERM -->          it is started last, told to end when it has printed a line, and its
                                                    exit status must be 0

A document that says `<!-- beside a broker -->` has one of its own while it runs: wherever its blocks say
`fairway://127.0.0.1:20880`, they get the address of that one, and so do commands that name none.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fairway.runtime.process import Child
from tests.tidy.source import ROOT

_OPT_OUT = re.compile(r"<!--\s*not run:?\s*(?P<reason>.*?)\s*-->")
_FILE = re.compile(r"<!--\s*file: (?P<name>\w+\.py)(?P<how>, until SIGTERM|, run after the commands)?\s*-->")
_EXIT = re.compile(r"#\s*exit (?P<status>\d+)\s*$")
_BESIDE = "<!-- beside a broker -->"
_BROKER = "fairway://127.0.0.1:20880"
_TIMEOUT_S = 300  # a block that hangs must not hang the tests; the slowest starts Spark


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its first line of content."""

    language: str
    line: int
    text: str
    file: str = ""  # the name under which others import it; empty: it is a part of the script
    serves: bool = False  # it ends when it is told to
    follows: bool = False  # it runs after the console lines


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks that are to be run; an opt-out without a reason is an error."""
    found: list[Block] = []
    lines = markdown.split("\n")
    number = 0
    while number < len(lines):
        fence = re.match(r"(?P<fence>```+)(?P<language>\w*)", lines[number])
        number += 1
        if not fence:
            continue
        before = _line_before(lines, number - 1)
        opt_out, named = _OPT_OUT.search(before), _FILE.search(before)
        if opt_out and not opt_out["reason"]:
            raise ValueError(f"line {number}: `not run` needs a reason")
        start = number
        while number < len(lines) and lines[number].rstrip() != fence["fence"]:
            number += 1
        if not opt_out:
            text = "\n".join(lines[start:number]) + "\n"
            file, how = (named["name"], named["how"] or "") if named else ("", "")
            found.append(Block(fence["language"], start + 1, text, file, "SIGTERM" in how, "commands" in how))
        number += 1
    return found


def program(found: list[Block]) -> str:
    """The Python blocks as one script in which each keeps its line number."""
    script = ""
    for block in found:
        if block.language == "python" and not block.file:
            script += "\n" * (block.line - 1 - script.count("\n")) + block.text
    return script


def commands(found: list[Block]) -> list[tuple[list[str], int]]:
    """The arguments of every `fairway` line of the console blocks, and the exit status it is shown with."""
    shown = []
    for block in found:
        for line in block.text.split("\n") if block.language == "console" else ():
            if line.startswith("$ fairway"):
                status = _EXIT.search(line)
                shown.append((shlex.split(line[2:], comments=True)[1:], int(status["status"]) if status else 0))
    return shown


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def by_length() -> list[Any]:
    """The pages; those that start a Spark for each of their commands are for `make spark`."""
    slow = {ROOT / f"docs/how-to/{name}.md" for name in ("spark", "spark-jobs", "trace", "report", "reconcile")}
    slow.add(ROOT / "docs/start/archive-to-a-table.md")
    return [pytest.param(page, marks=pytest.mark.slow if page in slow else ()) for page in documents()]


@pytest.mark.parametrize("document", by_length(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documentation_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)  # children see what we see
    text = document.read_text(encoding="utf-8")
    with _broker(tmp_path, is_wanted=_BESIDE in text) as url:
        found = blocks(text.replace(_BROKER, url))
        for block in found:
            if block.file:
                (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        if script := program(found):
            (tmp_path / f"{document.stem}_blocks.py").write_text(script, encoding="utf-8")
            _run([sys.executable, f"{document.stem}_blocks.py"], tmp_path, status=0, url=url)
        if tests := [block.file for block in found if block.file.startswith("test_")]:
            _run([sys.executable, "-m", "pytest", "-q", "-W", "error", *tests], tmp_path, status=0, url=url)
        for arguments, status in commands(found):
            _run([str(Path(sys.executable).parent / "fairway"), *arguments], tmp_path, status, url=url)
        for block in found:
            if block.follows:
                _run([sys.executable, block.file], tmp_path, status=0, url=url)
            if block.serves:
                _serve(tmp_path / block.file)


def _serve(path: Path) -> None:
    """A program that works until it is told to end."""
    with Child(path.stem) as child:
        assert child.line(timeout_s=_TIMEOUT_S), f"{path.name} ended without a word"
        child.terminate()
        assert child.wait(timeout_s=_TIMEOUT_S) == 0, f"{path.name} ended badly"


@contextmanager
def _broker(directory: Path, *, is_wanted: bool) -> Iterator[str]:
    """The address of a broker; where none is wanted, the one that everybody knows."""
    if not is_wanted:
        yield _BROKER
        return
    with Child("fairway", "up", "--data", str(directory / "data"), "--port", "0") as child:
        ready = re.search(r"fairway://[\d.]+:\d+", child.line(timeout_s=_TIMEOUT_S) or "")
        assert ready
        yield ready[0]


def _run(command: list[str], directory: Path, status: int, url: str = _BROKER) -> None:
    run = subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "FAIRWAY_URL": url},
    )
    shown = shlex.join(["fairway", *command[1:]]) if command[0].endswith("fairway") else command[1]
    assert run.returncode == status, f"{shown}: exit {run.returncode}, not {status}\n{run.stdout}{run.stderr}"


# --- how blocks are found -------------------------------------------------------------------------------------------


def _line_before(lines: list[str], number: int) -> str:
    return next((line for line in reversed(lines[:number]) if line.strip()), "")


MARKDOWN = """
```python
x = 1
```
text
<!-- not run: a picture of a session -->
```console
$ fairway up
```

````python
print(x, '''
```
''')
````
```console
$ make run
$ fairway verify 'a b'  # exit 4
anything
```
<!-- file: shop.py -->
```python
y = 2
```
<!-- file: hotel.py, until SIGTERM -->
```python
z = 3
```
<!-- file: report.py, run after the commands -->
```python
w = 4
```
"""


def test_blocks_are_found_with_their_lines() -> None:
    found = blocks(MARKDOWN)
    parts, files = found[:3], found[3:]
    assert [(block.language, block.line) for block in parts] == [("python", 3), ("python", 12), ("console", 17)]
    assert [(block.file, block.serves, block.follows, block.text) for block in files] == [
        ("shop.py", False, False, "y = 2\n"),
        ("hotel.py", True, False, "z = 3\n"),
        ("report.py", False, True, "w = 4\n"),
    ]
    assert "y = 2" not in program(found)
    assert program(found).split("\n")[2] == "x = 1"
    assert program(found).split("\n")[11] == "print(x, '''"
    assert commands(found) == [(["verify", "a b"], 4)]


def test_opting_out_takes_a_reason() -> None:
    with pytest.raises(ValueError, match="line 2: `not run` needs a reason"):
        blocks("<!-- not run -->\n```python\n1 / 0\n```\n")


def test_failing_block_fails(tmp_path: Path) -> None:
    (tmp_path / "README.py").write_text(program(blocks("text\n```python\n1 / 0\n```\n")), encoding="utf-8")
    with pytest.raises(AssertionError, match=r"README.py.*exit 1(?s:.*)line 3"):
        _run([sys.executable, "README.py"], tmp_path, status=0)
