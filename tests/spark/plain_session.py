"""A Spark program for the tests without `fairway.spark.session`: every source and sink on the session that
`SparkSession.builder.getOrCreate()` gives. Its last line is JSON.

plain_session.py URL SOURCE TARGET CHECKPOINT [SETTING=VALUE ...]
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import DataFrame, SparkSession


def payloads(frame: DataFrame) -> list[int]:
    return sorted(int(row[0]) for row in frame.selectExpr("cast(payload as string)").collect())


def main(url: str, source: str, target: str, checkpoint: str, *settings: str) -> None:
    builder = SparkSession.builder
    for setting in settings:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    stored = spark.read.format("fairway").options(url=url, subject=source).load()
    narrow = stored.where("sequence >= 100 and sequence < 110 and key = 'k1'")
    found = {
        "pushdown": spark.conf.get("spark.sql.python.filterPushdown.enabled"),
        "count": stored.count(),
        "narrow": payloads(narrow),
        "is_filtered_by_spark": " Filter " in narrow._jdf.queryExecution().executedPlan().toString(),
    }
    stored.selectExpr("payload", "key").write.format("fairway").mode("append").options(url=url, subject=target).save()
    found["written"] = spark.read.format("fairway").options(url=url, subject=target).load().count()
    stream = spark.readStream.format("fairway").options(url=url, subject=source).load()
    writer = stream.writeStream.format("fairway").options(url=url, subject=f"{target}.stream")
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
    found["streamed"] = spark.read.format("fairway").options(url=url, subject=f"{target}.stream").load().count()
    events = spark.read.format("fairway.events").options(url=url, subject=source).load()
    found["produced"] = events.where("event = 'produced'").selectExpr("sum(count)").first()[0]  # type: ignore[index]
    found["delayed"] = spark.read.format("fairway.delayed").options(url=url, subject=source).load().count()
    spark.stop()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
