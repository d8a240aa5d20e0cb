"""Rates of groups: a bucket of tokens for each, one for every message that is handed out.

A pull that finds the bucket empty waits like one that finds no message, and is looked at again when the next token is
there. After a restart a bucket is empty: a group never has more than its rate, however often the broker dies.
"""

from __future__ import annotations

from collections.abc import Callable

from fairway.broker.groups import GroupHost
from fairway.groups import GroupConfig
from fairway.scheduling import Scheduler
from fairway.world.clock import Clock

_NS = 1_000_000_000
_SLACK_S = 0.001  # uvloop rounds to milliseconds: without it a timer would ring early

CallLater = Callable[..., object]


class TokenBucket:
    """Tokens come at a rate, and so many are kept at most."""

    def __init__(self, rate_per_s: float, most: float, now_ns: int, *, is_full: bool) -> None:
        self.rate_per_s = rate_per_s
        self.most = most
        self._tokens = most if is_full else 0.0
        self._as_of_ns = now_ns
        self.alarm_ns = 0  # when somebody will look

    def tokens(self, now_ns: int) -> int:
        """Whole ones."""
        come = (now_ns - self._as_of_ns) * self.rate_per_s / _NS
        self._tokens = min(self._tokens + come, max(self.most, self._tokens))
        self._as_of_ns = now_ns
        return int(self._tokens + 1e-9)

    def take(self, count: int) -> None:
        self._tokens -= count

    def wait_ns(self) -> int:
        """Until the next whole one, as of the last look."""
        return max(round((1 - self._tokens) * _NS / self.rate_per_s), 0)


class GroupRates:
    """The buckets of all groups of a broker. What comes out of an inbox is the group's, too."""

    def __init__(self, clock: Clock, scheduler: Scheduler, call_later: CallLater) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._call_later = call_later

    def messages_max(self, host: GroupHost) -> int | None:
        """How many messages may be handed out now; None: as many as there are. Where there are none, the group's pulls
        are looked at again in time."""
        bucket = self._bucket(host)
        if bucket is None:
            return None
        now_ns = self._clock.monotonic_ns()
        tokens = bucket.tokens(now_ns)
        if tokens < 1 and bucket.alarm_ns <= now_ns:
            wait_ns = bucket.wait_ns()
            bucket.alarm_ns = now_ns + wait_ns
            self._call_later(wait_ns / _NS + _SLACK_S, self._scheduler.wake, host.key)
        return tokens

    def note_handed_out(self, host: GroupHost, count: int) -> None:
        bucket = self._bucket(host)
        if bucket is not None:
            bucket.take(count)

    def _bucket(self, host: GroupHost) -> TokenBucket | None:
        config: GroupConfig = host.law.config
        bucket = host.bucket
        if not config.rate_per_s:
            host.bucket = None
            return None
        if bucket is None or (bucket.rate_per_s, bucket.most) != (config.rate_per_s, config.burst_max):
            is_full = bucket is None and not host.is_revived
            bucket = host.bucket = TokenBucket(
                config.rate_per_s, config.burst_max, self._clock.monotonic_ns(), is_full=is_full
            )
        return bucket
