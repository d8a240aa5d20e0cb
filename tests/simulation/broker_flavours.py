"""The features of a history: how durable its broker is, what it keeps, which consumers are in its groups, which
commands an operator gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from fairway.groups import Coalesce, GroupConfig, Mode, Order
from fairway.limits import KIB
from fairway.runtime.rng import SeededRng
from fairway.storage.flusher import Durability
from fairway.storage.retention import Policy
from tests.simulation.broker_clients import MANY_ATTEMPTS, group_config


@dataclass(frozen=True)
class Flavour:
    """Drawn once for a history. Features that would blur the picture of another are not combined with it. Where a power
    cut may take answers back, or retention takes messages that nobody owes, nothing dies and nobody commands."""

    config: GroupConfig
    durability: Durability = Durability.SYNC
    retention: Policy = field(default_factory=Policy)
    is_deadly: bool = False  # consumers reject, attempts are few, dead letters are redriven
    is_steered: bool = False  # somebody seeks, pauses and resumes
    has_at_most_once: bool = False
    has_broadcast: bool = False
    has_letters: bool = False  # somebody writes to one group alone

    @property
    def is_lazy(self) -> bool:
        return self.durability is Durability.MEMORY

    @property
    def is_retaining(self) -> bool:
        return self.retention.age_ms_max is not None

    @property
    def may_mark_dead(self) -> bool:
        return self.is_deadly or self.retention.owed_bytes_max is not None

    def policies(self, rng: SeededRng) -> dict[str, GroupConfig]:
        """Groups that keep an order or merge requests, by name. Nobody rejects there, and nothing dies: that would end
        a message without a word to the model. Where answers may be taken back, or messages, there are none."""
        if self.is_lazy or self.is_retaining:
            return {}
        plain = msgspec.structs.replace(self.config, attempts_max=MANY_ATTEMPTS)
        parked_max = (2, 10, 10_000)[rng.below(3)]
        by_key = msgspec.structs.replace(
            plain, order=Order.KEY, parked_max=parked_max, rate_per_key=(0, 0, 50)[rng.below(3)]
        )
        strict = msgspec.structs.replace(plain, order=Order.STRICT, rate_per_s=(0, 0, 300)[rng.below(3)])
        merging = (Coalesce.DECLINE, Coalesce.LATEST)[rng.below(2)]
        return {"key": by_key, "strict": strict, "merged": msgspec.structs.replace(plain, coalesce=merging)}

    def at_most_once(self) -> GroupConfig:
        return msgspec.structs.replace(self.config, mode=Mode.AT_MOST_ONCE)

    def broadcast(self) -> GroupConfig:
        return msgspec.structs.replace(self.config, is_broadcast=True)


def draw(rng: SeededRng) -> Flavour:
    config = group_config(rng.child("config"))
    kind = rng.below(10)
    is_more = [bool(rng.below(2)) for _ in range(4)]
    if kind < 2:
        return Flavour(config, Durability.MEMORY, has_broadcast=is_more[0])
    if kind < 4:
        ceiling = 12 * KIB + rng.below(24 * KIB) if is_more[0] else None
        policy = Policy(age_ms_max=50 + rng.below(400), owed_bytes_max=ceiling)
        return Flavour(config, retention=policy, has_broadcast=is_more[1])
    if kind < 9:
        config = msgspec.structs.replace(config, attempts_max=3 + rng.below(3))
    return Flavour(
        config,
        is_deadly=kind < 9,
        is_steered=is_more[0],
        has_at_most_once=is_more[1],
        has_broadcast=is_more[2] and is_more[3],
        has_letters=rng.child("letters").below(3) == 0,
    )
