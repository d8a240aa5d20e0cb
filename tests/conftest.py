"""Settings for every test."""

from __future__ import annotations

import signal

import hypothesis

# No deadline: a noisy machine is not a failure. The blob replays a failure elsewhere.
hypothesis.settings.register_profile("fairway", deadline=None, print_blob=True)
hypothesis.settings.load_profile("fairway")

# Whatever starts programs in the background of a shell has them ignore Ctrl-C, and their children too. Tests that
# interrupt somebody would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
