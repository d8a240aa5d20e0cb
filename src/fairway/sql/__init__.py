"""What stands on a user's own database, through SQLAlchemy 2: SQLite, PostgreSQL, MySQL, MariaDB; threads and asyncio.

Outbox, AioOutbox    messages that are sent if, and only if, their transaction commits (docs/outbox.md)
Relay, AioRelay      send what a crash has left in an outbox
insert, statement    write to an outbox without SQLAlchemy
SqlInbox             handlers whose effect happens once, however often their message comes (docs/idempotence.md)
Fence                no effect of a deposed leader is accepted (docs/career.md)
SqlElection          who leads, by a lease in the database
"""

from __future__ import annotations

try:
    import sqlalchemy  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "fairway.sql needs SQLAlchemy 2: pip install 'fairway[sql]'", name=missing.name
    ) from missing

from fairway.sql.aio_outbox import AioOutbox
from fairway.sql.election import SqlElection
from fairway.sql.fencing import Fence
from fairway.sql.inbox import SqlInbox
from fairway.sql.outbox import Outbox
from fairway.sql.plain import insert, statement
from fairway.sql.relay import AioRelay, Relay
from fairway.sql.relaying import RelayOptions
from fairway.sql.rows import OutboxState, RefusedBatch
from fairway.sql.tables import outbox_table

__all__ = [
    "AioOutbox",
    "AioRelay",
    "Fence",
    "Outbox",
    "OutboxState",
    "RefusedBatch",
    "Relay",
    "RelayOptions",
    "SqlElection",
    "SqlInbox",
    "insert",
    "outbox_table",
    "statement",
]
