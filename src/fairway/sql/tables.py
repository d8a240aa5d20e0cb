"""The outbox's table: a row for each batch that is to be sent, as it will go over the wire.

    id          of the first message in the batch: 26 characters, as `fairway trace` takes it
    wake_ms     when a relay may take the row; far in the future: it is set aside, and `error` says why. Somebody holds
                it until then, if there is no error
    subject     where the messages go
    messages    how many they are
    created_ms  when they were written, by the clock of whoever wrote them
    stream      under which the batch is sent, and its place there. Both are written before it is first sent and stay as
    place       they are, so that a broker recognises the batch whoever sends it again. NULL: a relay chooses
    body        the batch: payloads, keys, tags, headers, ids, due times
    error       why it could not be sent when that was last tried; none while somebody holds the row
    broker_group  in a cluster, written with stream and place: where the batch is sent, and nowhere else, for only that
                group can tell whether it has it. NULL: with one broker; or a relay chooses
    secret      of the stream, in hexadecimal digits: whoever sends the row shows it to the broker, which takes nothing
                in that stream from anybody else. NULL: the stream has none, or a relay chooses

Tables of earlier versions have no `broker_group`, or no `secret`. Without the first they serve no cluster; without the
second the streams of their rows are open to everybody. `create` adds what is missing.

The one index is what relays go by. Rows that were set aside lie at its far end, where nobody looks for work.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql

from fairway import limits
from fairway.batch.identity import TEXT_CHARS
from fairway.batch.secret import SECRET_BYTES
from fairway.errors import Misuse

NAME: Final = "fairway_outbox"
PARKED_MS: Final = 1 << 62  # the wake time of what was set aside
COLUMNS: Final = ("id", "wake_ms", "subject", "messages", "created_ms", "stream", "place", "body")  # of a new row
GROUP: Final = "broker_group"  # one more in a cluster
SECRET: Final = "secret"  # noqa: S105  a column too, in tables that have it
ERROR_CHARS_MAX: Final = limits.SENTENCE_CHARS_MAX

_NAME_CHARS_MAX: Final = 48  # leaves room for the name of the index in the 63 characters of PostgreSQL
_NARROW: Final = {"charset": "ascii", "collation": "ascii_bin"}  # four times smaller in MySQL's indexes than UTF-8


def outbox_table(metadata: sa.MetaData, name: str = NAME, schema: str | None = None) -> sa.Table:
    """The table, in metadata of yours: for `metadata.create_all`, and for Alembic's autogenerate."""
    if not name.isidentifier() or len(name) > _NAME_CHARS_MAX:
        raise Misuse(
            f"the table name {name!r}: letters, digits and _ are allowed, and at most {_NAME_CHARS_MAX} of them"
        )
    found = metadata.tables.get(name if schema is None else f"{schema}.{name}")
    if found is not None:
        return found
    return sa.Table(
        name,
        metadata,
        sa.Column("id", _text(TEXT_CHARS, is_fixed=True), primary_key=True),
        sa.Column("wake_ms", sa.BigInteger, nullable=False),
        sa.Column("subject", _text(limits.NAME_CHARS_MAX), nullable=False),
        sa.Column("messages", sa.Integer, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("stream", sa.BigInteger),
        sa.Column("place", sa.BigInteger),
        sa.Column("body", sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb"), nullable=False),
        sa.Column("error", sa.Text),
        sa.Column(GROUP, _text(limits.NAME_CHARS_MAX)),
        sa.Column(SECRET, _text(2 * SECRET_BYTES)),
        sa.Index(f"ix_{name}_wake_ms", "wake_ms"),
        schema=schema,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
    )


def _text(chars: int, *, is_fixed: bool = False) -> sa.types.TypeEngine[str]:
    """ASCII, compared byte by byte."""
    kind = sa.CHAR(chars) if is_fixed else sa.String(chars)
    narrow = (mysql.CHAR if is_fixed else mysql.VARCHAR)(chars, **_NARROW)
    plain = postgresql.VARCHAR(chars, collation="C")  # CHAR is padded, and gains nothing there
    return kind.with_variant(narrow, "mysql", "mariadb").with_variant(plain, "postgresql")
