"""The repository keeps its own rules: import arrows, bans, ceilings, no dead modules, tidy texts.

The rules live in `tests/tidy/`, where `test_rules.py` shows that each one catches what it is for.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.tidy import bans, layers, liveness, shape, swallowing, texts
from tests.tidy.source import ROOT, Finding, Source, load

RULES: tuple[Callable[[Iterable[Source]], Iterator[Finding]], ...] = (
    layers.arrows,
    layers.absolute,
    layers.lazy,
    bans.machine,
    bans.loop_bypass,
    bans.code_from_data,
    bans.asserts,
    bans.prints,
    swallowing.swallowed,
    shape.ceilings,
    shape.packages,
    shape.unique_names,
    shape.nouns,
    liveness.dead,
)

# What a machine with the core install alone imports; none of it may pull in what an extra brings.
CORE_PARTS = ("", "aio", "names", "limits", "errors", "runtime", "batch", "protocol", "client")


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return load()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_the_rule(rule: Callable[[Iterable[Source]], Iterator[Finding]], sources: list[Source]) -> None:
    _none(rule(sources))


def test_every_text_is_tidy() -> None:
    _none(texts.texts(texts.load()))


def test_core_install_imports_nothing_optional(sources: list[Source]) -> None:
    core = {source.module for source in sources if source.in_product and source.package in CORE_PARTS}
    modules = [*sorted(core - layers.ADAPTERS.keys()), "fairway.__main__"]
    program = (
        "import importlib, sys\n"
        "optional, modules = (line.split() for line in sys.stdin)\n"
        "for module in modules:\n"
        "    importlib.import_module(module)\n"
        "    loaded = sorted(set(optional) & set(sys.modules))\n"
        "    if loaded:\n"
        "        sys.exit(f'importing {module} imports {loaded}')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        input=f"{' '.join(layers.OPTIONAL)}\n{' '.join(modules)}\n",
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def _none(findings: Iterable[Finding]) -> None:
    found = [str(finding) for finding in findings]
    assert not found, "\n" + "\n".join(found)
