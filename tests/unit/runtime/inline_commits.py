"""Which thread carries out commits, for tests that want to say so."""

from __future__ import annotations

from fairway.runtime.directory_writer import InlineCommits


class AlwaysInline(InlineCommits):
    """Takes every device for a fast one."""

    def is_open(self) -> bool:
        return True


class NeverInline(InlineCommits):
    """Takes no device for a fast one."""

    def is_open(self) -> bool:
        return False
