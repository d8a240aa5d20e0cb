"""One run of `reconcile`: reads every source once, compares them, and sums up.

`Scope` has the messages that the run covers, and what brokers and delay servers say of them. The order of reading is:
pending messages at the delay server, then where subjects end, then what happened to messages. A message that moves on
meanwhile is therefore found further on, and is never missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import reduce
from typing import Final

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)
from pyspark.sql.types import StructType

from fairway.client.delayed_messages import time_ms
from fairway.client.idempotence import REPLAY_ID
from fairway.errors import Misuse
from fairway.protocol.messages import Whence
from fairway.spark.delayed import PENDING
from fairway.spark.frames import MESSAGES
from fairway.spark.jobs import (
    archive_log,
    audit,
    balances,
    findings,
    message_lifecycle,
    producer_records,
    server_status,
)
from fairway.spark.jobs.audit import Archive, Whole, holes
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.job import Point, ProgressListener, in_utc
from fairway.spark.jobs.reconcile_options import (
    ID,
    MS,
    Discrepancy,
    GroupBalance,
    ReconcileOptions,
    ReconcileResult,
    needs_headers,
)
from fairway.spark.jobs.selection import Picking, events
from fairway.spark.options import Where, hint, options_of, options_of_ranges, read_options
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
        planner = Planner(read_options(options_of(options.url, options.patience_s, options.subjects)))
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
        wanted = {"subject", "id", "headers" if needs_headers(match) else match}
        told = options_of(self._options.url, self._options.patience_s, names)
        reader = self._spark.read.format("fairway.delayed").options(**told)
        pending = reader.schema(StructType([each for each in PENDING.fields if each.name in wanted])).load()
        return pending.select("subject", "id", producer_records.row_of(match).alias("row")).localCheckpoint()

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
        told = options_of_ranges(self._options.url, self._options.patience_s, some)
        return self._spark.read.format("fairway").options(**told).schema(schema).load()

    def groups(self) -> DataFrame:
        """Per subject, broker group and group: `begun_at`, since when the group exists, `last_ack_at`, and what it
        `lost`."""
        options = self._options
        of = options.url, options.patience_s, self.names, options.since, options.groups
        happened = events(self._spark, *of)
        event, at = F.col("event"), F.col("at")
        lost = F.when(event == "lost", F.struct("first_sequence", "count", "at"))
        return (
            happened.filter(F.col("group").isNotNull() & event.isin("configured", "acked", "lost"))
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


WINDOWS_MAX: Final = 10_000  # rows that a result holds: the newest; `output` has all of them


class Reconciliation:
    """One run. Frames that it has read are kept until it is closed."""

    def __init__(
        self, spark: SparkSession, options: ReconcileOptions, rows: DataFrame | None, watch: ProgressListener
    ) -> None:
        """`rows` are business rows. What producers hold is read before anything else."""
        if rows is not None and (options.since or options.until) and "sent_at" not in map(str.lower, rows.columns):
            raise Misuse("--since and --until mean the rows of --sent, too: they need a column sent_at then")
        self._spark = spark
        self._options = options
        self._watch = watch
        self._kept: list[DataFrame] = []
        self._waiting: DataFrame | None = None  # what producers hold, with fates
        notes: list[str] = []
        self._held = producer_records.load_held(spark, options, notes)
        self._given = rows
        self._rows = None if rows is None else producer_records.prepared(rows, options.subjects)  # persisted by `run`
        self._scope = Scope(spark, options, has_rows=rows is not None or self._held is not None)
        self._scope.notes.extend(notes)

    @property
    def messages(self) -> int:
        """The number of messages to compare."""
        return sum(end - begin for begin, end in self._scope.extents.values())

    def size(self) -> int:
        """The number of all rows to compare: messages, business rows, what producers hold, and rows of an archive.

        Business rows are counted as given. The prepared rows come from a shuffle, and the session's setting at the time
        of persisting decides its number of parts. `run` persists them under the setting that follows from this size.
        """
        path = self._options.archive
        archived = 0 if path is None else archive_log.load(Files(self._spark, path)).rows
        given = sum(each.count() for each in (self._given, self._held) if each is not None)
        return self.messages + archived + given

    def close(self) -> None:
        for each in self._kept:
            each.unpersist()

    def run(self) -> ReconcileResult:
        options, scope = self._options, self._scope
        self._rows = None if self._rows is None else self._keep(self._rows)
        log = self._keep(self._log())
        messages = log if options.until is None else log.filter(F.col("appended_at") < F.lit(options.until))
        self._tell("reading the log")
        parts = self._of_log(messages)
        self._tell("following messages through groups")
        groups = self._keep(scope.groups())
        accounts = findings.marked(
            scope.accounts(groups), scope.counts.now_ms, options.late_after_ms, options.stuck_after_ms
        ).localCheckpoint()  # their plan is long, and Spark would analyse it with every use
        now_ms = scope.counts.now_ms
        parts.append(findings.of_messages(accounts, now_ms))
        parts.append(findings.stalled(accounts, groups, now_ms, options.stuck_after_ms))
        parts.append(findings.lost(groups.select("subject", "group", F.inline("lost"))))
        self._tell("comparing")
        judged = self._judged(log)
        if judged is not None and self._rows is not None:
            stored = self._as_rows(messages)
            parts += [producer_records.never_stored(judged), producer_records.strangers(self._rows, stored)]
            parts += [] if options.match == ID else [producer_records.rows_twice(self._rows, stored)]
        if self._waiting is not None:
            parts.append(producer_records.unsent(self._waiting, scope.counts.now_ms, options.stuck_after_ms))
            scope.notes.extend(producer_records.notes_of(self._waiting))
        return self._result(messages, accounts, judged, findings.together(parts).localCheckpoint())

    def _log(self) -> DataFrame:
        """The messages with the columns to compare; payloads are reduced to digests."""
        headers = ("headers",) if self._rows is not None and needs_headers(self._options.match) else ()
        if self._options.archive is None:
            return self._scope.log((*COLUMNS, *headers))
        whole = audit.with_content(self._scope.log((*COLUMNS, *audit.PAYLOADS)))
        return whole.select(*COLUMNS, *headers, audit.CONTENT)

    def _keep(self, rows: DataFrame) -> DataFrame:
        self._kept.append(rows.persist())
        return self._kept[-1]

    def _tell(self, doing: str) -> None:
        self._watch(Point(f"reconcile: {doing}", self.messages))

    # --- findings -----------------------------------------------------------------------------------------------------

    def _of_log(self, messages: DataFrame) -> list[DataFrame]:
        """Findings: duplicates and holes in the log, and differences from the archive."""
        copies = self._copies(messages)
        parts = [] if copies is None else [findings.stored_twice(copies)]
        there = messages.select("subject", "broker_group", "sequence", "appended_at")
        archive = self._archive()
        if archive is not None:
            is_whole, extents = self._options.since is None, self._scope.extents
            compared = self._keep(audit.compared(self._spark, archive, messages, extents, is_whole=is_whole))
            parts.append(compared)
            there = there.unionByName(audit.only_archived(archive, messages, compared))
            old = audit.gone(self._spark, archive, messages, extents) if is_whole else None
            parts += [] if old is None else [old]
        wholes = [
            Whole(part.subject, begin, end, part.broker_group) for part, (begin, end) in self._scope.extents.items()
        ]
        gaps = holes(self._spark, there, wholes)
        return parts if gaps is None else [*parts, findings.holes(gaps)]

    def _copies(self, messages: DataFrame) -> DataFrame | None:
        """Messages whose id was there before, except those that a replay has sent again."""
        copies = self._keep(findings.repeated(messages))
        if copies.isEmpty():
            return None
        place = ["subject", "broker_group", "sequence"]
        replayed = self._scope.log((*place, "headers"))
        replayed = replayed.filter(F.col("headers").getItem(REPLAY_ID).isNotNull())
        return copies.join(replayed.select(*place), place, "left_anti")

    def _archive(self) -> Archive | None:
        options, scope = self._options, self._scope
        if options.archive is None:
            return None
        ids = scope.counts.log_ids
        archive = audit.open_archive(self._spark, options.archive, ids, scope.extents, options.since)
        if archive.files_gone:
            more = f" and {len(archive.files_gone) - 1:,} more" if len(archive.files_gone) > 1 else ""
            scope.notes.append(f"{archive.root} lacks files that its commits name: {archive.files_gone[0]}{more}")
        unarchived = sorted(set(scope.names) - {each.subject for each in archive.ranges})
        if unarchived:
            scope.notes.append(f"not in the archive at all: {', '.join(unarchived)}")
        return archive

    # --- business rows ------------------------------------------------------------------------------------------------

    def _judged(self, log: DataFrame) -> DataFrame | None:
        """The fates of rows, and of held messages without a row; None: there are neither."""
        options, scope = self._options, self._scope
        if self._rows is None and self._held is None:
            return None
        archived, begins = self._before(log)
        parts = []
        if self._held is not None:
            some = producer_records.within(self._held, options.since, options.until)
            self._waiting = producer_records.judged_held(some, log, scope.pending, archived).localCheckpoint()
            own = self._waiting  # those without a row
            if self._rows is not None:
                own = own.join(self._rows, producer_records.row_keys(self._rows), "left_anti")
            parts.append(own.select(F.col("id").alias("row"), "subject", "sent_at", "at", "fate"))
        if self._rows is not None:
            rows = producer_records.within(self._rows, options.since, options.until)
            under_way_after_ms = scope.counts.now_ms - options.late_after_ms
            there = self._as_rows(log)
            sides = there, scope.pending, archived
            parts.append(producer_records.judged_rows(rows, *sides, begins, under_way_after_ms, self._waiting))
        judged = reduce(DataFrame.unionByName, parts)
        # A checkpoint has as few parts as its rows need; a persisted frame has one for each part of a shuffle.
        return judged.fillna(", ".join(options.subjects), ["subject"]).localCheckpoint()

    def _before(self, log: DataFrame) -> tuple[DataFrame | None, dict[str, datetime]]:
        """The messages that the archive has from before the log, and since when each log has messages. Both concern
        only logs whose beginning retention has taken: rows may be about messages from before."""
        options, scope = self._options, self._scope
        cut = {
            part: each for part, each in scope.extents.items() if each.first and each.first == scope.stored[part].first
        }
        archived: DataFrame | None = None
        begins: dict[str, datetime] = {}
        if cut and options.archive is not None:
            archive = audit.open_archive(self._spark, options.archive, scope.counts.log_ids, cut)
            archived = archive.rows if self._rows is None else self._as_rows(archive.rows)
        if cut:
            oldest = log.groupBy("subject", "broker_group").agg(F.min("appended_at").alias("at")).collect()
            for row in oldest:
                if SubjectPart(row["subject"], row["broker_group"]) in cut:
                    at = row["at"].astimezone(UTC)
                    begins[row["subject"]] = max(at, begins.get(row["subject"], at))
        return archived, begins

    def _as_rows(self, messages: DataFrame) -> DataFrame:
        return messages.withColumn("row", producer_records.row_of(self._options.match))

    # --- sums ---------------------------------------------------------------------------------------------------------

    def _result(
        self, messages: DataFrame, accounts: DataFrame, judged: DataFrame | None, found: DataFrame
    ) -> ReconcileResult:
        options, notes = self._options, self._scope.notes
        books_of = self._keep(balances.summed(self._amounts(messages, judged, found), accounts))
        whole = books_of.filter("is_whole").orderBy("subject", "group").collect()
        differing = self._differing(whole)
        if options.output is not None:
            self._write(options.output, found, differing, books_of)
        number = F.when(F.col("kind") == findings.MISSING, F.col("messages")).otherwise(1)
        by_kind = Counter(_pairs(found.groupBy("kind").agg(F.sum(number))))
        by_kind[findings.DIFFERING] += len(differing)
        windows = books_of.filter("not is_whole").orderBy(F.desc("window"), F.desc("subject"), F.desc("group"))
        newest = windows.limit(WINDOWS_MAX + 1).collect()
        if len(newest) > WINDOWS_MAX:
            notes.append(f"only the newest {WINDOWS_MAX:,} rows of windows are shown: --output has all of them")
        if not self._scope.scheduled.is_there:
            notes.append("there is no delay server, so nothing is scheduled")
        fates = {} if judged is None else _pairs(judged.groupBy("fate").count())
        notes.extend(_notes_of(fates))
        return ReconcileResult(
            is_balanced=not set(+by_kind) - (set() if options.is_strict else {findings.STRANGER}),
            at=datetime.fromtimestamp(self._scope.counts.now_ms / MS, UTC),
            window_s=options.window_s,
            counts={kind: by_kind[kind] for kind in findings.KINDS},
            rows=fates,
            books=[_book(row) for row in whole],
            windows=[_book(row) for row in reversed(newest[:WINDOWS_MAX])],
            findings=[*self._named(found, by_kind), *differing[: options.top]],
            notes=notes,
        )

    def _amounts(self, messages: DataFrame, judged: DataFrame | None, found: DataFrame) -> list[DataFrame]:
        """All amounts that are counted per subject."""
        window_ms = self._options.window_ms
        stored_in, at_in = balances.window_of("appended_at", window_ms), balances.window_of("at", window_ms)
        common = [
            balances.problems(found, window_ms),
            balances.amounts(self._due(), F.col("window"), scheduled=F.col("due")),
        ]
        if judged is not None:
            is_unsent = F.col("fate").isin(*producer_records.UNSENT)
            common.append(balances.amounts(judged.filter(is_unsent), at_in, unsent=1, sent=int(self._rows is None)))
        if judged is not None and self._rows is not None:
            return [*common, balances.amounts(messages, stored_in, stored=1), balances.amounts(judged, at_in, sent=1)]
        absent = found.filter(F.col("reason").isin(findings.HOLE, findings.NOT_IN_LOG))
        return [
            *common,
            balances.amounts(messages, stored_in, stored=1, sent=1),
            balances.amounts(absent, at_in, sent=F.col("messages")),
        ]

    def _due(self) -> DataFrame:
        """The scheduled messages, in the windows of their due times."""
        scheduled = self._scope.scheduled
        windows = [(subject, start_ms, count) for (subject, start_ms), count in scheduled.windows.items()]
        counted = {subject for subject, _ in scheduled.windows}
        rest = [(name, None, count) for name, count in scheduled.messages.items() if name not in counted]
        rows = self._spark.createDataFrame([*windows, *rest], "subject string, start_ms long, due long")
        return rows.withColumn("window", F.timestamp_millis("start_ms"))

    def _differing(self, whole: Sequence[Row]) -> list[Discrepancy]:
        """Findings: groups for which the log and the broker disagree. What groups hold is compared only if no group has
        acted meanwhile."""
        before, options = self._scope.counts, self._options
        after = server_status.counts(options.url, options.patience_s, self._scope.names)
        held_by = Counter(part.subject for part in self._scope.extents)
        is_still = before.positions == after.positions and not (options.since or options.until)
        differing = []
        for row in whole:
            place = row["subject"], row["group"]
            if before.spread.get(place) != held_by[row["subject"]]:
                continue  # no group, a removed group, or a group that is not in all broker groups
            stored, told = row["stored"], sum(row[name] for name in ("acked", "dead", "outstanding", "skipped", "lost"))
            if told != stored:
                said = f"the subject has {stored:,} messages, and the events of the group tell of {told:,}"
                differing.append(_differs(*place, abs(told - stored), said))
            held, owed = row[balances.HELD], before.owed[place]
            if is_still and held != owed:
                said = f"the broker counts {owed:,} messages that are handed out and not settled, the log {held:,}"
                differing.append(_differs(*place, abs(held - owed), said))
        return differing

    def _write(self, path: str, found: DataFrame, differing: Sequence[Discrepancy], books_of: DataFrame) -> None:
        rows = found.drop("at")
        more = self._spark.createDataFrame([asdict(each) for each in differing], rows.schema)
        rows.unionByName(more).write.mode("errorifexists").parquet(f"{path}/findings")
        windows = books_of.filter("not is_whole").drop("is_whole", balances.HELD)
        windows.write.mode("errorifexists").parquet(f"{path}/books")

    def _named(self, found: DataFrame, by_kind: Mapping[str, int]) -> list[Discrepancy]:
        """The first findings of each kind, so that no kind displaces another."""
        named = []
        for kind in (each for each in findings.KINDS if by_kind.get(each)):
            some = found.filter(F.col("kind") == kind).drop("at")
            first = some.orderBy("since", "subject", "group", "sequence", "id").limit(self._options.top)
            named += [Discrepancy(**in_utc(row)) for row in first.collect()]
        return named


def _notes_of(fates: Mapping[str, int]) -> list[str]:
    under_way, too_old = (fates.get(fate) for fate in (producer_records.UNDER_WAY, producer_records.TOO_OLD))
    notes = []
    if under_way:
        notes.append(f"{under_way:,} rows were sent a moment ago and are not stored yet: look again")
    if too_old:
        notes.append(
            f"{too_old:,} rows are older than what retention has left, and nobody can say whether they were stored: "
            "--archive looks there, --since leaves them out"
        )
    return notes


def _pairs(rows: DataFrame) -> dict[str, int]:
    """The rows, of a name and a number each, as a dict."""
    return {name: number for name, number in rows.collect()}  # noqa: C416  (a row is more than a pair)


def _book(row: Row) -> GroupBalance:
    return GroupBalance(
        **{name: value for name, value in in_utc(row).items() if name not in {"is_whole", balances.HELD}}
    )


def _differs(subject: str, group: str, messages: int, said: str) -> Discrepancy:
    kind, remedy = findings.REASONS[findings.COUNTED_OTHERWISE]
    nothing = None, None, None
    return Discrepancy(kind, findings.COUNTED_OTHERWISE, subject, group, *nothing, messages, None, None, said, remedy)
