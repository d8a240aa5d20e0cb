"""Addresses without their passwords, for messages and logs.

A sentence about an unusable address quotes the address. A user who mistyped the address may have written a password
into it, and sentences end up in logs, tickets and terminals.
"""

from __future__ import annotations

import re

_HIDDEN = "***"
# From the first colon behind the scheme to the last `@`: a password may hold an `@`, a `/` or a `:` that should have
# been percent-encoded. With several `@` this hides more than necessary, and never less.
_PASSWORD = re.compile(r"(?P<before>\A(?>(?:[^:/?#\s]*://)?)[^:\s]*:).*(?P<host>@)", re.DOTALL)
_PARAMETER = re.compile(r"(?P<name>[?&;][^=&;]*(?:pass|pwd|secret|token)[^=&;]*=)[^&;]*", re.IGNORECASE)


def without_password(address: str) -> str:
    """The address with `***` in place of a password before the host, and of parameters with names like password."""
    found = _PASSWORD.sub(rf"\g<before>{_HIDDEN}\g<host>", address)
    return _PARAMETER.sub(rf"\g<name>{_HIDDEN}", found)
