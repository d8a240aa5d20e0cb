"""Settings for every test."""

from __future__ import annotations

import hypothesis

# No deadline: a noisy machine is not a failure. The blob replays a failure elsewhere.
hypothesis.settings.register_profile("fairway", deadline=None, print_blob=True)
hypothesis.settings.load_profile("fairway")
