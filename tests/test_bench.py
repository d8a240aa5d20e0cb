"""`python -m bench` lists the benches, runs the one that is named, and refuses a name that it does not know."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest

from bench import __main__ as runner


def planted(status: int | None, calls: list[Sequence[str]]) -> ModuleType:
    def main(argv: Sequence[str]) -> int | None:
        calls.append(argv)
        return status

    module = ModuleType("planted", "What it compares.\n\nMore.")
    module.__dict__["main"] = main
    return module


def test_every_bench_has_an_entry_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main([]) == 0
    shown = capsys.readouterr().out
    for name, module in runner.benches().items():
        assert f"  {name}" in shown
        assert module.__doc__, f"bench/{name}.py has no docstring for the list"


def test_unknown_bench_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["no-such-bench"]) == 2
    assert "no bench is called 'no-such-bench'" in capsys.readouterr().err


def test_named_bench_gets_its_arguments_and_its_status_counts(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Sequence[str]] = []
    assert runner.run("planted", planted(None, calls), ["--quick"]) == 0
    assert runner.run("planted", planted(3, calls), []) == 3
    assert calls == [["--quick"], []]
    assert runner.listing({"planted": planted(0, calls)}) == "benches:\n  planted  What it compares."
    assert capsys.readouterr().out == "== planted\n== planted\n"
