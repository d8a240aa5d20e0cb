"""Repetition on streams of which it is known how they repeat."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from fairway.client.sync.client import Client
from fairway.errors import Misuse
from fairway.spark.jobs import repetition
from fairway.spark.jobs.job import Point
from fairway.spark.jobs.repetition import RepetitionOptions
from fairway.spark.jobs.selection import Picking
from tests.spark.jobs import send


def stream(spark: SparkSession, keys: dict[str, list[str | None]]) -> DataFrame:
    rows = [(subject, "default", place, key) for subject, of in keys.items() for place, key in enumerate(of)]
    return spark.createDataFrame(rows, "subject string, broker_group string, sequence long, key string")


def saved_by_machine(keys: list[str | None], queue_length: int) -> int:
    """The state machine itself, message by message: one in process for the length of the queue, one waits."""
    busy_until: dict[str, int] = {}
    waits: dict[str, bool] = {}
    declined = 0
    for place, key in enumerate(keys):
        if key is None:
            continue
        while key in busy_until and busy_until[key] <= place:
            if waits.pop(key, False):
                busy_until[key] += queue_length
            else:
                del busy_until[key]
        if key not in busy_until:
            busy_until[key] = place + queue_length
        elif not waits.get(key):
            waits[key] = True
        else:
            declined += 1
    return declined


def test_classes_follow_the_smallest_distance(spark: SparkSession) -> None:
    singles: list[str | None] = [f"k{number}" for number in range(20)]
    apart: list[str | None] = [f"k{number % 10}" for number in range(20)]  # each key again after ten places
    found = {
        (row["subject"], row["key"]): row
        for row in repetition.by_key(stream(spark, {"none": singles, "apart": apart, "hot": ["h"] * 20}), 10).collect()
    }
    assert found["none", "k3"]["repetition"] == "none"
    assert found["none", "k3"]["least_distance"] is None
    assert (found["apart", "k3"]["repetition"], found["apart", "k3"]["least_distance"]) == ("sparse", 10)
    assert (found["hot", "h"]["repetition"], found["hot", "h"]["least_distance"]) == ("high", 1)
    near = repetition.by_key(stream(spark, {"apart": apart}), 11).collect()
    assert {row["repetition"] for row in near} == {"high"}


def test_savings_are_those_of_the_state_machine(spark: SparkSession) -> None:
    mixed: list[str | None] = [("hot" if number % 3 else f"k{number % 40}") for number in range(600)]
    streams: dict[str, list[str | None]] = {
        "hot": ["h"] * 200,
        "mixed": mixed,
        "pairs": [f"p{number // 2}" for number in range(200)],
    }
    keys = repetition.by_key(stream(spark, streams), 20)
    found = {
        row["subject"]: row["sum"]
        for row in keys.groupBy("subject").agg({"saved": "sum"}).toDF("subject", "sum").collect()
    }
    for subject, planted in streams.items():
        exact = saved_by_machine(planted, 20)
        assert abs(found[subject] - exact) <= 0.1 * len(planted), (subject, found[subject], exact)
    assert found["pairs"] == 0  # one in process, one waits: nothing is declined


def test_live_subjects_are_told_apart_and_a_policy_is_named(
    spark: SparkSession, url: str, client: Client, tmp_path: Path
) -> None:
    send(client, "rep.none", 30, keys=[f"k{number}" for number in range(30)])
    send(client, "rep.hot", 40, keys=["h" if number % 4 else None for number in range(40)])
    output = tmp_path / "keys"
    options = RepetitionOptions(Picking(("rep.*",), url=url), queue_length=10, top=1, output=str(output))
    seen: list[Point] = []
    found = repetition.run(spark, options, seen.append)
    assert [each.sentence for each in seen] == ["repetition: 70 rows"]
    hot, none = found.subjects
    assert (hot.subject, hot.repetition, hot.messages, hot.unkeyed, hot.keys) == ("rep.hot", "high", 40, 10, 1)
    assert hot.recommendation == "coalesce by key"
    assert hot.saved == 30 - 5  # two of the first stretch of ten, one of each of the three after it
    assert (none.repetition, none.saved) == ("none", 0)
    assert none.recommendation.startswith("leave it")
    assert [(key.subject, key.key) for key in found.keys] == [("rep.hot", "h")]
    assert spark.read.parquet(str(output)).count() == 31
    with pytest.raises(Misuse, match="1 at least"):
        repetition.run(spark, RepetitionOptions(Picking(("rep.*",), url=url), queue_length=0))
