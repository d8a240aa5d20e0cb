"""Copies that exist in the registry only: they register, lead and leave as brokers do, by what a meta server allows."""

from __future__ import annotations

from fairway.registry import layout
from fairway.registry.layout import GroupRecord, RegisteredCopy
from fairway.registry.port import Registry


async def register(registry: Registry, group: str, member: RegisteredCopy) -> str:
    """The path of the node that says that the copy lives."""
    path = layout.member_path(group, layout.place_name(member.directory, registry.session_id))
    await registry.create(path, layout.pack(member), is_ephemeral=True)
    return path


async def put_record(registry: Registry, group: str, record: GroupRecord) -> None:
    """What the group's node says from now on."""
    node = await registry.get(layout.group_path(group), fresh=True)
    assert node is not None, "a copy registers first"
    await registry.put(node.path, layout.pack(record), node.version)
