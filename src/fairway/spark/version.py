"""Which pyspark Fairway needs, said before anything of it is imported."""

from __future__ import annotations

import re
from typing import Final

from fairway.errors import Misuse

LEAST: Final = (4, 2)  # which limits what a micro-batch takes, and tells a sink its query and micro-batch


def check_version(version: str) -> None:
    """`Misuse` if it is too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < LEAST:
        raise Misuse(
            f"fairway.spark needs pyspark {'.'.join(map(str, LEAST))} or later, and this is {version}: "
            "pip install --upgrade 'fairway[spark]', where the driver runs and where the executors run"
        )
