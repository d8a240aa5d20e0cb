"""A port for a server that must have the same one after a restart, or whose address others are told beforehand."""

from __future__ import annotations

from fairway.runtime.host import free_port

__all__ = ["free_port"]
