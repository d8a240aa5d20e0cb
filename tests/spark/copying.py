"""A Spark program for the tests: copies one subject to another, once or for ever.

copying.py URL SOURCE TARGET CHECKPOINT [for-ever]
"""

from __future__ import annotations

import sys

from fairway.spark import session


def main(url: str, source: str, target: str, checkpoint: str, mode: str = "once") -> None:
    spark = session("copying", settings={"spark.ui.enabled": "false", "spark.driver.memory": "1g"})
    spark.sparkContext.setLogLevel("ERROR")
    stored = spark.read.format("fairway").options(url=url, subject=source).load()
    print(f"python={spark.sparkContext.pythonExec} stored={stored.count()}", flush=True)
    stream = spark.readStream.format("fairway").options(url=url, subject=source, maxMessagesPerTrigger="700").load()
    writer = stream.writeStream.format("fairway").options(url=url, subject=target, patienceSeconds="60")
    writer = writer.option("checkpointLocation", checkpoint)
    query = writer.start() if mode == "for-ever" else writer.trigger(availableNow=True).start()
    query.awaitTermination()
    print(f"batches={query.lastProgress['batchId'] + 1 if query.lastProgress else 0}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
