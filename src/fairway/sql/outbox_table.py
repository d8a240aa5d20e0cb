"""The outbox's table: one row for each batch that is to be sent, in the bytes that go over the wire.

    id          of the first message in the batch: 26 characters, as `fairway trace` takes it
    wake_ms     when a relay may take the row. Far in the future: the row is set aside, and `error` says why. A row
                without an error is held until then
    subject     where the messages go
    messages    how many they are
    created_ms  when they were written, by the clock of the writer
    stream      under which the batch is sent, and its place there. Both are written before the batch is first sent and
    place       do not change, so that a broker recognises the batch from any sender. NULL: a relay chooses
    body        the batch: payloads, keys, tags, headers, ids, due times
    error       why the last attempt to send it failed; none while the row is held
    broker_group  in a cluster: the only group the batch is sent to, because only that group can tell whether the batch
                is stored. Written with stream and place. NULL: with one broker, or a relay chooses
    secret      of the stream, in hexadecimal digits. The sender shows the secret to the broker, which takes
                nothing in that stream without it. NULL: the stream has none, or a relay chooses

Tables of earlier versions have no `broker_group`, or no `secret`. Without `broker_group` they cannot serve a cluster.
Without `secret` anybody can write to the streams of their rows. `create` adds the missing columns.

The one index is on `wake_ms`, by which relays look for work. Rows that were set aside are at its far end.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from fairway import limits
from fairway.batch.identity import SECRET_BYTES, TEXT_CHARS
from fairway.errors import Misuse
from fairway.sql.database import ascii_text, new_table

NAME: Final = "fairway_outbox"
PARKED_MS: Final = 1 << 62  # the wake time of rows that are set aside
COLUMNS: Final = ("id", "wake_ms", "subject", "messages", "created_ms", "stream", "place", "body")  # of a new row
GROUP: Final = "broker_group"  # an extra column in a cluster
SECRET: Final = "secret"  # noqa: S105  a column too, in tables that have it
ERROR_CHARS_MAX: Final = limits.SENTENCE_CHARS_MAX

_NAME_CHARS_MAX: Final = 48  # leaves room for the index's name in PostgreSQL's 63 characters


def outbox_table(metadata: sa.MetaData, name: str = NAME, schema: str | None = None) -> sa.Table:
    """The table in the caller's metadata: for `metadata.create_all`, and for Alembic's autogenerate."""
    if not name.isidentifier() or len(name) > _NAME_CHARS_MAX:
        raise Misuse(
            f"the table name {name!r}: letters, digits and _ are allowed, and at most {_NAME_CHARS_MAX} of them"
        )
    found = metadata.tables.get(name if schema is None else f"{schema}.{name}")
    if found is not None:
        return found
    return new_table(
        name,
        sa.Column("id", ascii_text(TEXT_CHARS, is_fixed=True), primary_key=True),
        sa.Column("wake_ms", sa.BigInteger, nullable=False),
        sa.Column("subject", ascii_text(limits.NAME_CHARS_MAX), nullable=False),
        sa.Column("messages", sa.Integer, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("stream", sa.BigInteger),
        sa.Column("place", sa.BigInteger),
        sa.Column("body", sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb"), nullable=False),
        sa.Column("error", sa.Text),
        sa.Column(GROUP, ascii_text(limits.NAME_CHARS_MAX)),
        sa.Column(SECRET, ascii_text(2 * SECRET_BYTES)),
        sa.Index(f"ix_{name}_wake_ms", "wake_ms"),
        metadata=metadata,
        schema=schema,
    )
