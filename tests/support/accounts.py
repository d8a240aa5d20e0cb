"""The memory accounts of a server, as its /metrics page shows them."""

from __future__ import annotations

import re
import urllib.request

_FIGURE = re.compile(r'^fairway_memory_bytes(_max)?\{what="(\w+)"\} (\d+)$', re.MULTILINE)

Figures = dict[str, int]  # bytes by account


def figures(pages: str) -> tuple[Figures, Figures]:
    """What each account holds, and its bound."""
    with urllib.request.urlopen(f"{pages}/metrics") as page:
        found = _FIGURE.findall(page.read().decode())
    held = {what: int(size) for is_bound, what, size in found if not is_bound}
    return held, {what: int(size) for is_bound, what, size in found if is_bound}
