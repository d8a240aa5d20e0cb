"""Outbox, inbox and election in the user's own database, through SQLAlchemy 2.

The databases are SQLite, PostgreSQL, MySQL and MariaDB. Every part works with threads and with asyncio; the election
asks in a thread of its own.

    Outbox, AioOutbox    send messages if, and only if, their transaction commits (docs/how-to/outbox.md)
    Relay, AioRelay      send the rows that a crash, or an absent broker, left in an outbox
    insert, statement    write to an outbox without SQLAlchemy
    SqlInbox             runs handlers whose effect happens once (docs/how-to/exactly-once.md)
    Fence                refuses the effects of a deposed leader (docs/how-to/leader-election.md)
    SqlElection          elects a leader by a lease in the database

The modules:

    outbox, outbox_aio   the outbox for threads and for asyncio: sends after the commit, then deletes what is stored
    outbox_writer        keeps messages with a transaction and writes their rows at the commit; `insert`, `statement`
    outbox_encoding      producer streams, and the sealing of messages into rows
    outbox_table         the table's columns
    outbox_rows          the SQL statements on the table
    outbox_batches       sends encoded batches over one connection, and tells how each ended
    outbox_sender        connections to one broker, or to each broker group of a cluster
    relay, relay_rounds  the relay, for threads and asyncio; the decisions of each of its rounds
    inbox                the inbox: its table and its transactions
    election             the fence and the election
    transaction_hooks    tells listeners when an engine commits or rolls back; sends rows together with the COMMIT
    database             engines, addresses, connections and tables; INSERTs that skip existing rows

The way of a message through the outbox: `Outbox.send` keeps the message with the connection. Before the commit,
`outbox_writer` seals the transaction's messages into rows. After the commit `outbox_sender` sends the rows, and
`outbox` deletes those that a broker has stored. A relay sends whatever remains.
"""

from __future__ import annotations

try:
    import sqlalchemy  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "fairway.sql needs SQLAlchemy 2: pip install 'fairway[sql]'", name=missing.name
    ) from missing

from fairway.sql.election import Fence, SqlElection
from fairway.sql.inbox import SqlInbox
from fairway.sql.outbox import Outbox
from fairway.sql.outbox_aio import AioOutbox
from fairway.sql.outbox_rows import OutboxState, RefusedBatch
from fairway.sql.outbox_table import outbox_table
from fairway.sql.outbox_writer import insert, statement
from fairway.sql.relay import AioRelay, Relay
from fairway.sql.relay_rounds import RelayOptions

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
