"""Fairway: a message queue without partitions, whose log Spark can read.

The public surface. So far it is the errors; `connect`, `Message` and `Receipt` join it with the client.
"""

from __future__ import annotations

from fairway.errors import (
    FairwayError,
    Misuse,
    Refused,
    RemoteProtocolError,
    StorageFault,
)

__version__ = "0.1.0.dev0"

__all__ = ["FairwayError", "Misuse", "Refused", "RemoteProtocolError", "StorageFault", "__version__"]
