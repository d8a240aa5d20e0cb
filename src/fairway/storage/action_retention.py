"""Which segments of the action log may go, and what has to be in the log first.

An action speaks of messages that were stored before it. So a segment of actions can go once every message that was
stored when the segment was completed is gone: what is retained of messages keeps its whole trace. Positions decide, not
times: a clock that was wrong changes nothing.

Groups are made from actions. Before old actions may go, the log must state what they amounted to: a GROUPS record holds
the picture of all groups at its position. The first segment that stays always has one, so that a start without a
checkpoint, and a copy that begins with this segment, arrive at the same groups: they take the picture in and go on
behind it.

    segments    [ acks ... ][ acks ... ][ acks, GROUPS, acks ... ][ acks ... ][ newest
                  may go      may go      stays: it states the groups

A pure plan; the store carries it out, once a checkpoint covers what goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fairway.storage.segment import Segment

TOO_MANY_GROUPS = (
    "the action log is not shortened any more: the state of its groups is larger than a record may be; remove groups "
    "that nobody needs"
)
_PICTURE_SHARE = 4  # the log grows by so many times the picture of its groups before it states them again


class ActionRetention:
    """What retention knows of the action log. Kept in the checkpoint."""

    def __init__(self, bounds: Mapping[int, int] | None = None, pictures: Sequence[int] = ()) -> None:
        self.bounds = dict(bounds or {})  # by complete segment: where the message log ended when it was complete
        self.pictures = list(pictures)  # where GROUPS records are, oldest first

    def note_complete(self, segments: Sequence[Segment], messages_end: int) -> None:
        """Note how far the messages reach that complete segments speak of. Late is safe: the bound is higher then."""
        for each in segments[:-1]:
            self.bounds.setdefault(each.base, messages_end)

    def note_picture(self, position: int) -> None:
        """A GROUPS record is there."""
        if not self.pictures or position > self.pictures[-1]:
            self.pictures.append(position)

    def undo(self, position: int) -> None:
        """Everything from `position` on was taken off the log."""
        self.pictures = [each for each in self.pictures if each < position]
        self.bounds = {base: bound for base, bound in self.bounds.items() if base < position}

    def below(self, end: int, segments: Sequence[Segment]) -> ActionRetention:
        """What is known of the log before `end`."""
        complete = {each.base for each in segments[:-1] if each.end <= end}
        bounds = {base: bound for base, bound in self.bounds.items() if base in complete}
        return ActionRetention(bounds, [each for each in self.pictures if each < end])

    def is_picture_due(self, segments: Sequence[Segment], end: int, picture_bytes: int, grown_bytes_min: int) -> bool:
        """Whether the log has grown by enough since it last stated the groups."""
        first_base = segments[0].base if segments else end
        stated_at = self.pictures[-1] if self.pictures else first_base
        return end - stated_at >= max(grown_bytes_min, _PICTURE_SHARE * picture_bytes)

    def droppable(self, segments: Sequence[Segment], messages_base: int, below: int) -> list[int]:
        """The bases of the segments that may go, oldest first. `messages_base` is where the message log begins, and
        `below` is how far a checkpoint covers actions."""
        count = 0
        for each in segments[:-1]:
            bound = self.bounds.get(each.base)
            if bound is None or bound > messages_base or each.end > below:
                break
            count += 1
        while count and not self._states_groups(segments[count], below):
            count -= 1
        return [each.base for each in segments[:count]]

    def _states_groups(self, of: Segment, below: int) -> bool:
        return any(of.base <= position < min(of.end, below) for position in self.pictures)

    def forget_below(self, first_base: int) -> None:
        """Nothing is left below this position."""
        self.bounds = {base: bound for base, bound in self.bounds.items() if base >= first_base}
        self.pictures = [each for each in self.pictures if each >= first_base]
