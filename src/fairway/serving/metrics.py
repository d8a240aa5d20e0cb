"""Counters, histograms, and Prometheus' text format.

`ServerCounters` counts answers and refusals, and `SyncWatch` times the syncs of a log. Figures that a scrape can
compute (lag, connections, room) are not counted here: the metrics module of each server computes them. `MetricsText`
writes the text format: a name, labels and a number per line.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fairway.errors import Code
from fairway.protocol import Bytes, ControlMessage
from fairway.protocol.admin_messages import Scanned
from fairway.protocol.messages import Produced, Pulled, Settled
from fairway.runtime.clock import Clock

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class MetricsText:
    """Builds the text of a /metrics page."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, about: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> None:
        """Write one name with all its series."""
        self._lines += (f"# HELP fairway_{name} {about}", f"# TYPE fairway_{name} {kind}")
        self._lines += [f"fairway_{name}{_labels(labels)} {_number(value)}" for labels, value in samples]

    def one(self, name: str, kind: str, about: str, value: float) -> None:
        self.family(name, kind, about, [({}, value)])

    def histogram_ms(self, name: str, about: str, series: Mapping[str, Histogram]) -> None:
        """Write histograms that differ in the label `log`; an empty name gives no label. Prometheus counts in
        seconds."""
        self._lines += (f"# HELP fairway_{name} {about}", f"# TYPE fairway_{name} histogram")
        for log, found in series.items():
            own = {"log": log} if log else {}
            below = 0
            for bound_ms, count in zip((*found.bounds, float("inf")), found.counts, strict=True):
                below += count
                labels = _labels(own | {"le": _number(bound_ms / 1_000)})
                self._lines.append(f"fairway_{name}_bucket{labels} {below}")
            self._lines.append(f"fairway_{name}_sum{_labels(own)} {_number(found.total / 1_000)}")
            self._lines.append(f"fairway_{name}_count{_labels(own)} {below}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)


# Upper bounds, in ms: from a write cache that answers at once to a disk that hardly answers.
SYNC_MS_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1_000.0)


class Histogram:
    """Counts of values by fixed upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last: larger than all bounds
        self.total = 0.0

    def note(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class SyncWatch:
    """Times the syncs of one log, of which one is under way at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun_ns = 0
        self.times_ms = Histogram(SYNC_MS_BUCKETS)

    def begun(self) -> None:
        self._begun_ns = self._clock.monotonic_ns()

    def ended(self) -> None:
        self.times_ms.note((self._clock.monotonic_ns() - self._begun_ns) / 1e6)


class ServerCounters:
    """Counters of one server process; they only grow."""

    def __init__(self) -> None:
        self.connections = 0
        self.duplicate_messages = 0
        self.pulls = 0
        self.pulled_bytes = 0  # whole batches, as sent
        self.settled_messages = 0
        self.stale_messages = 0  # settled by a consumer that no longer held them
        self.scanned_bytes = 0
        self.refusals: Counter[Code] = Counter()

    def refused(self, code: Code) -> None:
        self.refusals[code] += 1

    def show_refusals(self, out: MetricsText) -> None:
        refusals = sorted((code.value, count) for code, count in self.refusals.items())
        codes = [({"code": code}, count) for code, count in refusals]
        out.family("refusals_total", "counter", "Requests refused.", codes)

    def answered(self, message: ControlMessage, attachments: Sequence[Bytes]) -> None:
        """Count an answer by its type. Every answer passes here, whichever part of the server gave it."""
        if isinstance(message, Produced):
            self.duplicate_messages += message.count if message.is_duplicate else 0
        elif isinstance(message, Pulled):
            self.pulls += 1
            self.pulled_bytes += sum(map(len, attachments))
        elif isinstance(message, Settled):
            self.settled_messages += message.settled
            self.stale_messages += message.stale
        elif isinstance(message, Scanned):
            self.scanned_bytes += sum(map(len, attachments))
