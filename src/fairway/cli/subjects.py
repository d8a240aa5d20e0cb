"""`fairway subjects`, `groups` and `lag`: what there is, and who is behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import output
from fairway.cli.client import AsJson, Patience, Url, connected, describe, groups_of
from fairway.cli.settings import ConfigFile
from fairway.world.clock import RealClock

if TYPE_CHECKING:
    from fairway.protocol.admin import GroupDescription, SubjectDescription

MaybeSubject = Annotated[str | None, typer.Argument(metavar="[SUBJECT]", help="Only this subject.", show_default=False)]
MaybeGroup = Annotated[str | None, typer.Option("--group", "-g", metavar="GROUP", help="Only this group.")]
All = Annotated[bool, typer.Option("--all", help="Those of the broker's own, too: dead letters.")]
Above = Annotated[
    int | None, typer.Option("--above", min=0, metavar="N", help="Exit status 4 if a group is further behind.")
]
Older = Annotated[
    float | None,
    typer.Option("--older-s", min=0, metavar="SECONDS", help="Exit status 4 if a group owes an older message."),
]


def subjects(
    all_of_them: All = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """The subjects, and how much is stored of each."""
    with connected("subjects", config, url, patience_s) as client:
        from fairway.protocol.admin import Depth

        _, found = describe(client, Depth.SUBJECTS)
        found = [each for each in found if all_of_them or ":" not in each.name]
        if json:
            output.write_json({"subjects": [_without_groups(each) for each in found]})
            return
        table = output.table("subjects", "subject", "messages>", "first>", "next>", "groups>", "")
        rows = [
            (
                each.name,
                f"{each.committed_end - each.first_sequence:,}",
                f"{each.first_sequence:,}",
                f"{each.committed_end:,}",
                f"{each.groups_count:,}",
                "read-only" if each.is_read_only else "",
            )
            for each in found
        ]
        output.show_rows(table, rows, "no subjects yet: nothing was sent")


def _without_groups(subject: SubjectDescription) -> dict[str, object]:
    named: dict[str, object] = output.named(subject)
    del named["groups"]
    return named


def groups(
    subject: MaybeSubject = None,
    group: MaybeGroup = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """The groups on every subject: what each has in hand, and what waits. With --json: its consumers, too."""
    with connected("groups", config, url, patience_s) as client:
        from fairway.protocol.admin import Depth

        found = groups_of(client, subject, group, Depth.CONSUMERS)
        if json:
            output.write_json({"groups": [_with_subject(*each) for each in found]})
            return
        columns = ("consumers>", "lag>", "in flight>", "waiting>", "dead>", "lost>", "weight>", "")
        table = output.table("groups", "subject", "group", *columns)
        rows = [
            (
                on.name,
                each.name,
                f"{each.consumers_count:,}",
                f"{each.lag:,}",
                f"{each.in_flight:,}",
                f"{_waiting(each):,}",
                f"{each.dead:,}",
                f"{each.lost:,}",
                f"{each.weight:g}",
                _remarks(each),
            )
            for on, each in found
        ]
        output.show_rows(table, rows, "no groups yet: nobody has consumed")


def _waiting(group: GroupDescription) -> int:
    """Messages that are neither in hand nor fresh: handed back, retried, dying, parked, or in the inbox."""
    return group.returned + group.retrying + group.dying + group.inbox + group.parked


def _remarks(group: GroupDescription) -> str:
    """What is special about the group, and what keeps it waiting."""
    remarks = ["paused"] if group.is_paused else []
    if group.order != "none":
        remarks.append("by key" if group.order == "key" else group.order)
    if group.coalesce != "none":
        remarks.append(f"{group.declined:,} declined")
    if group.rate_per_s:
        remarks.append(f"{group.rate_per_s:g}/s")
    if group.rate_per_key:
        remarks.append(f"{group.rate_per_key:g}/s a key")
    if group.is_full:
        remarks.append("waits: parked_max is reached")
    if group.halted:
        remarks.append(f"{output.count(group.halted, 'key')} halted")
    if group.lost:
        remarks.append(f"{group.lost:,} lost")
    return ", ".join(remarks)


def _with_subject(subject: SubjectDescription, group: GroupDescription) -> dict[str, object]:
    from fairway.groups.config import as_document, decode

    document = {"subject": subject.name, **output.named(group)}
    document["config"] = None if group.config is None else as_document(decode(group.config))
    return document


def lag(
    subject: MaybeSubject = None,
    group: MaybeGroup = None,
    above: Above = None,
    older_s: Older = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """How far behind each group is: messages it was not handed yet, and the age of the oldest it is not done with.

    For a watchdog: with --above or --older-s the exit status is 4 if any group shown is beyond that, otherwise 0.
    """
    with connected("lag", config, url, patience_s) as client:
        now_ms = RealClock().wall_ms()
        found = groups_of(client, subject, group)
    behind = [(on, each, _oldest_s(each, now_ms)) for on, each in found]
    if json:
        output.write_json({"groups": [_lag_document(*each) for each in behind]})
    else:
        table = output.table("lag", "subject", "group", "lag>", "in flight>", "waiting>", "oldest>", "consumers>", "")
        rows = [
            (
                on.name,
                each.name,
                f"{each.lag:,}",
                f"{each.in_flight:,}",
                f"{_waiting(each):,}",
                "" if oldest_s is None else output.age(oldest_s),
                f"{each.consumers_count:,}",
                _remarks(each),
            )
            for on, each, oldest_s in behind
        ]
        output.show_rows(table, rows, "no groups yet: nobody has consumed")
    is_far = above is not None and any(each.lag > above for _, each, _ in behind)
    is_old = older_s is not None and any(oldest_s is not None and oldest_s > older_s for *_, oldest_s in behind)
    if is_far or is_old:
        raise typer.Exit(output.Exit.DAMAGE)


def _oldest_s(group: GroupDescription, now_ms: int) -> float | None:
    return None if group.oldest_ms is None else max(now_ms - group.oldest_ms, 0) / 1_000


def _lag_document(subject: SubjectDescription, group: GroupDescription, oldest_s: float | None) -> dict[str, object]:
    return {
        "subject": subject.name,
        "group": group.name,
        "lag": group.lag,
        "in_flight": group.in_flight,
        "waiting": _waiting(group),
        "oldest_s": oldest_s,
        "consumers": group.consumers_count,
        "is_paused": group.is_paused,
        "parked": group.parked,
        "is_full": group.is_full,
        "lost": group.lost,
    }
