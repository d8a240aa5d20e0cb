"""The metrics of one copy of several. Each server puts them on its own page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fairway.replication.copy_status import CopyStatus
from fairway.replication.leader import Leader
from fairway.storage.store import Store

_MASTER, _FOLLOWER, _WAITING = "master", "follower", "waiting"
_ROLES = (_MASTER, _FOLLOWER, _WAITING)


class Family(NamedTuple):
    """One metric with all its series."""

    name: str
    kind: str
    about: str
    samples: list[tuple[Mapping[str, str], float]]


def families(copy_status: CopyStatus, store: Store) -> list[Family]:
    """The metrics of one copy now."""
    leader, tally = copy_status.leader, copy_status.tally
    role = _MASTER if leader is not None else (_FOLLOWER if copy_status.master else _WAITING)
    return [
        Family("copy_role", "gauge", "What this copy does.", [({"role": each}, each == role) for each in _ROLES]),
        _one("copy_is_open", "gauge", "1: it leads, and serves clients.", copy_status.is_master),
        _one("copy_epoch", "gauge", "Under which it leads, or the last one it has seen.", _epoch(leader, store)),
        _one("copies_in_sync", "gauge", "Copies that count, this one included; 0: it does not lead.", _in_sync(leader)),
        _one("copies_in_sync_min", "gauge", "The least for new messages; 0: it does not lead.", _least(leader)),
        Family("copy_read_only", "gauge", "1: it leads, and takes no messages: why.", _read_only(leader)),
        Family("replica_lag_bytes", "gauge", "What a replica that follows has not synced.", _lags(leader, store)),
        Family("replica_in_sync", "gauge", "Whether it counts.", _counting(leader)),
        _one("reigns_total", "counter", "How often this process came to lead.", tally.reigns),
        _one("depositions_total", "counter", "How often it ceased to without being told to stop.", tally.depositions),
        _one("follows_refused_total", "counter", "FOLLOWs of no copy, or without its secret.", tally.refused_follows),
        _one("catch_up_bytes_total", "counter", "Sent to replicas that were not in sync.", tally.catch_up_bytes),
        _one("catch_up_fetches_total", "counter", "Reads for replicas that missed the page cache.", tally.fetches),
        _one("mended_spans_total", "counter", "Rotten spans repaired from another copy.", tally.mended_spans),
        _one("mended_bytes_total", "counter", "Bytes of them.", tally.mended_bytes),
        _one("unmended_spans", "gauge", "Rotten spans that no copy in sync can repair.", _unmended(leader, store)),
    ]


def _one(name: str, kind: str, about: str, value: float) -> Family:
    return Family(name, kind, about, [({}, value)])


def _epoch(leader: Leader | None, store: Store) -> int:
    return store.epoch if leader is None else leader.epoch


def _in_sync(leader: Leader | None) -> int:
    return 0 if leader is None else len(leader.in_sync)


def _least(leader: Leader | None) -> int:
    return 0 if leader is None else leader.record.min_in_sync


def _read_only(leader: Leader | None) -> list[tuple[Mapping[str, str], float]]:
    if leader is None:
        return []
    reasons = {
        "draining": leader.record.is_draining,
        "given_up": leader.is_closed,
        "min_in_sync": not leader.has_enough_copies,
    }
    return [({"why": why}, is_so) for why, is_so in reasons.items()]


def _lags(leader: Leader | None, store: Store) -> list[tuple[Mapping[str, str], float]]:
    ends = store.ends()
    peers = () if leader is None else leader.peers.values()
    return [({"copy": each.directory}, each.lag_bytes(ends)) for each in peers if each.is_connected]


def _counting(leader: Leader | None) -> list[tuple[Mapping[str, str], float]]:
    if leader is None:
        return []
    return [({"copy": each}, each in leader.in_sync) for each in leader.record.members if each != leader.me]


def _unmended(leader: Leader | None, store: Store) -> int:
    return len(store.rotten) if leader is None else leader.hopeless_spans()
