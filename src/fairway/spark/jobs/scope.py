"""The scope of a reconciliation: which messages it covers, and what brokers and delay servers say of them.

The order of reading is: pending messages at the delay server, then where subjects end, then what happened to messages.
A message that moves on meanwhile is therefore found further on, and is never missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)
from pyspark.sql.types import StructType

from fairway.client.delayed_messages import time_ms
from fairway.errors import Misuse
from fairway.protocol.messages import Whence
from fairway.spark.delayed import PENDING
from fairway.spark.frames import MESSAGES
from fairway.spark.jobs import balances, business_rows, message_lifecycle, server_status
from fairway.spark.jobs.reconcile_options import ReconcileOptions
from fairway.spark.jobs.selection import Picking
from fairway.spark.options import Where, explicit, hint, read_options
from fairway.spark.plan import Planner, SubjectExtent
from fairway.spark.server_groups import SubjectPart

COLUMNS: Final = ("subject", "broker_group", "sequence", "id", "key", "created_at", "appended_at")


class Scope:
    """The messages that a reconciliation covers."""

    def __init__(self, spark: SparkSession, options: ReconcileOptions, *, has_rows: bool) -> None:
        self._spark = spark
        self._options = options
        self._has_rows = has_rows
        self.notes: list[str] = []
        told = {"url": options.url, "subject": ",".join(options.subjects), "patienceSeconds": str(options.patience_s)}
        planner = Planner(read_options(told))
        try:
            parts = list(planner.extents())
            names = list(dict.fromkeys(part.subject for part in parts))
            if not names:
                raise Misuse(f"no subject at {planner.where} is meant by {', '.join(options.subjects)}")
            self.scheduled = server_status.scheduled(options.url, options.patience_s, names, options.window_ms)
            self.pending = self._pending(names)
            self.counts = server_status.counts(options.url, options.patience_s, names)
            begins, ends = _resolved(planner, options.since, parts), _resolved(planner, options.until, parts)
        finally:
            planner.close()
        self.stored = {
            part: self.counts.extents.get(part, SubjectExtent(0, 0)) for part in parts
        }  # everything in the logs
        self.extents = {  # the part of it within `since` and `until`
            part: SubjectExtent(max(begins.get(part, first), first), max(min(ends.get(part, end), end), first))
            for part, (first, end) in self.stored.items()
        }
        self._check_groups()

    def _check_groups(self) -> None:
        there = sorted({group for _, group in self.counts.owed})
        for name in self._options.groups:
            if name not in there:
                more = hint(name, there, f"there are {', '.join(there) or 'none'}")
                raise Misuse(f"no group {name!r} on {', '.join(self.names)}: {more}")

    @property
    def names(self) -> list[str]:
        """The names of the subjects."""
        return list(dict.fromkeys(part.subject for part in self.extents))

    def _pending(self, names: Sequence[str]) -> DataFrame:
        """Subject, id and row of scheduled messages, if there are rows to compare them with; read at once."""
        match = self._options.match
        if not self._has_rows or not sum(self.scheduled.messages.values()):
            return self._spark.createDataFrame([], "subject string, id string, row string")
        wanted = {"subject", "id", "headers" if business_rows.needs_headers(match) else match}
        reader = self._spark.read.format("fairway.delayed").options(
            url=self._options.url, subject=",".join(names), patienceSeconds=str(self._options.patience_s)
        )
        pending = reader.schema(StructType([each for each in PENDING.fields if each.name in wanted])).load()
        return pending.select("subject", "id", business_rows.row_of(match).alias("row")).localCheckpoint()

    # --- reading ------------------------------------------------------------------------------------------------------

    def log(self, columns: Iterable[str]) -> DataFrame:
        """The messages of the extents. With rows to compare, it also has all later messages, because the message of a
        row that was sent before `until` may be among them."""
        wanted = set(columns)
        schema = StructType([each for each in MESSAGES.fields if each.name in wanted])
        ends = self.stored if self._has_rows else self.extents
        some = {part: (begin, ends[part].end) for part, (begin, _) in self.extents.items() if begin < ends[part].end}
        if not some:
            return self._spark.createDataFrame([], schema)
        reader = self._spark.read.format("fairway").options(
            url=self._options.url,
            subject=",".join(dict.fromkeys(part.subject for part in some)),
            starting=explicit({part: begin for part, (begin, _) in some.items()}),
            ending=explicit({part: end for part, (_, end) in some.items()}),
            patienceSeconds=str(self._options.patience_s),
        )
        return reader.schema(schema).load()

    def groups(self) -> DataFrame:
        """Per subject, broker group and group: `begun_at`, since when the group exists, `last_ack_at`, and what it
        `lost`."""
        options = self._options
        told = {"url": options.url, "subject": ",".join(self.names), "patienceSeconds": str(options.patience_s)}
        if options.since is not None:
            told["starting"] = options.since.isoformat()
        if options.groups:
            told["group"] = ",".join(options.groups)
        events = self._spark.read.format("fairway.events").options(**told).load()
        event, at = F.col("event"), F.col("at")
        lost = F.when(event == "lost", F.struct("first_sequence", "count", "at"))
        return (
            events.filter(F.col("group").isNotNull() & event.isin("configured", "acked", "lost"))
            .groupBy("subject", "broker_group", "group")
            .agg(
                F.min(F.when(event == "configured", at)).alias("begun_at"),
                F.max(F.when(event == "acked", at)).alias("last_ack_at"),
                F.collect_list(lost).alias("lost"),
            )
        )

    def accounts(self, groups: DataFrame) -> DataFrame:
        """The lifecycles of messages in groups, with `window` and `owed_since`: a new group owes nothing from
        before."""
        options = self._options
        picked = Picking(
            tuple(self.names), None, options.url, options.since, options.until, patience_s=options.patience_s
        )
        told = message_lifecycle.lives(self._spark, picked, options.groups or None)
        ends = self._spark.createDataFrame(
            [(*part, end) for part, (_, end) in self.extents.items()], "subject string, broker_group string, end long"
        )
        told = told.join(F.broadcast(ends), ["subject", "broker_group"])
        told = told.filter(F.col("sequence") < F.col("end")).drop("end")
        begun = F.broadcast(groups.select("subject", "broker_group", "group", "begun_at"))
        owed = told.join(begun, ["subject", "broker_group", "group"], "left")
        owed = owed.withColumn("owed_since", F.greatest("appended_at", "begun_at"))  # ignores null
        return owed.withColumn("window", balances.window_of("appended_at", options.window_ms))


def _resolved(planner: Planner, time: datetime | None, parts: Iterable[SubjectPart]) -> dict[SubjectPart, int]:
    """The first message of each subject that was stored then or later; empty: no time is given."""
    if time is None:
        return {}
    return planner.resolve(dict.fromkeys(parts, Where(Whence.TIME, max(0, time_ms(time)))))
