"""`python -m bench.peers`."""

from __future__ import annotations

import sys

from bench.peers import main

sys.exit(main(sys.argv[1:]))
