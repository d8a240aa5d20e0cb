"""The same as `pyspark_fairway`, for `format("fairway.delayed")`: Spark takes one source of each such package."""

try:
    from fairway.spark.delayed import DelayedSource as DefaultSource
except (ImportError, ValueError):  # ValueError: what `fairway.spark` raises where pyspark or pyarrow is missing
    __all__: list[str] = []
else:
    __all__ = ["DefaultSource"]
