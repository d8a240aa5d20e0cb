"""Python workers of Spark, as far as Fairway runs in them.

Spark closes the connection to a worker that has been idle for a minute, and to one whose rows it needs no longer (a
`limit`). The worker then has nobody to tell that it ends. Over a Unix socket it notices that: the write fails, and
pyspark's daemon prints a traceback (BrokenPipeError) among the output of a query that went well. Over TCP the write
goes nowhere, and nothing is printed.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any, Final

_DAEMON: Final = "pyspark.daemon"


class _Traces:
    """The module `traceback` for the daemon, which prints no error of a connection that Spark has closed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            traceback.print_exc()


def end_quietly() -> None:
    """In a worker: let it end without a word when Spark has closed its connection. Elsewhere this does nothing."""
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", None) == _DAEMON:
        vars(main)["traceback"] = _Traces()
