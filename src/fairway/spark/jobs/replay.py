"""`fairway pipeline replay`: sends messages again, to a subject or one group, from an archive or the live log.

A replay first writes its selection as Parquet into its state directory, in order and once for all. Then it sends the
selection slice by slice, and notes each slice when that is stored. Slice n of replay r always has the same rows and the
same identity. So a slice that was under way when the job died is sent again, and the broker stores it once. The same
command continues where it stopped. When all is sent, it says so and sends nothing.

    DIR/selection/*.parquet          the messages, numbered in the order of sending
    DIR/replay.json                  what was asked for, and the slices; written after the whole selection
    DIR/sent-000000000012.json       so many slices are sent

Messages keep their ids, keys, tags, headers and times of creation. Headers say that they are replayed, and from where.

`Cap` limits the rate: at most so many rows a second, whatever happened before. Each portion reserves the time that its
rows may take, from the moment it begins. Time that went unused, because the selection took long or the broker was away,
is not made up for: a cap exists to prevent just such a burst. So in any period at most the rows that the rate allows
for it begin, plus one portion.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final, NamedTuple

import typer
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.client.idempotence import REPLAY_ID
from fairway.client.message_states import REPLAY_GROUP, REPLAY_SEQUENCE, REPLAY_SUBJECT
from fairway.errors import Code, FairwayError, Misuse, Refused
from fairway.names import GroupName, Subject
from fairway.protocol.admin_messages import Depth, Describe, Described
from fairway.runtime import host
from fairway.runtime.clock import Clock, RealClock
from fairway.spark.jobs import job, selection, server_status
from fairway.spark.jobs import manifest as archives
from fairway.spark.jobs.files import Files, NameTaken
from fairway.spark.jobs.job import NS, ProgressCounter, ProgressListener, sentences, unwatched
from fairway.spark.jobs.selection import Picking
from fairway.spark.options import DEFAULT_URL, PATIENCE_S, is_pattern
from fairway.spark.server_groups import BROKER_GROUP, broker_places, caller_to


class Cap:
    """The cap of one run; a rate of 0 is no cap."""

    def __init__(self, rate_per_s: int, clock: Clock | None = None) -> None:
        self._rate_per_s = rate_per_s
        self._clock = clock or RealClock()
        self._free_ns = 0  # when the next portion may begin

    def early_s(self) -> float:
        """How long the next portion must wait; 0: it may begin."""
        return max(self._free_ns - self._clock.monotonic_ns(), 0) / NS

    def begin(self, rows: int) -> None:
        """Reserve time for a portion of `rows` that begins now."""
        if self._rate_per_s:
            self._free_ns = self._clock.monotonic_ns() + rows * NS // self._rate_per_s


VERSION: Final = 1
SLICE_ROWS: Final = 100_000  # sent by one Spark job, which costs about 0.3 s in any case
_ORDER: Final = ("appended_at", "subject", "broker_group", "sequence")
_SENT: Final = ("payload", "key", "tags", "headers", "id", "created_at")
_NAP_S: Final = 0.5  # the time within which a waiting job reacts to a request to end


@dataclass(frozen=True)
class ReplayOptions:
    """What to send, and where."""

    picking: Picking
    to: str
    url: str = DEFAULT_URL
    id: str | None = None  # None: derived from the options, so that the same command is the same replay
    state: str | None = None  # None: within the archive
    rate_per_s: int = 0  # 0: no bound
    patience_s: int = PATIENCE_S
    group: str | None = None  # the only group of the subject `to` that gets them; None: all its groups

    def __post_init__(self) -> None:
        if self.group is None:
            Subject.parse(self.to)
        else:
            Subject.parse_joinable(self.to)
            GroupName.parse(self.group)

    @property
    def receiver(self) -> str:
        """The receiver in words."""
        return self.to if self.group is None else f"group {self.group} on {self.to}"


@dataclass
class Replayed:
    """The result of a run."""

    id: str
    to: str
    group: str | None
    is_dry: bool
    matched: int = 0
    sent: int = 0  # by this run
    sent_before: int = 0  # by runs before it
    is_complete: bool = False
    elapsed_s: float = 0.0
    by_subject: dict[str, int] = field(default_factory=dict)
    state: str | None = None


class RowSlice(NamedTuple):
    """Rows of one file of the selection, by their numbers; `end` is exclusive."""

    path: str
    begin: int
    end: int


def id_of(options: ReplayOptions) -> str:
    """The name of the replay."""
    if options.id is not None:
        return str(Subject.parse(options.id))
    said = json.dumps([_asked(options), options.url], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def count(spark: SparkSession, options: ReplayOptions) -> Replayed:
    """A dry run: count what would be sent."""
    _check_receiver(options)
    with sentences("counting what would be replayed"):
        rows = selection.messages(spark, options.picking).groupBy("subject").count().orderBy("subject").collect()
    by_subject = {row["subject"]: row["count"] for row in rows}
    matched = sum(by_subject.values())
    return Replayed(id_of(options), options.to, options.group, True, matched, by_subject=by_subject)


def run(
    spark: SparkSession,
    options: ReplayOptions,
    watch: ProgressListener = unwatched,
    is_to_end: Callable[[], bool] = lambda: False,
) -> Replayed:
    """Send until all is sent or `is_to_end`; continues an earlier run."""
    _check_receiver(options)
    with sentences(f"replaying to {options.receiver}"):
        return _ReplayRun(spark, options, watch).run(is_to_end)


def _check_receiver(options: ReplayOptions) -> None:
    """Refuse a group that does not exist, before the selection is made."""
    if options.group is None:
        return
    for place in broker_places(options.url, options.patience_s):
        with caller_to(place) as caller:
            try:
                found = caller.ask(Describe(Depth.GROUPS, options.to, options.group), Described)
            except Refused as refused:
                if refused.code not in {Code.NO_SUCH_SUBJECT, Code.NO_SUCH_GROUP}:
                    raise
            else:
                if any(each.groups for each in found.subjects):
                    return
    raise Misuse(
        f"there is no group {options.group!r} on {options.to} at {options.url}: `fairway groups` lists those that are"
    )


def _asked(options: ReplayOptions) -> dict[str, Any]:
    """The options that identify a replay."""
    picked = {name: str(value) for name, value in asdict(options.picking).items() if name != "patience_s"}
    to = {"to": options.to} if options.group is None else {"to": options.to, "group": options.group}
    return {**to, **picked}


class _ReplayRun:
    def __init__(self, spark: SparkSession, options: ReplayOptions, watch: ProgressListener) -> None:
        self._spark = spark
        self._options = options
        self._id = id_of(options)
        place = options.state
        if place is None and options.picking.archive is None:
            raise Misuse(
                "a replay of the live log needs a place to remember what it is to send and how far it is: "
                "give it --state DIR"
            )
        archive = (options.picking.archive or "").rstrip("/")
        self._files = Files(spark, place or f"{archive}/{archives.HOME}/replays/{self._id}")
        self._pace = ProgressCounter(watch, "replay")
        self._cap = Cap(options.rate_per_s)

    def run(self, is_to_end: Callable[[], bool]) -> Replayed:
        planned = self._planned()
        slices = [RowSlice(*each) for each in planned["slices"]]
        notes = [name for name in self._files.names("") if name.startswith("sent-") and name.endswith(".json")]
        sent = max((int(name[5:-5]) for name in notes), default=0)
        matched = sum(each.end - each.begin for each in slices)
        done = Replayed(self._id, self._options.to, self._options.group, False, matched, state=self._files.root)
        done.sent_before = sum(each.end - each.begin for each in slices[:sent])
        for number in range(sent, len(slices)):
            if is_to_end() or not self._wait(is_to_end):
                break
            rows = slices[number].end - slices[number].begin
            self._cap.begin(rows)
            self._send(number, slices[number])
            self._note(number + 1)
            done.sent += rows
            self._pace.add(rows, matched - done.sent_before - done.sent)
        done.is_complete = done.sent_before + done.sent == matched
        done.elapsed_s = self._pace.elapsed_s
        return done

    # --- what is to be sent ------------------------------------------------------------------------------------------

    def _planned(self) -> dict[str, Any]:
        if self._files.exists("replay.json"):
            return self._known()
        if set(self._files.names("")) - {"selection", "staging"}:
            raise Misuse(
                f"{self._files.root} is not empty, and not the state of a replay: give --state a new directory"
            )
        self._files.remove("selection")
        options = self._options
        # An archive may have another name for a broker group than the cluster where the copies are traced.
        names = server_status.log_ids(options.url, options.patience_s) if options.picking.archive is not None else None
        rows = selection.messages(self._spark, options.picking, names).orderBy(*_ORDER)
        rows = rows.withColumn("headers", self._marked())
        rows = rows.select(F.monotonically_increasing_id().alias("ordinal"), *_SENT)
        rows.write.option("maxRecordsPerFile", SLICE_ROWS).parquet(self._files.full("selection"))
        said = {"fairway_replay": VERSION, "id": self._id, "asked": _asked(options), "slices": self._slices()}
        data = json.dumps(said, indent=1).encode()
        self._files.write("replay.json", data, temporary="staging/replay.json")
        return said

    def _known(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self._files.read("replay.json"))
        if said.get("fairway_replay") != VERSION:
            raise Misuse(
                f"{self._files.root} holds a replay of version {said.get('fairway_replay')}, and this release knows "
                f"{VERSION}: upgrade fairway, or give --state a new directory"
            )
        if said["id"] != self._id or said["asked"] != _asked(self._options):
            raise Misuse(
                f"{self._files.root} holds replay {said['id']}, which asked for something else: "
                "give --state a new directory, or ask for the same again"
            )
        return said

    def _marked(self) -> Column:
        """The headers, with the message's origin in place of what an earlier replay wrote there."""
        ours = (REPLAY_ID, REPLAY_SUBJECT, REPLAY_SEQUENCE, REPLAY_GROUP)
        own = F.map_filter("headers", lambda name, _: ~name.isin(*ours))
        empty = F.expr("cast(map() as map<string, string>)")
        mark = F.create_map(
            F.lit(REPLAY_ID), F.lit(self._id),
            F.lit(REPLAY_SUBJECT), F.col("subject"),
            F.lit(REPLAY_SEQUENCE), F.col("sequence").cast("string"),
        )  # fmt: skip
        group = F.col("broker_group")
        where = F.when(group == BROKER_GROUP, empty).otherwise(F.create_map(F.lit(REPLAY_GROUP), group))
        return F.map_concat(F.coalesce(own, empty), mark, where)

    def _slices(self) -> list[RowSlice]:
        """The slices in the order of sending. A slice has at most as many rows as a second allows, so that the rate
        holds for every second."""
        rate = self._options.rate_per_s
        step = min(SLICE_ROWS, rate) if rate else SLICE_ROWS
        found = [
            (self._files.footer(each, "ordinal"), each.path)
            for each in self._files.walk("selection")
            if each.path.endswith(".parquet")
        ]
        return [
            RowSlice(path, begin, min(begin + step, footer.most + 1))
            for footer, path in sorted(found, key=lambda each: each[0].least)
            if footer.rows
            for begin in range(footer.least, footer.most + 1, step)
        ]

    # --- sending -----------------------------------------------------------------------------------------------------

    def _wait(self, is_to_end: Callable[[], bool]) -> bool:
        """Wait until the rate allows more; False: the job is to end first."""
        while (early_s := self._cap.early_s()) > 0:
            host.sleep(min(early_s, _NAP_S))
            if is_to_end():
                return False
        return True

    def _send(self, number: int, part: RowSlice) -> None:
        """Send a slice with one task, in order: the same rows always give the same batches."""
        rows = self._spark.read.parquet(self._files.full(part.path))
        rows = rows.filter((F.col("ordinal") >= part.begin) & (F.col("ordinal") < part.end))
        rows = rows.coalesce(1).sortWithinPartitions("ordinal").select(*_SENT)
        alone = {} if self._options.group is None else {"group": self._options.group}
        rows.write.format("fairway").options(
            url=self._options.url,
            subject=self._options.to,
            keepIds="true",
            writeId=f"replay/{self._id}/{number}",
            patienceSeconds=str(self._options.patience_s),
            **alone,
        ).mode("append").save()

    def _note(self, slices: int) -> None:
        name = f"sent-{slices:012}.json"
        try:
            self._files.write(name, b"{}\n", temporary="staging/sent.json")
        except NameTaken as error:
            raise FairwayError(
                f"another run of replay {self._id} is under way ({self._files.root}): let one at a time run. Nothing "
                "was sent twice"
            ) from error
        if slices > 1:
            self._files.remove(f"sent-{slices - 1:012}.json")


