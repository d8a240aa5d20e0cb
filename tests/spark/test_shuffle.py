"""Jobs have as many tasks as there is to do, and leave a user's own setting alone."""

from __future__ import annotations

from pyspark.sql import SparkSession

from fairway.client.sync.client import Client
from fairway.spark.jobs import job as jobs
from fairway.spark.jobs import reconcile, trace
from fairway.spark.jobs.selection import Picking
from tests.spark.jobs import send


def test_partitions_follow_the_messages() -> None:
    assert [jobs.partitions(count, 8) for count in (0, 1, 50_000, 50_001, 1_000_000, 10**9)] == [1, 1, 1, 8, 20, 200]
    assert jobs.partitions(100_000, 1_000) == 200


def test_setting_is_put_back_and_that_of_a_user_is_kept(spark: SparkSession) -> None:
    fresh = spark.newSession()
    fresh.conf.set(jobs.SETTING, "7")
    with jobs.sized(fresh, 10_000_000):
        assert fresh.conf.get(jobs.SETTING) == "7"
    fresh.conf.unset(jobs.SETTING)
    with jobs.sized(fresh, 500_000):
        assert fresh.conf.get(jobs.SETTING) == "10"
    assert jobs.SETTING not in fresh.conf.getAll


def test_stages_of_small_jobs_have_few_tasks(spark: SparkSession, client: Client, url: str) -> None:
    send(client, "shuffle.small", 200)
    client.consumer("shuffle.small", "readers").close()
    fresh = spark.newSession()
    fresh.conf.unset(jobs.SETTING)
    most = 0
    tracker = spark.sparkContext.statusTracker()
    spark.sparkContext.setJobGroup("shuffle-small", "tasks of stages")
    try:
        reconcile.run(fresh, reconcile.ReconcileOptions(("shuffle.small",), url))
        rows = fresh.range(200, numPartitions=2).selectExpr("cast(id as string) id", "'shuffle.small' subject")
        reconcile.run(fresh, reconcile.ReconcileOptions(("shuffle.small",), url), rows)
        trace.run(fresh, trace.TraceOptions(Picking(("shuffle.small",), url=url)))
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    for job in tracker.getJobIdsForGroup("shuffle-small"):
        info = tracker.getJobInfo(job)
        for stage in info.stageIds if info is not None else ():
            told = tracker.getStageInfo(stage)
            most = max(most, told.numTasks if told is not None else 0)
    assert 0 < most <= 16
