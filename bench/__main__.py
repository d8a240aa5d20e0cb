"""`python -m bench` lists the benches; `python -m bench NAME [ARGUMENT...]` runs one, `python -m bench all` every one.

A bench is a module in this folder with a docstring, whose first line is its entry in the list, and a function
`main(argv: Sequence[str]) -> int | None` that prints ratios and the machine. A module without `main` is a helper.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import bench


def benches() -> dict[str, ModuleType]:
    """Every bench by its name."""
    names = sorted(found.name for found in pkgutil.iter_modules(bench.__path__) if found.name != "__main__")
    modules = {name: importlib.import_module(f"bench.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "main")}


def listing(known: dict[str, ModuleType]) -> str:
    width = max(map(len, known), default=0)
    lines = [f"  {name:{width}}  {(module.__doc__ or '').partition(chr(10))[0]}" for name, module in known.items()]
    return "\n".join(["benches:", *lines])


def run(name: str, module: ModuleType, argv: Sequence[str]) -> int:
    print(f"== {name}", flush=True)
    main: Callable[[Sequence[str]], int | None] = module.main
    return main(argv) or 0


def main(argv: Sequence[str]) -> int:
    known = benches()
    match argv:
        case []:
            print(listing(known))
            return 0
        case ["all", *rest]:
            return max((run(name, module, rest) for name, module in known.items()), default=0)
        case [name, *rest] if name in known:
            return run(name, known[name], rest)
        case _:
            print(f"no bench is called {argv[0]!r}\n{listing(known)}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
