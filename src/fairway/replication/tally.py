"""What a copy counts for as long as its process lives, whoever leads meanwhile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ReplicationCounters:
    reigns: int = 0
    depositions: int = 0
    refused_follows: int = 0  # of directories that are not registered, or without the copy's secret
    catch_up_bytes: int = 0  # sent to replicas that were not in sync
    fetches: int = 0  # reads for replicas that missed memory
    mended_spans: int = 0  # of the own logs, from another copy
    mended_bytes: int = 0
