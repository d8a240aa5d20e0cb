"""Each rule catches what it is for, and lets the near miss pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.tidy import bans, layers, liveness, shape, swallowing, texts
from tests.tidy.source import Finding, Source

Rule = Callable[[Iterable[Source]], Iterator[Finding]]

STORAGE = "src/fairway/storage/planted.py"
RUNTIME = "src/fairway/runtime/planted.py"
CLI = "src/fairway/cli/planted.py"
CLIENT = "src/fairway/client/planted.py"
SURFACE = "src/fairway/__init__.py"
TESTS = "tests/planted.py"

CAUGHT: tuple[tuple[Rule, str, str], ...] = (
    (layers.arrows, STORAGE, "from fairway.protocol import frames"),
    (layers.arrows, STORAGE, "import fairway.broker.server"),
    (layers.arrows, STORAGE, "from fairway import groups"),
    (layers.arrows, STORAGE, "from fairway import connect"),
    (layers.arrows, STORAGE, "def f():\n    from fairway.cli import main"),
    (
        layers.arrows,
        STORAGE,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fairway.client import producer",
    ),
    (layers.arrows, STORAGE, "import importlib\nimportlib.import_module('fairway.meta.server')"),
    (layers.arrows, RUNTIME, "from fairway.batch import encode"),
    (layers.arrows, CLIENT, "from fairway.broker import server"),
    (layers.arrows, CLIENT, "from fairway.replication import leader"),
    (layers.arrows, "src/fairway/spark/planted.py", "from fairway.meta import routing"),
    (layers.arrows, "src/fairway/delay/planted.py", "from fairway.client import producer"),
    (layers.arrows, "src/fairway/delay/planted.py", "from fairway.broker import produce"),
    (layers.arrows, "src/fairway/limits.py", "from fairway.errors import Misuse"),
    (layers.arrows, SURFACE, "from fairway.broker import server"),
    (layers.arrows, "src/fairway/utils/planted.py", ""),
    (layers.absolute, STORAGE, "from . import segment"),
    (layers.absolute, TESTS, "from ..x import y"),
    (layers.lazy, "src/fairway/batch/planted.py", "import numpy as np"),
    (layers.lazy, "src/fairway/batch/planted.py", "try:\n    import pyarrow\nexcept ImportError:\n    pass"),
    (layers.lazy, CLI, "from numpy import array"),
    (layers.lazy, STORAGE, "import uvloop"),
    (layers.lazy, "src/fairway/batch/arrow.py", "import pyspark"),
    (layers.lazy, "src/fairway/batch/planted.py", "from fairway.batch import arrow"),
    (layers.lazy, "src/fairway/batch/planted.py", "from fairway.batch.arrow import record_batch"),
    (bans.machine, STORAGE, "import time"),
    (bans.machine, STORAGE, "import os.path"),
    (bans.machine, STORAGE, "from os import fsync"),
    (bans.machine, STORAGE, "import concurrent.futures"),
    (bans.machine, STORAGE, "def f():\n    import uuid"),
    (bans.machine, STORAGE, "from pathlib import Path\nPath('x').read_text()"),
    (bans.machine, STORAGE, "import io\nio.open('x')"),
    (bans.machine, STORAGE, "from io import FileIO"),
    (bans.machine, STORAGE, "open('x')"),
    (bans.machine, STORAGE, "import builtins\nbuiltins.open('x')"),
    (bans.machine, STORAGE, "import numpy as np\nnp.random.default_rng()"),
    (bans.machine, STORAGE, "import datetime\ndatetime.datetime.now(datetime.UTC)"),
    (bans.machine, STORAGE, "from datetime import datetime as moment\nmoment.utcnow()"),
    (bans.machine, STORAGE, "from datetime import date\ndate.today()"),
    (bans.machine, STORAGE, "import asyncio\nasyncio.create_subprocess_exec('x')"),
    (bans.machine, CLI, "import time"),
    (bans.machine, CLI, "import subprocess"),
    (bans.machine, "src/fairway/spark/sink.py", "open('x')"),
    (bans.loop_bypass, STORAGE, "loop.run_in_executor(None, f)"),
    (bans.loop_bypass, STORAGE, "import asyncio\nasyncio.to_thread(f)"),
    (bans.loop_bypass, STORAGE, "from asyncio import to_thread as later\nlater(f)"),
    (bans.loop_bypass, RUNTIME, "get_loop().sendfile(t, f)"),
    (bans.loop_bypass, RUNTIME, "self.loop.sock_recv(s, 1)"),
    (bans.code_from_data, STORAGE, "import pickle"),
    (bans.code_from_data, TESTS, "from marshal import loads"),
    (bans.code_from_data, TESTS, "import shelve"),
    (bans.code_from_data, TESTS, "eval('1')"),
    (bans.code_from_data, TESTS, "list(map(eval, texts))"),
    (bans.code_from_data, "bench/planted.py", "exec('x = 1')"),
    (bans.code_from_data, TESTS, "numpy.load(f, allow_pickle=True)"),
    (bans.asserts, STORAGE, "assert position == end"),
    (bans.prints, STORAGE, "print('x')"),
    (bans.prints, CLI, "print('x')"),
    (bans.prints, CLI, "import typer\ntyper.echo('x')"),
    (bans.prints, CLI, "import sys\nsys.stdout.write('x')"),
    (bans.prints, CLI, "from sys import stderr\nstderr.write('x')"),
    (bans.prints, "src/fairway/spark/jobs/planted.py", "from rich.console import Console\nConsole().print('x')"),
    (swallowing.swallowed, STORAGE, "try:\n    f()\nexcept Exception:\n    pass"),
    (swallowing.swallowed, STORAGE, "try:\n    f()\nexcept:\n    return_code = 1"),
    (swallowing.swallowed, STORAGE, "try:\n    f()\nexcept (OSError, BaseException):\n    x = 1"),
    (swallowing.swallowed, STORAGE, "try:\n    f()\nexcept Exception as error:\n    log.warning('no: %s', error)"),
    (swallowing.swallowed, STORAGE, "try:\n    f()\nexcept Exception as error:\n    self._log.error(str(error))"),
    (swallowing.swallowed, TESTS, "for x in y:\n    try:\n        f()\n    except Exception:\n        continue"),
    (swallowing.swallowed, TESTS, "with contextlib.suppress(Exception):\n    f()"),
    (shape.ceilings, STORAGE, "x = 1\n" * 601),
    (shape.ceilings, TESTS, "def f():\n" + "    x = 1\n" * 70),
    (shape.packages, STORAGE, ""),
    (shape.ceilings, "bench/planted.py", "class A:\n    async def f():\n" + "        x = 1\n" * 70),
)

PASSES: tuple[tuple[Rule, str, str], ...] = (
    (
        layers.arrows,
        STORAGE,
        "from fairway import limits\nfrom fairway.batch import encode\nimport fairway.runtime.disk",
    ),
    (layers.arrows, STORAGE, "from fairway.storage import segment"),
    (layers.arrows, CLI, "from fairway import __version__\nfrom fairway.broker import server"),
    (layers.arrows, "src/fairway/spark/planted.py", "from fairway.client import producer"),
    (layers.arrows, TESTS, "from fairway.broker import server\nfrom fairway.client import producer"),
    (layers.lazy, "src/fairway/batch/planted.py", "def f():\n    import numpy as np"),
    (layers.lazy, "src/fairway/batch/planted.py", "if TYPE_CHECKING:\n    import pyarrow"),
    (layers.lazy, STORAGE, "import numpy as np"),
    (layers.lazy, "src/fairway/batch/arrow.py", "import pyarrow"),
    (layers.lazy, "src/fairway/batch/planted.py", "def f():\n    from fairway.batch.arrow import record_batch"),
    (bans.machine, RUNTIME, "import os, time, threading\nopen('x')"),
    (bans.machine, STORAGE, "import io\nio.BytesIO(b'')"),
    (bans.machine, STORAGE, "from pathlib import PurePosixPath"),
    (bans.machine, STORAGE, "disk.open('x')\nclock.now()"),
    (bans.machine, STORAGE, "import datetime\ndatetime.datetime.fromtimestamp(0, datetime.UTC)"),
    (bans.machine, CLI, "from pathlib import Path\nopen('x')"),
    (bans.machine, "src/fairway/spark/jobs/archive.py", "open('x')"),
    (bans.machine, TESTS, "import time"),
    (bans.loop_bypass, RUNTIME, "class Loop:\n    def run_in_executor(self): ...\n    def sock_recv(self): ..."),
    (bans.code_from_data, STORAGE, "import re\nre.compile('x')"),
    (bans.asserts, TESTS, "assert 1"),
    (bans.prints, TESTS, "print('x')"),
    (bans.prints, "src/fairway/runtime/terminal.py", "import sys\nsys.stdout.write('x')"),
    (bans.prints, CLI, "from rich.console import Console\ndef show(out: Console) -> None:\n    out.print('x')"),
    (swallowing.swallowed, STORAGE, "try:\n    f()\nexcept OSError:\n    pass"),
    (swallowing.swallowed, STORAGE, "try:\n    f()\nexcept Exception as error:\n    future.set_exception(error)"),
    (swallowing.swallowed, STORAGE, "try:\n    f()\nexcept BaseException:\n    undo()\n    raise"),
    (swallowing.swallowed, STORAGE, "with contextlib.suppress(FileNotFoundError):\n    f()"),
    (shape.packages, "tests/__init__.py", ""),
    (shape.ceilings, STORAGE, "x = 1\n" * 600),
    (shape.ceilings, STORAGE, "def f():\n" + "    x = 1\n" * 69),
)


def _name(value: object) -> str:
    return value.__name__ if callable(value) and hasattr(value, "__name__") else ""


@pytest.mark.parametrize(("rule", "path", "text"), CAUGHT, ids=_name)
def test_planted_violation_is_caught(rule: Rule, path: str, text: str) -> None:
    assert list(rule([Source.parse(path, text)]))


@pytest.mark.parametrize(("rule", "path", "text"), PASSES, ids=_name)
def test_near_miss_passes(rule: Rule, path: str, text: str) -> None:
    assert not [str(finding) for finding in rule([Source.parse(path, text)])]


def test_module_that_only_tests_import_is_dead() -> None:
    sources = [
        Source.parse(SURFACE, "def f():\n    from fairway.storage import log"),
        Source.parse("src/fairway/storage/__init__.py", ""),
        Source.parse("src/fairway/storage/log.py", "from fairway.storage.segment import Segment"),
        Source.parse("src/fairway/storage/segment.py", ""),
        Source.parse("src/fairway/storage/forgotten.py", "from fairway.storage import orphan"),
        Source.parse("src/fairway/storage/orphan.py", ""),
        Source.parse("tests/test_forgotten.py", "import fairway.storage.forgotten"),
    ]
    dead = list(liveness.dead(sources, {"fairway": "the public surface"}))
    assert [finding.path for finding in dead] == [
        "src/fairway/storage/forgotten.py",
        "src/fairway/storage/orphan.py",
    ]
    assert not list(liveness.dead(sources, {"fairway": "", "fairway.storage.forgotten": "a reason"}))


def test_a_type_whose_name_another_has_is_caught() -> None:
    alias = "from typing import TypeAlias\nOutcome: TypeAlias = str\n"
    sources = [
        Source.parse("src/fairway/storage/one.py", "class Place: ...\nclass _Seen: ...\n" + alias),
        Source.parse(
            "src/fairway/broker/two.py", "class Place: ...\nclass _Seen: ...\nclass Outcome: ...\nplace: int = 1\n"
        ),
        Source.parse("tests/test_three.py", "class Place: ..."),
    ]
    found = [finding.sentence.partition("`")[2].partition("`")[0] for finding in shape.unique_names(sources)]
    assert found == ["Place", "_Seen", "Outcome"]
    assert not list(shape.unique_names(sources[:1]))


def test_modules_named_by_a_gerund_are_caught() -> None:
    paths = ["src/fairway/a/moving.py", "src/fairway/a/ring_buffer.py", "src/fairway/coalescing.py"]
    paths += ["src/fairway/testing/__init__.py", "tests/running.py"]
    found = [finding.path for finding in shape.nouns([Source.parse(path, "") for path in paths])]
    assert found == ["src/fairway/a/moving.py"]


def test_entry_point_that_is_gone_is_caught() -> None:
    gone = list(liveness.dead([Source.parse(SURFACE, "")], {"fairway": "", "fairway.gone": ""}))
    assert ["fairway.gone" in finding.sentence for finding in gone] == [True]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("a.md", "no newline"),
        ("a.md", "carriage return\r\n"),
        ("a.py", "if x:\n\ty()\n"),
        ("a.py", f"# {'TO'}{'DO'}: later\n"),
        ("a.md", f"{'FIX'}{'ME'}\n"),
        ("a.toml", f'path = "{"/"}home/someone"\n'),
        ("a.sh", f"cd {'/'}root\n"),
        ("a.sh", f"cd {'/'}work/main\n"),
        ("a.txt", f"{'--index'}-url x\n"),
        ("a.txt", f"see https://{'py'}{'pi'}.org/simple\n"),
    ],
)
def test_untidy_text_is_caught(path: str, content: str) -> None:
    assert len(list(texts.texts([texts.Text(path, content)]))) == 1


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("a.md", f"see docs{'/'}work/x and ~{'/'}home\n"),
        ("Makefile", "all:\n\ttrue\n"),
        ("a.md", ""),
        ("a.md", "todo list\n"),
    ],
)
def test_tidy_text_passes(path: str, content: str) -> None:
    assert not list(texts.texts([texts.Text(path, content)]))


def test_texts_are_found_without_git(tmp_path: Path) -> None:
    (tmp_path / "tests" / "golden").mkdir(parents=True)
    (tmp_path / "tests" / "golden" / "batch-v1.bin").write_bytes(b"no newline")
    (tmp_path / "picture.png").write_bytes(b"\0")
    (tmp_path / "README.md").write_text("text\n", encoding="utf-8")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("text\n", encoding="utf-8")
    assert [text.path for text in texts.load(tmp_path)] == ["README.md"]
