"""The same as `pyspark_fairway`, for `format("fairway.events")`: Spark takes one source of each such package."""

try:
    from fairway.spark.events import EventSource as DefaultSource  # noqa: F401
except (ImportError, ValueError) as error:  # ValueError: what `fairway.spark` raises where something is missing
    from pyspark_fairway import explained

    globals().update(explained.sources("fairway.events", error))
