"""Registry records as tests need them."""

from __future__ import annotations

from collections.abc import Sequence

from fairway.meta.cluster_state import GroupView
from fairway.registry.layout import GroupRecord, RegisteredCopy


def member(directory: str, port: int = 1, **more: object) -> RegisteredCopy:
    return RegisteredCopy(directory, "10.0.0.1", port, **more)  # type: ignore[arg-type]


def record(*in_sync: str, master: str | None = None, **more: object) -> GroupRecord:
    values: dict[str, object] = {"kind": "broker", "epoch": 1, **more}
    leader = (in_sync[0] if in_sync else "") if master is None else master
    return GroupRecord(master=leader, in_sync=list(in_sync), **values)  # type: ignore[arg-type]


def view(name: str, *living: RegisteredCopy, of: GroupRecord | None = None, **more: object) -> GroupView:
    """A group whose first living member leads, unless it is told otherwise."""
    found = record(*(each.directory for each in living), **more) if of is None else of  # type: ignore[arg-type]
    return GroupView(name, found, {each.directory: each for each in living})


def views(*each: GroupView) -> dict[str, GroupView]:
    return {one.name: one for one in each}


def names_of(groups: Sequence[GroupView]) -> list[str]:
    return [one.name for one in groups]
