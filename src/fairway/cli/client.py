"""What the verbs that speak to a broker share: their options, the connection, and everything there is, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import output
from fairway.cli.options import flag
from fairway.cli.settings import resolve
from fairway.errors import Code, InvariantViolated, Refused

if TYPE_CHECKING:
    from fairway import Client
    from fairway.protocol.admin import BrokerState, Depth, Describe, Described, GroupDescription, SubjectDescription

_ANSWER_S = 30.0  # a broker that is busy answers late; one that is away for so long is unreachable

Url = Annotated[str | None, flag("url", "URL")]
Patience = Annotated[float | None, flag("patience_s", "SECONDS")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs, on stdout.")]
Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="The subject.", show_default=False)]
Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group.", show_default=False)]


@contextmanager
def connected(
    verb: str, config: Path | None, url: str | None = None, patience_s: float | None = None
) -> Iterator[Client]:
    """A client of the broker that is meant; whatever goes wrong is a sentence and an exit status."""
    with output.failures(verb):
        import fairway

        options = resolve(config, url=url, patience_s=patience_s).options
        with fairway.connect(options.url, patience=options.patience_s) as client:
            yield client


def describe(
    client: Client,
    depth: Depth,
    subject: str | None = None,
    group: str | None = None,
    timeout_s: float = _ANSWER_S,
) -> tuple[BrokerState, list[SubjectDescription]]:
    """The broker and all its subjects, however many pages that takes; a subject that came in parts is put together."""
    import msgspec

    from fairway.protocol.admin import Describe

    found: dict[str, SubjectDescription] = {}
    page = _page(client, Describe(depth, subject, group), timeout_s)
    while True:
        for each in page.subjects:
            before = found.get(each.name)
            groups = [] if before is None else before.groups
            found[each.name] = msgspec.structs.replace(each, groups=groups + each.groups)
        if not page.next:
            break
        page = _page(client, Describe(depth, subject, group, page.next), timeout_s)
    if subject is not None and not found:
        raise Refused(Code.NO_SUCH_SUBJECT, f"nothing was ever sent to {subject} here")
    return page.broker, list(found.values())


def _page(client: Client, asked: Describe, timeout_s: float) -> Described:
    from fairway.protocol.admin import Described

    told = client.ask(asked, timeout_s)
    if not isinstance(told, Described):
        raise InvariantViolated(f"a DESCRIBE was answered with {told!r}")
    return told


def groups_of(
    client: Client, subject: str | None, group: str | None, depth: Depth | None = None
) -> list[tuple[SubjectDescription, GroupDescription]]:
    """Every group on every subject, or those that are meant; asked for by name, there must be one."""
    from fairway.protocol.admin import Depth

    _, subjects = describe(client, depth or Depth.GROUPS, subject, group)
    found = [(each, one) for each in subjects for one in each.groups]
    if group is not None and not found:
        raise Refused(Code.NO_SUCH_GROUP, f"there is no group {group} on {subject or 'any subject'}")
    return found
