"""Settings for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest

# No deadline: a noisy machine is not a failure. The blob replays a failure elsewhere.
hypothesis.settings.register_profile("fairway", deadline=None, print_blob=True)
hypothesis.settings.load_profile("fairway")

# Whatever starts programs in the background of a shell has them ignore Ctrl-C, and their children too. Tests that
# interrupt somebody would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """A test that leaves a handler behind is found here, not by another test that waits for its own signal for ever."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
