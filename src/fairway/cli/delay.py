"""`fairway delay`: the verbs of delayed messages, in one group."""

from __future__ import annotations

import typer

from fairway.cli import delay_serve, delayed

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Messages that wait for their time: look at them, cancel them, put them off."""


app.command("serve", help=delay_serve.HELP)(delay_serve.serve)
app.command("list")(delayed.list_delayed)
app.command("count")(delayed.count_delayed)
app.command("histogram")(delayed.histogram_delayed)
app.command("cancel")(delayed.cancel_delayed)
app.command("reschedule")(delayed.reschedule_delayed)
app.command("retry")(delayed.retry_delayed)
