"""Names are parsed once, at the border; no raw `str` travels inward.

The alphabet keeps a name safe as a file name, a metric label and a word on a command line:
letters, digits, `.`, `-`, `_`; a letter or digit first; at most 200 characters. Case matters.

A broker has subjects of its own, with a colon, so that nobody can take their names:

    dead:<group>:<subject>     dead letters of a group; may be read, scanned and consumed, not sent to
    inbox:<group>:<subject>    what only that group is to get; drained by the group itself, and readable. Sent to by
                               whoever means that one group, and says so (docs/protocol.md, "For one group alone")

A group may consume dead letters, and has dead letters then in turn: `dead:<group>:dead:<group>:<subject>` is as deep as
it goes.

`nameless-<number>` stands for a subject whose name a disk has lost. Nobody creates a subject of that form, so that its
messages mix with nobody else's. It has no colon because the names of its dead letters are in the log, where versions
that know no other form read them.
"""

from __future__ import annotations

import re
from typing import Self

from fairway import limits
from fairway.errors import BadName

# A subject without messages, where queries of Spark have groups that hold their beginnings: a cursor there is a time.
MOMENTS = "fairway.events"

_PLAIN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(_PLAIN, re.ASCII)
_DEAD = "dead"
_INBOX = "inbox"
_INTERNAL = re.compile(rf"({_DEAD}|{_INBOX}):({_PLAIN}):(?:({_DEAD}):({_PLAIN}):)?({_PLAIN})", re.ASCII)
_NAMELESS = re.compile(r"nameless-[0-9]+(?:-[0-9]+)?", re.ASCII)


class _Name(str):
    """A checked name. Build it with `parse`; the constructor trusts its caller."""

    __slots__ = ()

    @classmethod
    def parse(cls, raw: str) -> Self:
        if type(raw) is str and len(raw) <= limits.NAME_CHARS_MAX and _NAME.fullmatch(raw):
            return cls(raw)
        kind = cls.__name__.removesuffix("Name").lower()
        if not isinstance(raw, str):
            raise BadName(f"a {kind} name is a str, not {type(raw).__name__}")
        if len(raw) > limits.NAME_CHARS_MAX:
            raise BadName(f"{kind} name of {len(raw)} characters: at most {limits.NAME_CHARS_MAX} are allowed")
        if not _NAME.fullmatch(raw):
            raise BadName(
                f"bad {kind} name {raw!r}: use letters, digits, '.', '-' and '_', and begin with a letter or a digit"
            )
        return cls(raw)


def _internal(raw: object) -> re.Match[str] | None:
    """The parts of a name of the broker's own."""
    if not isinstance(raw, str) or ":" not in raw or len(raw) > limits.INTERNAL_CHARS_MAX:
        return None
    found = _INTERNAL.fullmatch(raw)
    is_bounded = found is not None and all(len(part) <= limits.NAME_CHARS_MAX for part in found.groups(""))
    return found if is_bounded else None


class GroupName(_Name):
    """The name of a consumer group."""

    __slots__ = ()


class Subject(_Name):
    """The name of a subject (a topic)."""

    __slots__ = ()

    @classmethod
    def parse(cls, raw: str) -> Self:
        """A subject that anybody may send to."""
        if _internal(raw) is not None:
            raise BadName(f"subject {raw[: limits.NAME_CHARS_MAX]!r} is the broker's own: nobody else sends to it")
        return super().parse(raw)

    @classmethod
    def parse_any(cls, raw: str) -> Self:
        """A subject that can be read, the broker's own included."""
        return super().parse(raw) if _internal(raw) is None else cls(raw)

    @classmethod
    def parse_joinable(cls, raw: str) -> Self:
        """A subject that groups may consume: anybody's, and the dead letters of groups on those."""
        name = cls.parse_any(raw)
        if name.is_internal and not (name.startswith(f"{_DEAD}:") and name.count(":") == 2):
            raise BadName(f"subject {str(name)!r} is the broker's own: scan it, or ask for a redrive")
        return name

    @classmethod
    def parse_inbox(cls, raw: str) -> tuple[GroupName, Self]:
        """The name of a group's inbox: which group, and on which subject."""
        found = _internal(raw)
        if found is None or found[1] != _INBOX:
            raise BadName(f"{raw[: limits.NAME_CHARS_MAX]!r} is no inbox: that is {_INBOX}:<group>:<subject>")
        return GroupName(found[2]), cls(raw[found.end(2) + 1 :])

    @classmethod
    def dead_letters(cls, group: GroupName, subject: Subject) -> Self:
        """Where messages of the subject go when they have had their last attempt in the group."""
        return cls(f"{_DEAD}:{group}:{subject}")

    @classmethod
    def inbox(cls, group: GroupName, subject: Subject) -> Self:
        """What only this group is to get."""
        return cls(f"{_INBOX}:{group}:{subject}")

    @classmethod
    def nameless(cls, number: int, spare: int = 0) -> Self:
        """A name for the subject with that number, whose own is lost; `spare` chooses another where it is taken."""
        return cls(f"nameless-{number}-{spare}" if spare else f"nameless-{number}")

    @property
    def is_internal(self) -> bool:
        return ":" in self

    def is_of(self, letters: Subject) -> bool:
        """Of a subject of the broker's own: whether a group on these dead letters has it."""
        return self.endswith(f":{letters}")

    @property
    def owner(self) -> str:
        """Of a subject of the broker's own: the subject that its messages come from."""
        return self.rpartition(":")[2]

    @property
    def is_nameless(self) -> bool:
        """Whether the name has the form that stands for a lost one; subjects of early versions may have it, too."""
        return _NAMELESS.fullmatch(self) is not None

    @property
    def why_not_new(self) -> str:
        """Why nobody may create a subject of this name; empty: anybody may."""
        return f"{self} would stand for a subject whose name is lost: choose another name" if self.is_nameless else ""

    @property
    def is_inbox(self) -> bool:
        return self.startswith(f"{_INBOX}:")


class ConsumerName(_Name):
    """The name of one member of a group."""

    __slots__ = ()
