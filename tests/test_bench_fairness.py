"""The fairness bench runs to its end, so that it does not rot; how fair it is on a loaded machine says nothing."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest

from bench import fairness
from bench.loads import Arrival, rate_of
from bench.processes import Child, commands
from fairway.runtime.service import run


def test_a_tiny_run_prints_every_figure_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "fairness.png"
    arguments = ["--tiny", "--json", "--directory", str(tmp_path), "--plot", str(picture)]
    assert fairness.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    for kind in ("actors", "plain queue"):
        assert 0 <= result["shares"][kind]["small_share"] <= 1
        assert result["cold"][kind]["beside"]["p99_ms"] > 0
    assert result["cold"]["actors"]["beside"]["cold_messages_per_s"] > 0
    assert result["cold"]["plain queue"]["cold_ratio"] == 1
    [crowd] = result["crowds"]
    assert crowd["groups"] == 5
    assert crowd["deliveries_per_s"] > 0
    assert 0 < crowd["hand_p50_ms"] <= crowd["hand_p99_ms"]
    assert picture.stat().st_size > 10_000
    fairness.show(result)
    assert "Jain" in capsys.readouterr().out


def test_the_way_from_send_to_hand_is_that_of_the_messages_that_were_sent_meanwhile() -> None:
    sent = {"first": 4, "each": 2, "sent_at_s": [1.0, 2.0]}
    arrivals = [Arrival(1.5, 3, 2), Arrival(2.5, 5, 4)]
    assert fairness.hand_ms(sent, arrivals) == pytest.approx([500.0, 1_500.0, 500.0, 500.0])


def test_a_rate_ends_with_the_last_message_where_nothing_was_left() -> None:
    arrivals = [Arrival(0.5, 0, 99), Arrival(1.5, 0, 10), Arrival(2.0, 10, 10)]
    assert rate_of(arrivals, 1.0, 4.0) == 20.0
    assert rate_of([*arrivals, Arrival(9.0, 20, 10)], 1.0, 4.0) == 5.0
    assert rate_of([], 1.0, 4.0) == 0.0


@pytest.mark.parametrize(("shares", "index"), [([1, 1], 1.0), ([1, 0], 0.5), ([3, 1], 0.8)])
def test_jains_index(shares: list[float], index: float) -> None:
    assert fairness.jain(shares) == pytest.approx(index)


async def _long_answer(_command: str) -> list[int]:
    return list(range(500_000))


def _answer_at_length(pipe: Pipe) -> None:
    run(commands(pipe, _long_answer))


def test_an_answer_may_be_longer_than_a_pipe_holds() -> None:
    with Child(_answer_at_length) as child:
        assert len(child.ask("speak")) == 500_000


def test_percentiles() -> None:
    values = list(map(float, range(100)))
    assert (fairness.percentile(values, 50), fairness.percentile(values, 99)) == (50.0, 99.0)
    assert fairness.percentile([], 99) == 0.0
