"""`fairway cluster`: who lives, who leads, who is behind; and groups of servers that are to be emptied or forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import meta_client, output
from fairway.cli.client import AsJson, Patience, Url
from fairway.cli.cluster_check import troubles
from fairway.cli.copy_probe import ask_copies
from fairway.cli.settings import ConfigFile, resolve
from fairway.errors import FairwayError
from fairway.world import host, terminal

if TYPE_CHECKING:
    from rich.console import Group as RichGroup

    from fairway.cli.options import CliOptions
    from fairway.protocol.routing import Copy, GroupRoute, Routed

app = typer.Typer(invoke_without_command=True)

Watch = Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")]
Check = Annotated[bool, typer.Option("--check", help="Exit status 4 unless all is well, and say what is not.")]
Interval = Annotated[float, typer.Option("--interval-s", min=0.1, metavar="SECONDS", help="Between two looks.")]
Servers = Annotated[str, typer.Argument(metavar="GROUP", help="The group of servers.", show_default=False)]
Off = Annotated[bool, typer.Option("--off", help="Undo it: the group takes messages again.")]
DrainAnyway = Annotated[bool, typer.Option("--force", help="Although nobody else takes some subjects' messages then.")]
LoseIt = Annotated[bool, typer.Option("--force", help="Although messages are lost to consumers by it.")]
Copies = Annotated[
    list[str] | None,
    typer.Option("--copy", metavar="ID", help="Only this copy of it, which is away and will not come back."),
]


@app.callback()
def cluster(
    context: typer.Context,
    watch: Watch = False,
    check: Check = False,
    interval_s: Interval = 1.0,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """The groups of servers: who lives and leads, epochs, how far copies are behind, and why one takes no messages.

    Asked of a meta server, --url meta://HOST:PORT.
    """
    if context.invoked_subcommand is not None:
        return
    with output.failures("cluster"):
        options = resolve(config, url=url, patience_s=patience_s).options
        if watch:
            _watch(options, interval_s, as_json=json)
            return
        found = meta_client.everything(options)
        wrong = troubles(found, ask_copies(found) if check else None)
        if json:
            output.write_json(document(found, wrong))
        else:
            terminal.console().print(shown(found))
        if check and not json:
            for sentence in wrong or ["all is well: every group is led and takes messages, all copies are in sync"]:
                terminal.say(sentence)
        if check and wrong:
            raise typer.Exit(output.Exit.DAMAGE)


@app.command()
def drain(
    group: Servers,
    off: Off = False,
    force: DrainAnyway = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Send no new messages to a group of servers; its subjects go to others, and what it holds is still consumed."""
    from fairway.protocol.routing import RouteChange

    meta_client.decide(
        "cluster drain", config, url, patience_s, RouteChange.DRAIN, group, is_on=not off, is_forced=force, as_json=json
    )


@app.command()
def decommission(
    group: Servers,
    copy: Copies = None,
    force: LoseIt = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Give up a group of servers that was drained, or a copy of it. Refused while consumers are owed what it holds."""
    from fairway.protocol.routing import RouteChange

    meta_client.decide(
        "cluster decommission", config, url, patience_s, RouteChange.DECOMMISSION, group,
        groups=copy or (), is_forced=force, as_json=json,
    )  # fmt: skip


def _watch(options: CliOptions, interval_s: float, *, as_json: bool) -> None:
    with host.asked_to_end() as ending:
        if as_json:
            while True:
                output.write_json_line(_seen(meta_client.everything(options)))
                if ending.wait(interval_s):
                    return
        from rich.live import Live

        with Live(shown(meta_client.everything(options)), console=terminal.console(), auto_refresh=False) as live:
            while not ending.wait(interval_s):
                try:
                    live.update(shown(meta_client.everything(options)), refresh=True)
                except (FairwayError, TimeoutError) as error:  # it may come back, and so do we
                    live.console.print(f"{error}; still waiting", soft_wrap=True)


def _seen(found: Routed) -> dict[str, object]:
    return document(found, troubles(found))


def document(found: Routed, wrong: list[str]) -> dict[str, object]:
    """For programs."""
    groups = []
    for group in found.groups:
        ends = _master_ends(group)
        named = output.named(group)
        for copy, each in zip(group.copies, named["copies"], strict=True):
            each["lag_bytes"] = lag_bytes(copy, ends)
        groups.append(named)
    subjects = [output.named(subject) for subject in found.subjects]
    return {
        "is_old": found.is_old,
        "is_well": not wrong,
        "troubles": wrong,
        "metas": found.metas,
        "groups": groups,
        "subjects": subjects,
    }


def shown(found: Routed) -> RichGroup:
    """For people."""
    from rich.console import Group as RichGroup

    columns = ("group", "kind", "epoch>", "copy", "at", "role", "in sync", "log ends>", "behind>", "")
    table = output.table("cluster", *columns)
    for group in found.groups:
        output.fill(table, _rows(group), rows_max=len(group.copies) + 1)
    writable = sum(bool(subject.writable) for subject in found.subjects)
    metas = ", ".join(found.metas) or "none is registered"
    lines = [f"meta servers: {metas}", f"subjects: {len(found.subjects):,}, {writable:,} of them take messages"]
    if found.is_old:
        lines.append("the registry cannot be reached: this is how it was")
    if not found.groups:
        lines.insert(0, "no groups of servers yet: start brokers with --registry and --group")
    return RichGroup(*([table] if found.groups else []), *map(output.cell, lines))


def _rows(group: GroupRoute) -> list[tuple[str, ...]]:
    """One for each copy; what concerns the whole group stands in the first."""
    in_sync = sum(copy.is_in_sync for copy in group.copies)
    ends = _master_ends(group)
    rows: list[tuple[str, ...]] = []
    for number, copy in enumerate(group.copies):
        lag = lag_bytes(copy, ends)
        whole = (group.name, group.kind, str(group.epoch)) if not number else ("", "", "")
        rows.append(
            (
                *whole,
                copy.directory,
                copy.address,
                copy.role,
                f"yes, {in_sync} of {group.min_in_sync} needed" if copy.is_in_sync and not number
                else ("yes" if copy.is_in_sync else "no"),
                " ".join(f"{end:,}" for end in copy.ends),
                "" if lag is None else output.size(lag),
                "; ".join(filter(None, (group.why if not number else "", _rot(copy)))),
            )
        )  # fmt: skip
    return rows or [(group.name, group.kind, str(group.epoch), "", "", "", "", "", "", group.why)]


def _rot(copy: Copy) -> str:
    """What its disk has lost, and nobody has brought back."""
    spans = int(copy.load.get("rotten_spans", 0))
    return f"its disk has lost {spans:,} spans: replace it" if spans else ""


def _master_ends(group: GroupRoute) -> list[int]:
    return next((copy.ends for copy in group.copies if copy.address and copy.address == group.master), [])


def lag_bytes(copy: Copy, master_ends: list[int]) -> int | None:
    """How much of the master's logs it does not have, as both said last; None: nobody knows."""
    if not copy.address or len(copy.ends) != len(master_ends) or not master_ends:
        return None
    return sum(max(theirs - own, 0) for theirs, own in zip(master_ends, copy.ends, strict=True))
