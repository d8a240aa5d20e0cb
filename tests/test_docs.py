"""What the documentation shows is run: every ```python block, and every `$ fairway ...` line of a ```console block.

The blocks of one file share one namespace and one temporary directory; its console lines run after its Python. A line
that is meant to fail says so: `$ fairway verify DIR  # exit 4`. A block that cannot run is preceded by a comment that
says why: `<!-- not run: needs a broker -->`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tidy.source import ROOT

_OPT_OUT = re.compile(r"<!--\s*not run:?\s*(?P<reason>.*?)\s*-->")
_EXIT = re.compile(r"#\s*exit (?P<status>\d+)\s*$")
_TIMEOUT_S = 120  # a block that hangs must not hang the tests; the slowest takes a few seconds


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its first line of content."""

    language: str
    line: int
    text: str


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
        opt_out = _OPT_OUT.search(_line_before(lines, number - 1))
        if opt_out and not opt_out["reason"]:
            raise ValueError(f"line {number}: `not run` needs a reason")
        start = number
        while number < len(lines) and lines[number].rstrip() != fence["fence"]:
            number += 1
        if not opt_out:
            found.append(Block(fence["language"], start + 1, "\n".join(lines[start:number]) + "\n"))
        number += 1
    return found


def program(found: list[Block]) -> str:
    """The Python blocks as one script in which each keeps its line number."""
    script = ""
    for block in found:
        if block.language == "python":
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


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documentation_runs(document: Path, tmp_path: Path) -> None:
    found = blocks(document.read_text(encoding="utf-8"))
    if script := program(found):
        (tmp_path / document.name).with_suffix(".py").write_text(script, encoding="utf-8")
        _run([sys.executable, f"{document.stem}.py"], tmp_path, status=0)
    for arguments, status in commands(found):
        _run([str(Path(sys.executable).parent / "fairway"), *arguments], tmp_path, status)


def _run(command: list[str], directory: Path, status: int) -> None:
    run = subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    shown = shlex.join(["fairway", *command[1:]]) if command[0].endswith("fairway") else command[1]
    assert run.returncode == status, f"{shown}: exit {run.returncode}, not {status}\n{run.stdout}{run.stderr}"


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
"""


def test_blocks_are_found_with_their_lines() -> None:
    found = blocks(MARKDOWN)
    assert [(block.language, block.line) for block in found] == [("python", 3), ("python", 12), ("console", 17)]
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
