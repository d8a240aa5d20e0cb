"""The circuit breaker: when the broker fails again and again, `add` can raise at once.

    CLOSED      the broker works                   → OPEN after `failures_max` failures in a row
    OPEN        no message is admitted             → HALF OPEN when the time is up
    HALF OPEN   one probe is admitted              → CLOSED by a success, OPEN again by a failure

The breaker guards the buffer, not the wire: the producer keeps resending buffered batches, and any success closes the
circuit.
"""

from __future__ import annotations

from fairway.protocol.line import NS_PER_MS


class CircuitBreaker:
    """One producer's view of one broker."""

    __slots__ = ("_failures", "_failures_max", "_open_ns", "_probe_at_ns", "is_open", "sentence")

    def __init__(self, *, failures_max: int, open_ms: int) -> None:
        self.is_open = False  # True also while half open
        self.sentence = ""  # the last failure, for people; empty when all is well
        self._failures = 0
        self._failures_max = failures_max
        self._open_ns = open_ms * NS_PER_MS
        self._probe_at_ns = 0

    def failed(self, sentence: str, now_ns: int) -> None:
        """Count a failure. A failing probe opens the circuit for a whole term again."""
        self.sentence = sentence
        self._failures += 1
        if self._failures >= self._failures_max:
            if not self.is_open or now_ns >= self._probe_at_ns:
                self._probe_at_ns = now_ns + self._open_ns
            self.is_open = True

    def succeeded(self) -> None:
        self._failures = 0
        self.is_open = False
        self.sentence = ""

    def admits(self, now_ns: int) -> bool:
        """Whether one more message may pass; while the circuit is open, one probe per term."""
        if not self.is_open:
            return True
        if now_ns < self._probe_at_ns:
            return False
        self._probe_at_ns = now_ns + self._open_ns
        return True
