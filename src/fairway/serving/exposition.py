"""Figures in Prometheus' text format. Written by hand: a name, labels and a number per line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from fairway.serving.meters import Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class MetricsText:
    """Text in the making."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, about: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> None:
        """One name with all its series."""
        self._lines += (f"# HELP fairway_{name} {about}", f"# TYPE fairway_{name} {kind}")
        self._lines += [f"fairway_{name}{_labels(labels)} {_number(value)}" for labels, value in samples]

    def one(self, name: str, kind: str, about: str, value: float) -> None:
        self.family(name, kind, about, [({}, value)])

    def histogram_ms(self, name: str, about: str, series: Mapping[str, Histogram]) -> None:
        """Histograms that differ in the label `log`; one without a name has no label. Prometheus counts in seconds."""
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
