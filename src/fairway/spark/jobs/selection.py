"""Selects the messages of a job: from an archive or the live log, by time, key, tag or any predicate of SQL."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Annotated

import typer
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.errors import Misuse
from fairway.spark.frames import MESSAGES
from fairway.spark.jobs import archive_log
from fairway.spark.jobs.files import Files
from fairway.spark.options import DEFAULT_URL, PATIENCE_S, hint, is_pattern, options_of

Subjects = Annotated[list[str], typer.Argument(metavar="SUBJECT...", help="Subjects, or patterns such as 'orders.*'.")]
Archive = Annotated[
    str | None, typer.Option("--archive", metavar="DIR", help="From this archive; else from the live log.")
]
Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="Stored at this time or later: 2026-03-01T12:00Z.")
]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Stored before this time.")]
Keys = Annotated[list[str] | None, typer.Option("--key", metavar="KEY", help="With this key; may be repeated.")]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="With this tag, or another one that is named.")
]
Predicate = Annotated[
    str | None,
    typer.Option("--where", metavar="SQL", help="A predicate over the columns: \"headers['tenant'] = 'a'\"."),
]


@dataclass(frozen=True)
class Picking:
    """Which messages to select. Times are those of storing. A field that is None or empty selects all."""

    subjects: tuple[str, ...]
    archive: str | None = None
    url: str = DEFAULT_URL
    since: datetime | None = None
    until: datetime | None = None
    keys: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    where: str | None = None
    patience_s: int = PATIENCE_S


def messages(spark: SparkSession, picking: Picking, log_ids: Mapping[str, str] | None = None) -> DataFrame:
    """The selected messages, with the columns of the source. `log_ids` are the present broker groups and their logs:
    messages of an archive get the present names."""
    if picking.archive is None:
        rows = _live(spark, picking)
    else:  # from the files that can hold any of the selection
        files = Files(spark, picking.archive)
        state = archive_log.load(files).named(log_ids or {})
        wanted = _subjects(picking.subjects, list(state.ranges), files.root)
        since = _date(picking.since) if picking.since is not None else ""
        until = _date(picking.until) if picking.until is not None else "9999-12-31"
        chosen = [each for each in state.files.values() if each.subject in wanted and since <= each.date <= until]
        rows = archive_log.frame(spark, files.root, sorted(chosen, key=lambda each: (each.subject, each.first)))
    conditions = _conditions(picking)
    if conditions:
        rows = rows.filter(reduce(Column.__and__, conditions))
    if picking.where is not None:
        try:
            rows = rows.filter(picking.where)
        except (AnalysisException, ParseException) as error:
            first = next(iter(str(error).strip().splitlines()), "")
            raise Misuse(f"--where {picking.where!r} cannot be used: {first}") from error
    return rows.select(*MESSAGES.fieldNames())


def moment(text: str | None, what: str) -> datetime | None:
    """A time with its zone, from an option."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise Misuse(f"--{what} {text!r} is no time: write 2026-03-01T12:00Z") from None
    if found.tzinfo is None:
        raise Misuse(f"--{what} {text} says no time zone: write {text}Z for UTC")
    return found


def _live(spark: SparkSession, picking: Picking) -> DataFrame:
    """Messages of the live log, narrowed by the source's options; `_conditions` do the exact selection."""
    said = options_of(picking.url, picking.patience_s, picking.subjects)
    if picking.since is not None:
        said["starting"] = _full_ms(picking.since).isoformat()
    if picking.until is not None:
        said["ending"] = _full_ms(picking.until + timedelta(microseconds=999)).isoformat()
    if picking.keys:
        said["keys"] = json.dumps(picking.keys)
    return spark.read.format("fairway").options(**said).load()


def events(
    spark: SparkSession,
    url: str,
    patience_s: int,
    subjects: Iterable[str],
    since: datetime | None,
    groups: Iterable[str] | None = None,
    **more: str,
) -> DataFrame:
    """What happened to messages of these subjects since then, in some groups or in all."""
    said = {**options_of(url, patience_s, subjects), **more}
    if since is not None:
        said["starting"] = since.isoformat()
    if groups:
        said["group"] = ",".join(sorted(groups))
    return spark.read.format("fairway.events").options(**said).load()


def _full_ms(moment: datetime) -> datetime:
    """The millisecond that the time is in: times in the log have milliseconds."""
    return moment.replace(microsecond=moment.microsecond // 1_000 * 1_000)


def told(
    subjects: Sequence[str],
    archive: str | None,
    url: str,
    since: str | None,
    until: str | None,
    *,
    keys: Sequence[str] | None = None,
    tags: Sequence[str] | None = None,
    where: str | None = None,
    patience_s: int,
) -> Picking:
    """The selection that a command's options describe."""
    begin, end = moment(since, "since"), moment(until, "until")
    return Picking(tuple(subjects), archive, url, begin, end, tuple(keys or ()), tuple(tags or ()), where, patience_s)


def archived(spark: SparkSession, picking: Picking) -> int:
    """The number of messages in the archive; 0 for the live log."""
    return 0 if picking.archive is None else archive_log.load(Files(spark, picking.archive)).rows


def _date(moment: datetime) -> str:
    """The date in UTC, as the archive's directories are named."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d")


def _subjects(asked: tuple[str, ...], there: list[str], where: str) -> set[str]:
    found: set[str] = set()
    for each in asked:
        if is_pattern(each):
            found |= {name for name in there if fnmatch.fnmatchcase(name, each)}
        elif each in there:
            found.add(each)
        else:
            more = hint(each, there, f"there are {', '.join(sorted(there)) or 'none'}")
            raise Misuse(f"no subject {each!r} in the archive {where}: {more}")
    return found


def _conditions(picking: Picking) -> list[Column]:
    conditions = []
    if picking.since is not None:
        conditions.append(F.col("appended_at") >= F.lit(picking.since))
    if picking.until is not None:
        conditions.append(F.col("appended_at") < F.lit(picking.until))
    if picking.keys:
        conditions.append(F.col("key").isin(*picking.keys))
    if picking.tags:
        conditions.append(F.arrays_overlap("tags", F.array(*map(F.lit, picking.tags))))
    return conditions
