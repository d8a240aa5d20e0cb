"""The pytest plugin: the fixture `fairway_broker`, which pytest finds by itself once Fairway is installed.

The plugin lies outside `fairway.testing`, so that pytest starts without importing a broker and its dependencies.
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
    from fairway.testing import MemoryBroker  # tests without the fixture import nothing

    with MemoryBroker() as broker:
        yield broker
