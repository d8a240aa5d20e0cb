"""Payments booked by programs that are killed, into three databases: each once. And proof that the books would show it:
without an inbox, the same crashes book some of them twice."""

from __future__ import annotations

from tests.crash import inbox_rounds
from tests.crash.inbox_rounds import InboxCounts

SECONDS = 2.0
TRIES = 3  # a slow machine has time for few kills in two seconds, and few of them come between a payment and its ack


def test_every_payment_is_booked_once(postgres_url: str, mariadb_url: str) -> None:
    servers = [("postgresql", postgres_url), ("mariadb", mariadb_url)]
    counts = inbox_rounds.run(SECONDS, 3, InboxCounts(), servers, faces=1)
    assert counts.clean, (counts.figures(), counts.failures)
    assert counts.dooms > 0
    assert counts.booked == counts.payments >= 300


def test_without_an_inbox_crashes_book_twice() -> None:
    booked_twice = 0
    for seed in range(4, 4 + TRIES):
        counts = inbox_rounds.run(SECONDS, seed, InboxCounts(), [], faces=2, is_idempotent=False)
        assert (counts.failures, counts.missing) == ([], 0)
        booked_twice += counts.twice_by_crash
        if booked_twice:
            break
    assert booked_twice > 0
