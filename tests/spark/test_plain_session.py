"""On a session that is not ours: the sources and sinks work with Spark's own defaults, and filters are pushed down only
where the session says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import DataSourceReader

from fairway.client.sync.client import Client
from fairway.spark.frames import MESSAGES
from fairway.spark.options import read_options
from fairway.spark.session import IS_PUSHED_BY_SCAN
from fairway.spark.source import BatchReader, FairwaySource
from tests.spark.standalone import ENVIRONMENT, HOME, SMALL, WAIT_S, Cluster

PROGRAM = Path(__file__).with_name("plain_session.py")
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
MESSAGE_COUNT = 1_000


def send(client: Client, subject: str) -> None:
    numbers = range(MESSAGE_COUNT)
    client.send_many(subject, [b"%d" % at for at in numbers], keys=[f"k{at % 5}" for at in numbers]).result(30)
    client.send(subject, b"later", after=timedelta(days=1)).result(30)


def run(command: Sequence[str], url: str, subject: str, tmp_path: Path, *settings: str) -> dict[str, Any]:
    arguments = (str(PROGRAM), url, subject, f"{subject}.copy", str(tmp_path / "checkpoint"), *settings)
    environment = {**ENVIRONMENT, "JDK_JAVA_OPTIONS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}
    ran = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], *, is_pushing: bool = False) -> None:
    assert found == {
        "pushdown": str(is_pushing).lower(),
        "count": MESSAGE_COUNT,
        "narrow": [101, 106],
        "is_filtered_by_spark": not (is_pushing and IS_PUSHED_BY_SCAN),
        "written": MESSAGE_COUNT,
        "streamed": MESSAGE_COUNT,
        "produced": MESSAGE_COUNT,
        "delayed": 1,
    }


def test_reader_looks_to_pyspark_as_if_it_took_no_filters() -> None:
    """What pyspark's planner compares, in every version that has filters: a reader that overrides is refused."""
    options = {"subject": "orders"}
    for reader in (
        FairwaySource(options).reader(MESSAGES),
        BatchReader(read_options(options), MESSAGES, is_pushed_by_scan=True),
    ):
        assert getattr(reader.pushFilters, "__func__", None) is DataSourceReader.pushFilters


@pytest.mark.xdist_group("spark")
def test_plain_session(client: Client, url: str, tmp_path: Path) -> None:
    send(client, "plain.session")
    check(run([sys.executable], url, "plain.session", tmp_path))


@pytest.mark.slow
@pytest.mark.xdist_group("spark")
def test_plain_session_that_pushes_filters(client: Client, url: str, tmp_path: Path) -> None:
    send(client, "plain.pushing")
    check(run([sys.executable], url, "plain.pushing", tmp_path, f"{PUSHDOWN}=true"), is_pushing=True)


@pytest.mark.slow
@pytest.mark.xdist_group("spark")
def test_plain_session_by_spark_submit(client: Client, url: str, tmp_path: Path) -> None:
    send(client, "plain.submit")
    command = [str(HOME / "bin" / "spark-submit"), "--master", "local[2]", *SMALL]
    check(run(command, url, "plain.submit", tmp_path))


@pytest.mark.slow
def test_plain_session_on_a_standalone_cluster(cluster: Cluster, client: Client, url: str, tmp_path: Path) -> None:
    send(client, "plain.cluster")
    command = [str(HOME / "bin" / "spark-submit"), "--master", cluster.url, *SMALL]
    check(run(command, url, "plain.cluster", tmp_path))