def command(  # noqa: PLR0913, PLR0917  (one for each flag)
    subjects: selection.Subjects,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="SUBJECT", help="The subject to send to; with --group, the one that is named."),
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Only to this group of the subject: no other sees them.")
    ] = None,
    archive: selection.Archive = None,
    since: selection.Since = None,
    until: selection.Until = None,
    key: selection.Keys = None,
    tag: selection.Tags = None,
    where: selection.Predicate = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would be sent, and send nothing.")] = False,
    rate: Annotated[int, typer.Option(min=0, metavar="N", help="At most so many a second; 0: no bound.")] = 0,
    state: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where the replay remembers how far it is; within the archive, unless given."),
    ] = None,
    id: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name; the same command has the same one, unless given.")
    ] = None,
    url: job.Url = DEFAULT_URL,
    patience_s: job.Patience = PATIENCE_S,
    master: job.Master = None,
    spark_log: job.SparkLog = job.QUIET,
    json: job.AsJson = False,
) -> None:
    """Messages once more, to a subject or one group of it, with their ids. The same command goes on where it was."""
    with job.failures("replay"):
        picked = selection.told(
            subjects, archive, url, since, until, keys=key, tags=tag, where=where, patience_s=patience_s
        )
        options = ReplayOptions(picked, receiving(to, group, subjects), url, id, state, rate, patience_s, group)
    with job.running("replay", master, spark_log, is_quiet=json) as (spark, watch), host.asked_to_end() as ending:
        done = count(spark, options) if dry_run else run(spark, options, watch, lambda: ending.is_asked)
    job.tell(done, json, _lines(done))
    if not done.is_dry and not done.is_complete:
        raise typer.Exit(job.FAILED)


def receiving(to: str | None, group: str | None, subjects: list[str]) -> str:
    """The subject to send to."""
    if to is not None:
        return to
    if group is None:
        raise Misuse("where to? Give it --to SUBJECT, or --group GROUP for one group of the subject alone")
    if len(subjects) != 1 or is_pattern(subjects[0]):
        raise Misuse(f"group {group} of which subject? Give it --to SUBJECT, or name one subject")
    return subjects[0]


def _lines(done: Replayed) -> list[str]:
    to = done.to if done.group is None else f"group {done.group} on {done.to}"
    if done.is_dry:
        each = [f"  {subject}: {rows:,}" for subject, rows in done.by_subject.items()]
        return [f"{done.matched:,} messages would be sent to {to}", *each]
    if not done.sent and done.is_complete:
        again = "; --id NAME makes it another replay" if done.matched else ""
        return [f"replay {done.id} is complete: {done.matched:,} messages were sent to {to} before{again}"]
    left = done.matched - done.sent_before - done.sent
    rest = f"; {left:,} are left: the same command goes on" if left else ""
    return [f"{done.sent:,} of {done.matched:,} messages sent to {to}, replay {done.id}{rest}"]


if __name__ == "__main__":
    job.main(command, "replay")
