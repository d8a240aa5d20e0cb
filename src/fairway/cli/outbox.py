"""`fairway outbox`: the outbox in a user's database, and a relay that sends its messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairway import batch
from fairway.cli import output
from fairway.cli.arguments import AsJson, Limit
from fairway.cli.settings import ConfigFile, Url, resolve
from fairway.errors import FairwayError, Misuse, RemoteProtocolError
from fairway.runtime import host, terminal
from fairway.runtime.clock import RealClock

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from fairway.sql.outbox import Outbox
    from fairway.sql.outbox_rows import RefusedBatch
    from fairway.sql.relay import Relay

app = typer.Typer(no_args_is_help=True)

_PAYLOAD_CHARS = 200
_LOOK_S = 0.5

Database = Annotated[
    str,
    typer.Option(
        "--database",
        envvar="FAIRWAY_DATABASE",
        metavar="URL",
        help="SQLAlchemy's address of the database, such as postgresql+psycopg://USER@HOST/NAME.",
        show_default=False,
    ),
]
TableName = Annotated[str, typer.Option("--table", metavar="[SCHEMA.]NAME", help="The outbox's table.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="Row ID, as `outbox list` shows it.", show_default=False)]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Row IDs.", show_default=False)]
SomeIds = Annotated[list[str], typer.Argument(metavar="ID", help="Row IDs.", show_default=False)]
Everything = Annotated[bool, typer.Option("--all", help="All rows that are set aside now.")]
Lease = Annotated[
    float,
    typer.Option("--lease-s", min=1, metavar="SECONDS", help="How long a relay reserves rows."),
]
Once = Annotated[
    bool, typer.Option("--once", help="Stop when the rows that are there at the start are sent or set aside.")
]

_TABLE = "fairway_outbox"


@app.callback()
def _root() -> None:
    """The outbox in a database: count, list and repair its messages; run a relay that sends them.

    A row that a broker refuses for good is set aside: relays leave it alone.
    """


@app.command("status")
def status(database: Database, table: TableName = _TABLE, json: AsJson = False) -> None:
    """Show how many messages wait, the age of the oldest, and how many were set aside."""
    with _opened("outbox status", database, table) as outbox:
        state = outbox.state()
    if json:
        output.write_json(state)
        return
    terminal.say(
        f"{output.count(state.pending, 'message')} pending, the oldest {output.age(state.oldest_s)} old; "
        f"{state.overdue:,} overdue; {state.set_aside:,} set aside"
    )
    if state.subjects:
        shown = output.table("pending", "subject", "messages>")
        output.show_rows(shown, [(name, f"{messages:,}") for name, messages in state.subjects.items()], "")
    if state.overdue and state.oldest_s > 60:
        terminal.say("overdue for more than a minute: is a relay running, and a broker (`fairway outbox relay`)?")
    if state.set_aside:
        terminal.say(
            "`fairway outbox list` shows why rows were set aside; remove the cause, then `fairway outbox retry --all`"
        )


@app.command("list")
def list_rows(database: Database, table: TableName = _TABLE, limit: Limit = 100, json: AsJson = False) -> None:
    """List the rows that were set aside, oldest first, with the reason."""
    with _opened("outbox list", database, table) as outbox:
        found = outbox.set_aside(limit)
    if json:
        output.write_json([_document(each) for each in found])
        return
    shown = output.table("set aside", "id", "written (UTC)", "subject", "messages>", "error")
    rows = [(each.id, output.moment(each.created_ms), each.subject, f"{each.messages:,}", each.error) for each in found]
    output.show_rows(shown, rows, "nothing was set aside", rows_max=limit)


@app.command("show")
def show(database: Database, id: Id, table: TableName = _TABLE, json: AsJson = False) -> None:
    """Show a row that was set aside, with its messages."""
    with _opened("outbox show", database, table) as outbox:
        found = [each for each in outbox.set_aside(1_000_000) if each.id == id.upper()]
        if not found:
            raise FairwayError(f"no row {id} is set aside: `fairway outbox list` shows the rows")
        [row] = found
        messages = _messages(row)
    if json:
        output.write_json({**_document(row), "contents": messages})
        return
    terminal.say(f"{row.id} to {row.subject}, written {output.moment(row.created_ms)}: {row.error}")
    shown = output.table("messages", "id", "key", "tags", "headers", "payload")
    lines = [
        (each["id"], each["key"] or "", " ".join(each["tags"]), str(each["headers"] or ""), each["payload"])
        for each in messages
    ]
    output.show_rows(shown, lines, "its bytes cannot be read")


@app.command("retry")
def retry(
    database: Database, ids: Ids = None, everything: Everything = False, table: TableName = _TABLE, json: AsJson = False
) -> None:
    """Let relays send rows that were set aside again. Exit status 1 if an ID is unknown."""
    with _opened("outbox retry", database, table) as outbox:
        if bool(ids) == everything:
            raise Misuse("give the IDs of rows, or --all")
        found = outbox.retry(None if everything else [each.upper() for each in ids or ()])
    _show_changed("outbox retry", found, ids or [], json, "waits to be sent again")


@app.command("discard")
def discard(database: Database, ids: SomeIds, table: TableName = _TABLE, json: AsJson = False) -> None:
    """Delete rows that were set aside: their messages are never sent. Exit status 1 if an ID is unknown."""
    with _opened("outbox discard", database, table) as outbox:
        found = outbox.discard([each.upper() for each in ids])
    _show_changed("outbox discard", found, ids, json, "is deleted")


@app.command("create")
def create(database: Database, table: TableName = _TABLE) -> None:
    """Create the table and its index, if they are missing."""
    with output.failures("outbox create"), _engine(database) as engine:
        _outbox(engine, table).create()
    terminal.say(f"the table {table} exists")


@app.command("relay")
def relay(
    database: Database,
    table: TableName = _TABLE,
    once: Once = False,
    lease_s: Lease = 20.0,
    json: AsJson = False,
    url: Url = None,
    config: ConfigFile = None,
) -> None:
    """Send the messages of the outbox until Ctrl-C or SIGTERM. Any number of relays may run."""
    with output.failures("outbox relay"), _engine(database) as engine:
        from fairway.sql.database import split
        from fairway.sql.relay import Relay
        from fairway.sql.relay_rounds import RelayOptions

        options = resolve(config, url=url).options
        name, schema = split(table)
        how = RelayOptions(lease_s=lease_s, answer_s=lease_s / 2)
        working = Relay(engine, options.url, table=name, schema=schema, options=how)
        with host.asked_to_end() as ending, working:
            terminal.say(f"relaying {table} to {options.url}", err=True)
            begun_ms = RealClock().wall_ms()
            while not once or working.left_of(begun_ms):
                if ending.wait(_LOOK_S):
                    break
                check_relay(working)
    if json:
        import dataclasses

        output.write_json(dataclasses.asdict(working.counts))
    else:
        counts = working.counts
        terminal.say(
            f"{output.count(counts.sent, 'message')} sent, {counts.repeats:,} of them stored before; "
            f"{counts.set_aside:,} set aside"
        )


def check_relay(working: Relay) -> None:
    """Raise if the relay has failed: a supervisor restarts a process only after it exits."""
    if working.has_failed:
        raise FairwayError(f"{working.trouble}; see the errors above. Rows are safe in the table: start another relay")


# --- the database -----------------------------------------------------------------------------------------------------


@contextmanager
def _engine(database: str) -> Iterator[Engine]:
    """An engine of SQLAlchemy; errors of the database become a sentence and an exit status."""
    try:
        from fairway.sql.database import engine_at
    except ModuleNotFoundError:
        raise FairwayError(f"an outbox needs SQLAlchemy: {output.install('sql')}") from None
    with engine_at(database, "--database") as engine:
        yield engine


@contextmanager
def _opened(verb: str, database: str, table: str) -> Iterator[Outbox]:
    with output.failures(verb), _engine(database) as engine:
        outbox = _outbox(engine, table)
        outbox.check()
        yield outbox


def _outbox(engine: Engine, table: str) -> Outbox:
    from fairway.sql.database import split
    from fairway.sql.outbox import Outbox

    name, schema = split(table)
    return Outbox(engine, table=name, schema=schema)


# --- showing ----------------------------------------------------------------------------------------------------------


def _document(row: RefusedBatch) -> dict[str, Any]:
    return {
        "id": row.id, "subject": row.subject, "messages": row.messages, "created_ms": row.created_ms,
        "error": row.error,
    }  # fmt: skip


def _messages(row: RefusedBatch) -> list[dict[str, Any]]:
    try:
        opened = batch.decode(row.body)
    except RemoteProtocolError:
        return []
    return [
        {
            "id": str(opened.id(number)),
            "key": opened.key(number),
            "tags": opened.tags(number),
            "headers": opened.headers(number),
            "due_ms": opened.due_ms(number) or None,
            "payload": opened.payloads[number].decode("utf-8", "backslashreplace")[:_PAYLOAD_CHARS],
        }
        for number in range(len(opened))
    ]


def _show_changed(verb: str, found: list[str], asked: list[str], json: bool, what: str) -> None:
    unknown = [each for each in asked if each.upper() not in found]
    if json:
        output.write_json({"ids": found, "unknown": unknown})
    else:
        terminal.say(f"{output.count(len(found), 'row')}: {what}")
        for each in unknown:
            terminal.say(f"fairway {verb}: no row {each} is set aside", err=True)
    if unknown:
        raise typer.Exit(output.Exit.FAILED)
