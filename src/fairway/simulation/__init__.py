"""Simulation, from one seed: virtual time, a disk that loses unsynced bytes, a bad network, a registry with faults.

    with Simulation(seed=7) as world:
        result = world.run(scenario(world))

or, where only the outcome matters, `simulate(scenario, seed=7)`. The same seed gives the same `trace_hash`.

loop              an event loop on virtual time, what it refuses, and the trace of a run
disk              a disk with crashes, failing syncs, full writes, rot and cold reads
files             the simulated files and directories, and what a power cut leaves of them
net               named hosts that are partitioned, dropped and crashed, and the ends of their connections
wire              delays, and cuts between two hosts
registry          a registry as clients of ZooKeeper see one, with faults
registry_client   its client

`fairway.testing` runs on it, and so do the simulations of Fairway's own tests. No server and no client imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from fairway.runtime.clock import SimClock
from fairway.runtime.rng import SeededRng
from fairway.simulation.loop import SimLoop, TraceListener
from fairway.simulation.net import SimNet
from fairway.simulation.wire import Conditions

T = TypeVar("T")

STEPS_MAX = 20_000_000  # a minute or two of real time: by then a run is caught in a cycle


class Simulation:
    """One simulated world. Leaving its `with` cancels the remaining tasks and raises unhandled exceptions."""

    def __init__(
        self,
        seed: int | str,
        *,
        conditions: Conditions | None = None,
        steps_max: int | None = STEPS_MAX,
        step_ns_max: int = 0,
        listener: TraceListener | None = None,
    ) -> None:
        self.rng = SeededRng(seed)
        self.loop = SimLoop(self.rng.child("loop"), steps_max=steps_max, step_ns_max=step_ns_max, listener=listener)
        self.clock = SimClock(self.loop.now_ns)
        self.net = SimNet(self.loop, self.rng.child("net"), conditions)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run to the result. May be called again: virtual time continues."""
        return self.loop.run_until_complete(main)

    def trace_hash(self) -> str:
        return self.loop.trace_hash()

    def close(self) -> None:
        self.loop.shutdown()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BaseException as another:
            if problem is None:
                raise
            problem.add_note(f"and at the end of the simulation {type(another).__name__}: {another}")


class SimulationResult(NamedTuple, Generic[T]):
    """The result of a run, and the hash of its trace."""

    result: T
    trace_hash: str


def simulate(
    main: Callable[[Simulation], Coroutine[Any, Any, T]], seed: int | str, *, conditions: Conditions | None = None
) -> SimulationResult[T]:
    """Run `main` in a world made from the seed, then end all tasks that it started."""
    with Simulation(seed, conditions=conditions) as world:
        result = world.run(main(world))
    return SimulationResult(result, world.trace_hash())
