"""Filters that Spark pushes down to the source: ranges of sequences and times, subjects, broker groups, keys.

The reader leaves out the rows that a filter rules out. Spark applies the filters that the reader gives back.

Spark 4.1 to 4.3 keep the result of pushed filters with the relation, not with the scan. Every scan of that `load()`
then reads the same few rows: an unfiltered `count()` after a filtered one, both sides of a self-join, both parts of a
union. The plans no longer show the filters, so the results are wrong without a warning. Therefore the reader takes
filters only where Spark keeps them with the scan (ADR 0021). The options `starting`, `ending`, `keys` and `tags` belong
to the `load()` itself, and narrow a read in every version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
)

# The version of Spark that lets a reader take limits (SPARK-58551) plans each scan by itself, filters included.
IS_PUSHED_BY_SCAN: Final = hasattr(DataSourceReader, "pushLimit")

_NEVER_NULL = frozenset({"subject", "broker_group", "sequence", "id", "payload", "created_at", "appended_at"})


@dataclass
class PushedFilters:
    """The part of the log that the filters leave to read. Times are times of storing, in ms; ends are exclusive."""

    subjects: frozenset[str] | None = None
    broker_groups: frozenset[str] | None = None
    keys: frozenset[str | None] | None = None
    is_keyed: bool = False
    begin: int = 0
    end: int | None = None
    begin_ms: int | None = None
    end_ms: int | None = None

    def push(self, filters: list[Filter]) -> Iterator[Filter]:
        """Take in as many filters as possible; yields those that Spark must apply."""
        for each in filters:
            if not self._take(each):
                yield each

    def _take(self, filter: Filter) -> bool:
        """Take in a filter; True: Spark need not apply it again."""
        column = ".".join(getattr(filter, "attribute", ()))
        match filter:
            case IsNotNull():
                self.is_keyed = self.is_keyed or column == "key"
                return column in _NEVER_NULL or column == "key"
            case IsNull() if column == "key":
                return self._keys(frozenset({None}))
            case EqualTo(value=value) | EqualNullSafe(value=value):
                return self._equal(column, (value,))
            case In(value=values):
                return self._equal(column, tuple(values))
            case GreaterThanOrEqual(value=value) | GreaterThan(value=value):
                return self._from(column, value, is_above=isinstance(filter, GreaterThan))
            case LessThan(value=value) | LessThanOrEqual(value=value):
                return self._below(column, value, is_at=isinstance(filter, LessThanOrEqual))
            case _:
                return False

    def _equal(self, column: str, values: tuple[Any, ...]) -> bool:
        if column == "subject" and all(isinstance(value, str) for value in values):
            wanted = frozenset(values)
            self.subjects = wanted if self.subjects is None else self.subjects & wanted
            return True
        if column == "broker_group" and all(isinstance(value, str) for value in values):
            wanted = frozenset(values)
            self.broker_groups = wanted if self.broker_groups is None else self.broker_groups & wanted
            return True
        if column == "key" and all(isinstance(value, str) for value in values):
            return self._keys(frozenset(values))
        if column == "sequence" and values and all(type(value) is int for value in values):
            self._from(column, min(values), is_above=False)
            self._below(column, max(values), is_at=True)
            return len(values) == 1
        return False

    def _keys(self, wanted: frozenset[str | None]) -> bool:
        self.keys = wanted if self.keys is None else self.keys & wanted
        return True

    def _from(self, column: str, value: Any, *, is_above: bool) -> bool:
        if column == "sequence" and type(value) is int:
            self.begin = max(self.begin, value + is_above)
            return True
        if column == "appended_at" and isinstance(value, datetime):
            self.begin_ms = max(self.begin_ms or 0, _ms(value))
        return False

    def _below(self, column: str, value: Any, *, is_at: bool) -> bool:
        if column == "sequence" and type(value) is int:
            end = max(value + is_at, 0)
            self.end = end if self.end is None else min(self.end, end)
            return True
        if column == "appended_at" and isinstance(value, datetime):
            end_ms = _ms(value) + 1  # Spark itself filters the last millisecond
            self.end_ms = end_ms if self.end_ms is None else min(self.end_ms, end_ms)
        return False


def _ms(moment: datetime) -> int:
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(int(aware.timestamp() * 1_000), 0)
