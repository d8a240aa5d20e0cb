"""The words for what an action of the action log says: one for each thing that can happen to a message, a group or a
consumer. `docs/spark.md` explains them."""

from __future__ import annotations

from typing import Final

import msgspec

from fairway.errors import RemoteProtocolError
from fairway.groups import config, events
from fairway.groups.config import Mode
from fairway.storage.action_log import ActionKind

PRODUCED: Final = "produced"
SOUGHT: Final = "sought"

# What an action is called, where its kind says it all.
_PLAIN: Final[dict[int, str]] = {
    ActionKind.GROUP_CONFIG: "configured",
    ActionKind.JOIN: "joined",
    ActionKind.LEAVE: "left",
    ActionKind.EXPIRE: "expired",
    ActionKind.PULL: "pulled",
    ActionKind.ACK: "acked",
    ActionKind.DEAD: "dead",
    ActionKind.DECLINE: "declined",
    ActionKind.WEIGHT: "weighed",
    ActionKind.RATE: "paced",
    ActionKind.REMOVE: "removed",
    ActionKind.PARK: "parked",
    ActionKind.GO_ON: "gone on",
    ActionKind.VERIFIER: "secured",
}
_MAY_LOSE: Final = frozenset({ActionKind.ACK, ActionKind.DEAD})  # with LOST as their detail
_CURSOR: Final = {events.SOUGHT: SOUGHT, events.LOST: "lost"}


def event_of(kind: int, due_ms: int, lot: int, detail: bytes) -> str:
    """What happened, in a word."""
    plain = _PLAIN.get(kind)
    if plain is not None:
        return "lost" if detail == events.LOST and kind in _MAY_LOSE else plain
    match kind:
        case ActionKind.RETRY if due_ms == events.RELEASED:
            return "released"
        case ActionKind.RETRY if due_ms == events.REJECTED:
            return "rejected"
        case ActionKind.RETRY:
            return "doubted" if detail == events.UNSURE else "retried"
        case ActionKind.CURSOR:
            return _CURSOR.get(detail, "skipped")
        case ActionKind.PAUSE:
            return "paused" if lot else "resumed"
        case ActionKind.READ_ONLY:
            return "closed" if lot else "opened"
        case _:
            return f"kind {kind}"  # of a later release


def detail_of(kind: int, lot: int, detail: bytes) -> str | None:
    """What people want to know besides: why, who is paused, which weight or rate, how a group is served."""
    match kind:
        case ActionKind.GROUP_CONFIG:
            mode = named_config(detail)[1]
            return None if mode is None else mode.value
        case ActionKind.RETRY if detail != events.UNSURE:
            return detail.decode(errors="replace") or None
        case ActionKind.PAUSE:
            return detail.decode(errors="replace") or None
        case ActionKind.WEIGHT:
            return f"{lot / 1_000:g}"
        case ActionKind.RATE:
            return str(lot)
        case _:
            return None


def named_config(detail: bytes) -> tuple[str, Mode | None]:
    """Of a GROUP_CONFIG: the group's name, and how it is served; None where a segment only restates the name."""
    try:
        name, packed = msgspec.msgpack.decode(detail, type=tuple[str, bytes])
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"a group's name cannot be read: {error}") from error
    return name, config.decode(packed).mode if packed else None
