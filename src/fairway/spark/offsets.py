"""Offsets of a stream: which log, and for each subject the sequence that comes next.

    {"fairway": 1, "log": "9f3c…", "epoch": 4, "subjects": {"orders": 4200, "payments": 17}}

Spark compares offsets as text, so the same offset must always be written in the same way: keys sorted, and an idle
stream gives back the very offset that it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from fairway.errors import Misuse

VERSION: Final = 1


class Offset(NamedTuple):
    """A place in the log of one broker group."""

    log_id: int
    epoch: int
    sequences: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "fairway": VERSION,
            "log": f"{self.log_id:016x}",
            "epoch": self.epoch,
            "subjects": {name: self.sequences[name] for name in sorted(self.sequences)},
        }


def parse(said: Mapping[str, Any]) -> Offset:
    """What `to_json` wrote, as it comes back from a checkpoint."""
    version = said.get("fairway")
    if version != VERSION:
        raise Misuse(
            f"the checkpoint has an offset of version {version}: this release reads {VERSION}; upgrade fairway"
        )
    return Offset(int(said["log"], 16), int(said["epoch"]), dict(said["subjects"]))


def shares(backlogs: Mapping[str, int], total: int) -> dict[str, int]:
    """Divide `total` among subjects: each gets what it has or an equal share of what is left, the smallest first.

    Where there is less than one for each, those with most waiting are served: nobody is passed over for ever.
    """
    wanted = {name: backlog for name, backlog in backlogs.items() if backlog > 0}
    if total < len(wanted):
        most = sorted(wanted, key=lambda name: (-wanted[name], name))[:total]
        return dict.fromkeys(most, 1)
    given: dict[str, int] = {}
    for place, name in enumerate(sorted(wanted, key=lambda name: (wanted[name], name))):
        given[name] = min(wanted[name], total // (len(wanted) - place))
        total -= given[name]
    return given
