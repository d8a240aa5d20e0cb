"""What is not well with a cluster: one sentence for each group and each copy that somebody has to look after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairway.protocol.routing import Copy, GroupRoute, Routed


def troubles(found: Routed) -> list[str]:
    """Empty: every group is led, takes messages, and all of its copies are in sync."""
    return [*_of_all(found), *(sentence for group in found.groups for sentence in _of_group(group))]


def _of_all(found: Routed) -> Iterator[str]:
    if found.is_old:
        yield "the registry cannot be reached: nobody knows how it is now"
    if not found.groups:
        yield "there is no group of servers: start brokers with --registry and --group"


def _of_group(group: GroupRoute) -> Iterator[str]:
    if group.is_draining and group.master:
        return  # it is on its way out, as was wanted, and so are its copies
    if not group.is_writable:
        yield group.why or f"group {group.name} takes no messages"
    for copy in group.copies:
        if not copy.address:
            yield _away(group, copy)
        elif not copy.is_in_sync:
            yield f"copy {copy.directory} of group {group.name}, at {copy.address}, is not in sync: it is {_does(copy)}"
        if spans := int(copy.load.get("rotten_spans", 0)):
            yield f"the disk of copy {copy.directory} of group {group.name} has lost {spans:,} spans: replace it"


def _away(group: GroupRoute, copy: Copy) -> str:
    """One in sync is waited for: nobody else has everything."""
    name = f"copy {copy.directory} of group {group.name} is away"
    if copy.is_in_sync:
        return f"{name}, and counts as in sync: start it"
    return f"{name}: start it, or forget it with `fairway cluster decommission {group.name} --copy {copy.directory}`"


def _does(copy: Copy) -> str:
    return "behind its master" if copy.role in ("", "follower") else copy.role
