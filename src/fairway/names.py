"""Names are parsed once, at the border; no raw `str` travels inward.

The alphabet keeps a name safe as a file name, a metric label and a word on a command line:
letters, digits, `.`, `-`, `_`; a letter or digit first; at most 200 characters. Case matters.
"""

from __future__ import annotations

import re
from typing import Self

from fairway import limits
from fairway.errors import BadName

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


class _Name(str):
    """A checked name. Build it with `parse`; the constructor trusts its caller."""

    __slots__ = ()

    @classmethod
    def parse(cls, raw: str) -> Self:
        kind = cls.__name__.lower()
        if not isinstance(raw, str):
            raise BadName(f"a {kind} name is a str, not {type(raw).__name__}")
        if len(raw) > limits.NAME_CHARS_MAX:
            raise BadName(f"{kind} name of {len(raw)} characters: at most {limits.NAME_CHARS_MAX} are allowed")
        if not _NAME.fullmatch(raw):
            raise BadName(
                f"bad {kind} name {raw!r}: use letters, digits, '.', '-' and '_', and begin with a letter or a digit"
            )
        return cls(raw)


class Subject(_Name):
    """The name of a subject (a topic)."""

    __slots__ = ()


class Group(_Name):
    """The name of a consumer group."""

    __slots__ = ()


class Consumer(_Name):
    """The name of one member of a group."""

    __slots__ = ()
