"""A driver's process: `python -m bench.peers.drive MODULE TASK-AS-JSON`."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

from bench.peers.driving import Task, run_one


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a worker program of this driver's is stopped, too
    module, task = sys.argv[1], Task(**json.loads(sys.argv[2]))
    os.nice(task.nice)
    drivers = importlib.import_module(f"bench.peers.{module}").DRIVERS
    print(json.dumps(run_one(drivers, task)), flush=True)


if __name__ == "__main__":
    main()
