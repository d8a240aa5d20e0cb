"""Names of subjects, groups and consumers. Names are parsed once, at the border; no raw `str` travels inward.

The alphabet keeps a name safe as a file name, a metric label and a word on a command line: letters, digits, `.`, `-`,
`_`; a letter or digit first; at most 200 characters. Case matters.

A broker has internal subjects, with a colon, so that no user subject can have their names:

    dead:<group>:<subject>     dead letters of a group; may be read, scanned and consumed, not sent to
    inbox:<group>:<subject>    messages for that group only; the group drains its inbox, and others may read it. A
                               sender must name that group (docs/internals/protocol.md, "For one group alone")

A group may consume dead letters, and then has dead letters in turn: `dead:<group>:dead:<group>:<subject>` is the
deepest level.

`nameless-<number>` stands for a subject whose name a disk has lost. No client can create a subject of that form, so
that its messages mix with no others. The form has no colon, because the names of its dead letters are in the log, where
earlier versions read them and know no other form.
"""

from __future__ import annotations

import re
from typing import Self

from fairway import limits
from fairway.errors import BadName

# A subject without messages. Queries of Spark have groups on it that keep their start; a cursor there is a time.
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
    """The parts of an internal subject's name."""
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
        """A subject that any client may send to."""
        if _internal(raw) is not None:
            raise BadName(f"subject {raw[: limits.NAME_CHARS_MAX]!r} is the broker's own: nobody else sends to it")
        return super().parse(raw)

    @classmethod
    def parse_any(cls, raw: str) -> Self:
        """A subject that can be read, internal ones included."""
        return super().parse(raw) if _internal(raw) is None else cls(raw)

    @classmethod
    def parse_joinable(cls, raw: str) -> Self:
        """A subject that groups may consume: a user's subject, or the dead letters of a group on such a subject."""
        name = cls.parse_any(raw)
        if name.is_internal and not (name.startswith(f"{_DEAD}:") and name.count(":") == 2):
            raise BadName(f"subject {str(name)!r} is the broker's own: scan it, or ask for a redrive")
        return name

    @classmethod
    def parse_inbox(cls, raw: str) -> tuple[GroupName, Self]:
        """The group and the subject of an inbox."""
        found = _internal(raw)
        if found is None or found[1] != _INBOX:
            raise BadName(f"{raw[: limits.NAME_CHARS_MAX]!r} is no inbox: that is {_INBOX}:<group>:<subject>")
        return GroupName(found[2]), cls(raw[found.end(2) + 1 :])

    @classmethod
    def dead_letters(cls, group: GroupName, subject: Subject) -> Self:
        """The dead-letter subject: messages of `subject` after their last attempt in the group."""
        return cls(f"{_DEAD}:{group}:{subject}")

    @classmethod
    def inbox(cls, group: GroupName, subject: Subject) -> Self:
        """The inbox: messages for this group only."""
        return cls(f"{_INBOX}:{group}:{subject}")

    @classmethod
    def nameless(cls, number: int, spare: int = 0) -> Self:
        """A name for the subject with that number, whose name is lost; `spare` chooses another if the name is taken."""
        return cls(f"nameless-{number}-{spare}" if spare else f"nameless-{number}")

    @property
    def is_internal(self) -> bool:
        return ":" in self

    def is_of(self, letters: Subject) -> bool:
        """Of an internal subject: whether a group on these dead letters has it."""
        return self.endswith(f":{letters}")

    @property
    def owner(self) -> str:
        """Of an internal subject: the subject that its messages come from."""
        return self.rpartition(":")[2]

    @property
    def is_nameless(self) -> bool:
        """Whether the name has the form that stands for a lost name; subjects of early versions may have it, too."""
        return _NAMELESS.fullmatch(self) is not None

    @property
    def why_not_new(self) -> str:
        """Why no client may create a subject of this name; empty: every client may."""
        return f"{self} would stand for a subject whose name is lost: choose another name" if self.is_nameless else ""

    @property
    def is_inbox(self) -> bool:
        return self.startswith(f"{_INBOX}:")


class ConsumerName(_Name):
    """The name of one member of a group."""

    __slots__ = ()
