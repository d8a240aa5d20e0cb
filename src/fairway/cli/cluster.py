"""`fairway cluster`: the server groups of a cluster, what is wrong with them, and how to drain and remove them.

`--check` also asks every copy over a connection of its own: a process that has died keeps its session at the registry
for a while, and the registry has figures of the last beat only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from fairway.cli import connections, output
from fairway.cli.arguments import Interval
from fairway.cli.connections import CommonOptions, common_options
from fairway.cli.settings import CliOptions
from fairway.errors import FairwayError
from fairway.lookup.registries import Inquirer, parse_meta
from fairway.protocol.admin_messages import BrokerState, Depth, Describe, Described
from fairway.protocol.delay_messages import DelayTally, Tallied, TransitReport, Which
from fairway.protocol.route_messages import Copy, GroupRoute, RouteChange, Routed
from fairway.registry.layout import IN_TRANSIT, MASTER
from fairway.runtime import host, terminal
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.rng import RealRng

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Group as RichGroup


ANSWER_S = 2.0  # for a connection, and again for the answer
_COUNT_S = 10.0  # for a delay server to count its messages
_AT_ONCE = 32


@dataclass(frozen=True)
class CopyAnswer:
    """The answer of a copy about itself."""

    state: BrokerState | str  # a sentence: the reason that there is no answer
    in_transit: list[TransitReport] | str | None = None  # of a delay master; None: the registry's figures have to do


def ask_copies(found: Routed) -> dict[str, CopyAnswer]:
    """The answers by address."""

    async def ask_all() -> dict[str, CopyAnswer]:
        room = asyncio.Semaphore(_AT_ONCE)
        counting = {group.master for group in found.groups if group.kind == "delay"}

        async def ask(address: str) -> tuple[str, CopyAnswer]:
            async with room:
                return address, await _ask(address, is_counting=address in counting)

        addresses = dict.fromkeys(copy.address for group in found.groups for copy in group.copies if copy.address)
        return dict(await asyncio.gather(*map(ask, addresses)))

    return asyncio.run(ask_all())


async def _ask(address: str, *, is_counting: bool) -> CopyAnswer:
    inquirer = Inquirer(RealNet(), RealClock(), RealRng(), parse_meta(f"fairway://{address}"), name="fairway check")
    try:
        if not await inquirer.connected(0, ANSWER_S):
            return CopyAnswer(str(inquirer.line.trouble or f"no answer in {ANSWER_S:g} s"))
        state = (await inquirer.ask(Describe(Depth.SUBJECTS), Described, ANSWER_S)).broker
        return CopyAnswer(state, await _count(inquirer) if is_counting and state.is_master else None)
    except FairwayError as error:
        return CopyAnswer(str(error))
    finally:
        inquirer.abort()


async def _count(inquirer: Inquirer) -> list[TransitReport] | str | None:
    try:
        return (await inquirer.ask(DelayTally(Which()), Tallied, _COUNT_S)).in_transit
    except FairwayError as error:
        return str(error)


FOLLOWER = "follower"

CopyAnswers: TypeAlias = "Mapping[str, CopyAnswer]"


def troubles(found: Routed, answers: CopyAnswers | None = None) -> list[str]:
    """Problems of the cluster, as sentences; none if every group is led and takes messages, and all copies are in sync.

    `answers`: the answer of each copy by address.
    """
    return [
        *(["the registry cannot be reached: nobody knows how it is now"] if found.is_old else []),
        *([] if found.groups else ["there is no group of servers: start brokers with --registry and --group"]),
        *(sentence for group in found.groups for sentence in _of_group(group)),
        *(sentence for group in found.groups for sentence in _of_answers(group, answers or {})),
        *_in_transit(found, answers or {}),
    ]


def _of_group(group: GroupRoute) -> Iterator[str]:
    if group.is_draining and group.master:
        return  # the operator drains the group: its copies may stop
    if not group.is_writable:
        yield group.why or f"group {group.name} takes no messages"
    for copy in group.copies:
        if not copy.address:
            yield _away(group, copy)
        elif not copy.is_in_sync:
            does = "behind its master" if copy.role in ("", "follower") else copy.role
            yield f"copy {copy.directory} of group {group.name}, at {copy.address}, is not in sync: it is {does}"
        elif group.master:
            yield from _of_role(group, copy)
        if spans := int(copy.load.get("rotten_spans", 0)):
            yield f"the disk of copy {copy.directory} of group {group.name} has lost {spans:,} spans: replace it"


def _of_role(group: GroupRoute, copy: Copy) -> Iterator[str]:
    """Problems of a copy that counts as in sync: its role differs from the registry."""
    name = f"copy {copy.directory} of group {group.name}, at {copy.address},"
    is_master = copy.address == group.master
    if is_master and copy.role != MASTER:
        yield f"{name} is to lead and has not taken over yet: it is {copy.role or 'waiting'}"
    elif is_master and copy.epoch and copy.epoch != group.epoch:
        yield f"{name} leads under epoch {copy.epoch}, and the registry says {group.epoch}"
    elif not is_master and copy.role == MASTER:
        yield f"{name} was deposed and has not stepped down yet"
    elif not is_master and copy.role != FOLLOWER:
        yield f"{name} counts as in sync and is {copy.role or 'silent'}: it is out of the set soon, or follows again"


def _of_answers(group: GroupRoute, answers: CopyAnswers) -> Iterator[str]:
    """Problems in the answers of copies: a dead process keeps its session for a while."""
    for copy in group.copies:
        name = f"copy {copy.directory} of group {group.name}, at {copy.address},"
        if copy.address not in answers:
            continue
        counted, answer = answers[copy.address].in_transit, answers[copy.address].state
        if isinstance(counted, str):
            yield f"{name} does not say how many delayed messages wait for broker groups: {counted}"
        if isinstance(answer, str):
            yield f"{name} does not answer, though its session at the registry lives: {answer}"
        elif copy.address == group.master and not answer.is_master:
            yield f"{name} has taken over and is not open to clients yet: it waits until all it has is committed"
        elif answer.epoch < group.epoch:
            yield f"{name} has seen epoch {answer.epoch}, and its group is at {group.epoch}: it catches up"


def _in_transit(found: Routed, answers: CopyAnswers) -> Iterator[str]:
    """Delayed messages that wait for a broker group that needs help to come back."""
    groups = {group.name: group for group in found.groups}
    for target, reports in sorted(in_transit(found, answers).items()):
        known, messages = groups.get(target), sum(each.messages for each in reports.values())
        away_from = [name for name, each in reports.items() if not each.is_reachable]
        what = f"{messages:,} delayed {'message waits' if messages == 1 else 'messages wait'} for broker group {target}"
        if known is None:
            yield f"{what}, which is gone: `fairway delay retry --group {target} --may-repeat` sends them elsewhere"
        elif not known.master:
            yield f"{what}, which has no master: start its servers"
        elif known.is_draining:
            yield f"{what}, which is being drained: it takes them while its servers run"
        elif away_from:
            yield f"{what}, which cannot be reached from the delay servers of {', '.join(away_from)}"


def in_transit(found: Routed, answers: CopyAnswers) -> dict[str, dict[str, TransitReport]]:
    """Due delayed messages that may not be stored yet, by broker group and delay group. Without an answer of the delay
    master its last report to the registry counts, which may be some seconds old."""
    waiting: dict[str, dict[str, TransitReport]] = {}
    for group in found.groups:
        for copy in group.copies:
            if group.kind == "delay" and copy.address == group.master:
                answer = answers.get(copy.address)
                counted = None if answer is None else answer.in_transit
                for each in counted if isinstance(counted, list) else _reported(copy):
                    waiting.setdefault(each.group, {})[group.name] = each
    return waiting


def _reported(copy: Copy) -> Iterator[TransitReport]:
    """Reports of before say nothing of whether the broker group is reached."""
    for name, value in copy.load.items():
        if name.startswith(IN_TRANSIT):
            yield TransitReport(name.removeprefix(IN_TRANSIT), int(value), is_reachable=True)


def _away(group: GroupRoute, copy: Copy) -> str:
    """The group waits for a copy in sync that is down: no other copy may have all messages."""
    name = f"copy {copy.directory} of group {group.name} is away"
    if copy.is_in_sync:
        return f"{name}, and counts as in sync: start it"
    return f"{name}: start it, or forget it with `fairway cluster decommission {group.name} --copy {copy.directory}`"


app = typer.Typer(invoke_without_command=True)

Watch = Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")]
Check = Annotated[bool, typer.Option("--check", help="Print every problem; exit status 4 if there is one.")]
Servers = Annotated[str, typer.Argument(metavar="GROUP", help="The server group.", show_default=False)]
Off = Annotated[bool, typer.Option("--off", help="Undo: the group takes new messages again.")]
DrainAnyway = Annotated[
    bool, typer.Option("--force", help="Drain even if no other group takes the messages of some subjects.")
]
LoseIt = Annotated[bool, typer.Option("--force", help="Decommission even if consumers lose messages.")]
Copies = Annotated[
    list[str] | None,
    typer.Option("--copy", metavar="ID", help="Only this copy, which is down and will not come back; may be repeated."),
]


@app.callback()
@common_options
def cluster(
    context: typer.Context,
    watch: Watch = False,
    check: Check = False,
    interval_s: Interval = 1.0,
    *,
    common: CommonOptions,
) -> None:
    """Show server groups: masters, epochs, replication lag, and why a group takes no messages.

    Needs a meta server: --url meta://HOST:PORT.
    """
    if context.invoked_subcommand is not None:
        return
    with output.failures("cluster"):
        options = common.resolve()
        if watch:
            _watch(options, interval_s, as_json=common.json)
            return
        found = connections.everything(options)
        wrong = troubles(found, ask_copies(found) if check else None)
        if common.json:
            output.write_json(document(found, wrong))
        else:
            terminal.console().print(shown(found))
        if check and not common.json:
            for sentence in wrong or ["all is well: every group is led and takes messages, all copies are in sync"]:
                terminal.say(sentence)
        if check and wrong:
            raise typer.Exit(output.Exit.DAMAGE)


@app.command()
@common_options
def drain(group: Servers, off: Off = False, force: DrainAnyway = False, *, common: CommonOptions) -> None:
    """Send no new messages to a server group: other groups take them. Consumers still get those that it holds."""
    common.decide("cluster drain", RouteChange.DRAIN, group, is_on=not off, is_forced=force)


@app.command()
@common_options
def decommission(group: Servers, copy: Copies = None, force: LoseIt = False, *, common: CommonOptions) -> None:
    """Remove a drained server group, or a copy of a group. Refused while consumers still need its messages."""
    common.decide("cluster decommission", RouteChange.DECOMMISSION, group, groups=copy or (), is_forced=force)


def _watch(options: CliOptions, interval_s: float, *, as_json: bool) -> None:
    with host.asked_to_end() as ending:
        if as_json:
            while True:
                found = connections.everything(options)
                output.write_json_line(document(found, troubles(found)))
                if ending.wait(interval_s):
                    return
        from rich.live import Live

        with Live(shown(connections.everything(options)), console=terminal.console(), auto_refresh=False) as live:
            while not ending.wait(interval_s):
                try:
                    live.update(shown(connections.everything(options)), refresh=True)
                except (FairwayError, TimeoutError) as error:  # the meta server may come back: try again
                    live.console.print(f"{error}; still waiting", soft_wrap=True)


def document(found: Routed, wrong: list[str]) -> dict[str, object]:
    """The cluster as a JSON document."""
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
    """The cluster as a table with a summary."""
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
    """A row for each copy; the first also has what concerns the whole group."""
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
    """What the disk of the copy has lost for good."""
    spans = int(copy.load.get("rotten_spans", 0))
    return f"its disk has lost {spans:,} spans: replace it" if spans else ""


def _master_ends(group: GroupRoute) -> list[int]:
    return next((copy.ends for copy in group.copies if copy.address and copy.address == group.master), [])


def lag_bytes(copy: Copy, master_ends: list[int]) -> int | None:
    """How much of the master's logs the copy lacks, by their last reports; None if unknown."""
    if not copy.address or len(copy.ends) != len(master_ends) or not master_ends:
        return None
    return sum(max(theirs - own, 0) for theirs, own in zip(master_ends, copy.ends, strict=True))
