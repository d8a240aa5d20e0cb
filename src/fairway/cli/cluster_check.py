"""What is not well with a cluster: one sentence for each group and each copy that somebody has to look after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from fairway.registry.layout import IN_TRANSIT, MASTER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fairway.protocol.admin import BrokerState
    from fairway.protocol.routing import Copy, GroupRoute, Routed


FOLLOWER = "follower"

CopyAnswers: TypeAlias = "Mapping[str, BrokerState | str]"


def troubles(found: Routed, answers: CopyAnswers | None = None) -> list[str]:
    """Empty: every group is led, takes messages, and all of its copies are in sync. `answers`: what the copies say of
    themselves, by address; a sentence where one does not answer."""
    return [
        *_of_all(found),
        *(sentence for group in found.groups for sentence in _of_group(group)),
        *(sentence for group in found.groups for sentence in _of_answers(group, answers or {})),
        *_in_transit(found),
    ]


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
        elif group.master:
            yield from _of_role(group, copy)
        if spans := int(copy.load.get("rotten_spans", 0)):
            yield f"the disk of copy {copy.directory} of group {group.name} has lost {spans:,} spans: replace it"


def _of_role(group: GroupRoute, copy: Copy) -> Iterator[str]:
    """Whether a copy that counts as in sync does what the registry has it do."""
    name = f"copy {copy.directory} of group {group.name}, at {copy.address},"
    is_master = copy.address == group.master
    if is_master and copy.role != MASTER:
        yield f"{name} is to lead and has not taken over yet: it is {copy.role or 'waiting'}"
    elif is_master and copy.epoch and copy.epoch != group.epoch:
        yield f"{name} leads under epoch {copy.epoch}, and the registry says {group.epoch}"
    elif not is_master and copy.role == MASTER:
        yield f"{name} was deposed and has not stepped down yet"
    elif not is_master and copy.role != FOLLOWER:
        yield f"{name} counts as in sync and is {copy.role or 'silent'}: it is out of the set soon, or follows again"


def _of_answers(group: GroupRoute, answers: CopyAnswers) -> Iterator[str]:
    """What copies say themselves: a process that is dead has its session for a while."""
    for copy in group.copies:
        answer = answers.get(copy.address)
        name = f"copy {copy.directory} of group {group.name}, at {copy.address},"
        if isinstance(answer, str):
            yield f"{name} does not answer, though its session at the registry lives: {answer}"
        elif answer is None:
            continue
        elif copy.address == group.master and not answer.is_master:
            yield f"{name} has taken over and is not open to clients yet: it waits until all it has is committed"
        elif answer.epoch < group.epoch:
            yield f"{name} has seen epoch {answer.epoch}, and its group is at {group.epoch}: it catches up"


def _in_transit(found: Routed) -> Iterator[str]:
    """Delayed messages that wait for a broker group which does not come back by itself."""
    groups = {group.name: group for group in found.groups}
    for target, messages in sorted(in_transit(found).items()):
        known = groups.get(target)
        what = f"{messages:,} delayed {'message waits' if messages == 1 else 'messages wait'} for broker group {target}"
        if known is None:
            yield f"{what}, which is gone: `fairway delay retry --group {target} --may-repeat` sends them elsewhere"
        elif not known.master:
            yield f"{what}, which has no master: start its servers"
        elif known.is_draining:
            yield f"{what}, which is being drained: it takes them while its servers run"


def in_transit(found: Routed) -> dict[str, int]:
    """Delayed messages that are due and not known to be stored, by broker group, as the masters of delay servers said
    last."""
    waiting: dict[str, int] = {}
    for group in found.groups:
        for copy in group.copies:
            if group.kind == "delay" and copy.address == group.master:
                for name, value in copy.load.items():
                    if name.startswith(IN_TRANSIT):
                        target = name.removeprefix(IN_TRANSIT)
                        waiting[target] = waiting.get(target, 0) + int(value)
    return waiting


def _away(group: GroupRoute, copy: Copy) -> str:
    """One in sync is waited for: nobody else has everything."""
    name = f"copy {copy.directory} of group {group.name} is away"
    if copy.is_in_sync:
        return f"{name}, and counts as in sync: start it"
    return f"{name}: start it, or forget it with `fairway cluster decommission {group.name} --copy {copy.directory}`"


def _does(copy: Copy) -> str:
    return "behind its master" if copy.role in ("", "follower") else copy.role
