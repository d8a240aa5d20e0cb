"""The outcomes that a consumer may give for messages of one key that it was handed together:
docs/internals/protocol.md, PULL, "runs".

It handles one after another. So it says nothing of a message while one before it is open, and when one ends otherwise
than by ACK it gives back all behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fairway.protocol import messages as m

RUN_MAX = 8


def in_order(
    said: Mapping[int, m.Settlement], held: Iterable[int], keys: Mapping[int, str | None]
) -> dict[int, m.Settlement]:
    """What may be said of the messages in hand, where so much is meant to be."""
    chosen = dict(said)
    runs: dict[str, list[int]] = {}
    for sequence in sorted(held):
        key = keys.get(sequence)
        if key is not None:
            runs.setdefault(key, []).append(sequence)
    for run in runs.values():
        _cut(chosen, run)
    return chosen


def _cut(chosen: dict[int, m.Settlement], run: Sequence[int]) -> None:
    for place, sequence in enumerate(run):
        kind = chosen.get(sequence)
        if kind is m.Settlement.ACK:
            continue
        for behind in run[place + 1 :]:
            if kind is None:
                chosen.pop(behind, None)
            else:
                chosen[behind] = m.Settlement.RELEASE
        return
