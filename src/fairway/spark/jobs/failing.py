"""What Spark throws, in the words of whoever raised it: a task's error travels through two processes and comes back as
a page of traces, in which one sentence says what happened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from fairway.errors import FairwayError, Misuse, Unreachable

_OURS = re.compile(r"^(?:.*?: )?(?P<module>fairway\.[\w.]+)\.(?P<kind>[A-Z]\w+): (?P<sentence>.+)$", re.MULTILINE)
_KINDS: dict[str, type[FairwayError]] = {"Unreachable": Unreachable, "Misuse": Misuse, "BadName": Misuse}
_LINE_CHARS = 500


class SparkFailed(FairwayError):
    """Spark gave up for a reason of its own; the sentence is its first line."""


@contextmanager
def sentences(doing: str) -> Iterator[None]:
    """Whatever Spark raises leaves as one of our errors; the page of traces is its cause."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise translated(str(error), doing) from error
    except (Py4JNetworkError, ConnectionError) as error:
        raise SparkFailed(f"{doing}: Spark itself has gone away ({error})") from error
    except Py4JError as error:
        raise SparkFailed(f"{doing}: {_first_line(str(error))}") from error


def translated(text: str, doing: str) -> FairwayError:
    """The last error of ours that is named in a trace, or else what Spark says first."""
    found = list(_OURS.finditer(text))
    if found:
        kind = _KINDS.get(found[-1]["kind"], FairwayError)
        return kind(f"{doing}: {found[-1]['sentence'].strip()}")
    if "OutOfMemory" in text:
        return SparkFailed(f"{doing}: Spark is out of memory; give it more (spark.driver.memory), or smaller batches")
    return SparkFailed(f"{doing}: {_first_line(text)}")


def _first_line(text: str) -> str:
    line = next((each.strip() for each in text.splitlines() if each.strip()), "no reason given")
    return line[:_LINE_CHARS]
