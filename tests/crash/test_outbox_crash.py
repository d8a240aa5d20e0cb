"""Sales and the messages about them agree, whichever process is killed; and proof that the judge would see it if they
did not, by programs that send by themselves."""

from __future__ import annotations

from tests.crash import outbox_rounds
from tests.crash.outbox_rounds import OutboxCounts

SECONDS = 3.0


def test_what_was_sold_is_what_was_sent(postgres_url: str, mariadb_url: str) -> None:
    servers = [("postgresql", postgres_url), ("mariadb", mariadb_url)]
    counts = outbox_rounds.run(SECONDS, 3, OutboxCounts(), servers, sellers=1)
    assert counts.clean, (counts.figures(), counts.failures, counts.details[:5])
    assert counts.seller_kills >= 2
    assert all(count > 0 for count in counts.by_database.values())


def test_programs_that_send_by_themselves_lose_messages_and_send_what_never_happened() -> None:
    counts = outbox_rounds.run(SECONDS, 4, OutboxCounts(), [], is_flawed=True)
    assert counts.failures == []
    assert counts.missing > 0
    assert counts.phantom > 0
