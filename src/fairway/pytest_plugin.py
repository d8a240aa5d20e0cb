"""What pytest finds by itself once Fairway is installed: the fixture `fairway_broker`.

It lies outside `fairway.testing`, so that pytest starts without importing a broker, or what a broker needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fairway.testing import MemoryBroker


@pytest.fixture
def fairway_broker() -> Iterator[MemoryBroker]:
    """A broker in memory, on a clock that the test moves."""
    from fairway.testing import MemoryBroker  # nothing is imported for tests that do not want it

    with MemoryBroker() as broker:
        yield broker
