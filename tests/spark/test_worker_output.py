"""What a user sees of Python workers: why a source cannot be used, and nothing of workers that Spark has closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairway.client.sync.client import Client
from fairway.errors import Misuse
from fairway.spark.session import check_version
from tests.spark.jobs import send
from tests.spark.standalone import ENVIRONMENT, WAIT_S

LIMITED = """
import sys
from fairway.spark import session
spark = session("limited", "local[2]", {"spark.ui.enabled": "false"})
frame = spark.read.format("fairway").options(url=sys.argv[1], subject=sys.argv[2]).load()
print([len(frame.limit(3).collect()) for _ in range(3)], frame.count())
spark.stop()
"""
PLAIN = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
try:
    spark.read.format(sys.argv[1]).load()
finally:
    spark.stop()
"""


def run(program: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, "JDK_JAVA_OPTIONS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)


@pytest.mark.xdist_group("spark")
def test_worker_whose_rows_nobody_needs_any_more_says_nothing(client: Client, url: str) -> None:
    send(client, "worker.limited", 50_000)
    ran = run(LIMITED, url, "worker.limited")
    assert ran.stdout.splitlines()[-1] == "[3, 3, 3] 50000", ran.stderr
    assert "BrokenPipeError" not in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize("name", ["fairway", pytest.param("fairway.events", marks=pytest.mark.slow)])
def test_source_that_cannot_be_imported_says_why(tmp_path: Path, name: str) -> None:
    (tmp_path / "msgspec").mkdir()
    (tmp_path / "msgspec" / "__init__.py").write_text("raise ImportError('msgspec is not for this machine')")
    ran = run(PLAIN, name, path=tmp_path)
    assert ran.returncode != 0
    assert f'format("{name}") cannot be used in ' in ran.stderr
    assert "msgspec is not for this machine" in ran.stderr
    assert 'pip install "fairway[spark]"' in ran.stderr


@pytest.mark.parametrize("version", ["3.5.4", "4.0.1", "4.1.0.dev0"])
def test_older_pyspark_is_refused_with_the_version_that_is_needed(version: str) -> None:
    with pytest.raises(Misuse, match=rf"needs pyspark 4.2 or later, and this is {version}: pip install --upgrade"):
        check_version(version)
    for known in ("4.2.0", "4.3.0", "5.0.0", "preview"):
        check_version(known)
