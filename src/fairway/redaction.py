"""Addresses without their passwords, for everything that people and logs read.

A sentence about an address that cannot be used quotes the address. Whoever mistyped it may have written a password into
it, and sentences end up in logs, tickets and scroll-back.
"""

from __future__ import annotations

import re

_HIDDEN = "***"
# From the first colon behind the scheme to the last `@`: a password may hold an `@`, a `/` or a `:` that should have
# been percent-encoded. Where there are several `@` this hides more than it must, and never less.
_PASSWORD = re.compile(r"(?P<before>\A(?>(?:[^:/?#\s]*://)?)[^:\s]*:).*(?P<host>@)", re.DOTALL)
_PARAMETER = re.compile(r"(?P<name>[?&;][^=&;]*(?:pass|pwd|secret|token)[^=&;]*=)[^&;]*", re.IGNORECASE)


def without_password(address: str) -> str:
    """The address with `***` in the place of a password before the host, and of parameters named like one."""
    found = _PASSWORD.sub(rf"\g<before>{_HIDDEN}\g<host>", address)
    return _PARAMETER.sub(rf"\g<name>{_HIDDEN}", found)
