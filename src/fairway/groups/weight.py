"""How much memory a group takes, as an estimate from counts.

The broker bounds the memory of all groups together, so it asks for this after every decision. Each term is a count that
the state keeps anyway, times the bytes of one item (`limits`, measured). `tests/unit/groups/test_weight.py` compares
the estimate with what Python has allocated.

What is held may fail, and then its lot has one attempt more. That room counts from the pull on, so a consumer that
says that it failed, and a lease that ends, take no memory that was not counted before.
"""

from __future__ import annotations

from fairway.groups.state import GroupState
from fairway.limits import (
    GROUP_BYTES,
    HELD_LOT_BYTES,
    KEYED_BYTES,
    LOT_BYTES,
    MEMBER_BYTES,
    NOTED_KEY_BYTES,
    PARKED_BYTES,
    PAUSED_NAME_BYTES,
)


def weigh(state: GroupState) -> int:
    """Bytes, rounded up. Called after every decision, so it only reads counts."""
    stock, dying = state.stock, state.dying
    total = (
        GROUP_BYTES
        + len(state.roster) * MEMBER_BYTES
        + state.held_count * HELD_LOT_BYTES
        + (len(stock) + len(dying)) * LOT_BYTES
        + state.held_beside_bytes
        + stock.beside_bytes
        + dying.beside_bytes
        + len(state.paused) * PAUSED_NAME_BYTES
    )
    keys = state.keys
    if keys is None:
        return total
    # What is parked in a group with a rate of keys goes to the stock one by one, where each is a lot.
    parked_bytes = LOT_BYTES if state.config.rate_per_key else PARKED_BYTES
    return (
        total
        + len(keys) * KEYED_BYTES
        + keys.behind_count * parked_bytes
        + (len(keys.resting) + len(keys.halted)) * NOTED_KEY_BYTES
    )


def bytes_per_fresh(state: GroupState) -> int:
    """The most that one message takes which is handed out for the first time, or parked."""
    if state.keys is not None:
        return KEYED_BYTES + max(LOT_BYTES if state.config.rate_per_key else 0, PARKED_BYTES)
    return -(-HELD_LOT_BYTES // state.config.lot_messages_max)
