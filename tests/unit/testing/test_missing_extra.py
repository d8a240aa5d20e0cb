"""`fairway.testing` where the extra `server` is not installed."""

from __future__ import annotations

import subprocess
import sys

_WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
from fairway.testing import MemoryBroker
"""


def test_the_extra_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_NUMPY], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ModuleNotFoundError: fairway.testing runs a broker, which needs numpy: pip install 'fairway[server]'"
    )
