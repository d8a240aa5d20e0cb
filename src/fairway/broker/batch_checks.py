"""Checks of produced batches. A batch that is large before compression is checked off the loop, and its actor pays.

    process ── large ──► actor.suspend, AGAIN ──► a worker thread decompresses and checks ──► charge, resume ──► process

The request stays the first of its actor, and the actor handles no other meanwhile, so batches of a subject, and with
them those of a stream, keep their order. Other subjects go on. To decompress 8 MiB takes about 10 ms, for which every
request of every client would wait on the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from fairway import limits
from fairway.batch import HEADER_BYTES, BatchHeader, check, checksum
from fairway.batch.layout import raw_length
from fairway.errors import InvariantViolated
from fairway.protocol import Bytes
from fairway.protocol.messages import Produce
from fairway.scheduling import Actor, Scheduler
from fairway.serving.requests import ServedRequest
from fairway.world.clock import Clock
from fairway.world.work_pool import WorkPool


class Checked(msgspec.Struct, frozen=True, gc=False):
    """What a check has found out: the header of a batch that is sound, and the CRC-32C of the whole batch, which the
    log needs for its record."""

    header: BatchHeader
    crc: int


class _Check:
    """One check off the loop: under way while neither the result nor the error is known."""

    __slots__ = ("elapsed_ns", "error", "is_forgotten", "result")

    def __init__(self) -> None:
        self.result: Checked | None = None
        self.error: Exception | None = None
        self.elapsed_ns = 0
        self.is_forgotten = False

    def run(self, view: Bytes, now_ns: Callable[[], int]) -> None:
        """On a worker's thread."""
        if self.is_forgotten:
            return
        started_ns = now_ns()
        try:
            self.result = Checked(check(view), checksum(view))
        except Exception as error:  # raised again where it belongs, on the loop
            self.error = error
        self.elapsed_ns = now_ns() - started_ns


class BatchChecks:
    """All checks of one broker off its loop. Without a pool there are none: every batch is checked on the loop."""

    def __init__(self, scheduler: Scheduler, clock: Clock, pool: WorkPool | None) -> None:
        self._scheduler = scheduler
        self._now_ns = clock.monotonic_ns
        self._pool = pool
        self._checks: dict[ServedRequest[Produce], _Check] = {}  # of requests that have not come to their end
        self.count = 0  # so far

    def is_large(self, view: Bytes) -> bool:
        """Whether a batch is to be checked here, before anything is known of it but what it says of itself."""
        is_readable = self._pool is not None and len(view) >= HEADER_BYTES
        return is_readable and raw_length(view) > limits.CHECK_ON_LOOP_BYTES_MAX

    def result(self, request: ServedRequest[Produce], actor: Actor) -> Checked | None:
        """What was found of the request's batch, which is sound; RemoteProtocolError if it is not. None: the actor is
        suspended until the batch is checked, and the processor returns AGAIN."""
        known = self._checks.pop(request, None)
        if known is None:
            self._start(request, actor)
            return None
        if known.error is not None:
            raise known.error
        return known.result

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its check."""
        return not self._checks

    def forget(self, request: ServedRequest[Produce]) -> None:
        """The request has come to its end by another way."""
        known = self._checks.pop(request, None)
        if known is not None:
            known.is_forgotten = True

    def _start(self, request: ServedRequest[Produce], actor: Actor) -> None:
        if self._pool is None:
            raise InvariantViolated("a batch is large only where there is a pool")
        this = self._checks[request] = _Check()
        self.count += 1
        actor.suspend()
        self._pool.run(partial(this.run, request.attachments[0], self._now_ns), partial(self._checked, this, actor))

    def _checked(self, this: _Check, actor: Actor) -> None:
        actor.charge(elapsed_ns=this.elapsed_ns)
        self._scheduler.resume(actor)
