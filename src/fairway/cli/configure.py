"""`fairway configure SUBJECT GROUP [NAME=VALUE ...]`: see how a group is configured, change it, or make it so."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairway.cli import output
from fairway.cli.client import AsJson, Group, Patience, Subject, Url, connected, describe
from fairway.cli.settings import ConfigFile
from fairway.errors import Code, Misuse, Refused

if TYPE_CHECKING:
    from fairway import Client
    from fairway.groups import GroupConfig

Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME=VALUE]...", help="What is to be otherwise, as order=key.", show_default=False),
]

_NOT_BY_HAND = frozenset({"version", "is_broadcast", "backoff", "tags"})


def configure(
    subject: Subject,
    group: Group,
    changes: Changes = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Show how a group behaves; with NAME=VALUE change that for all its members, who join again by themselves.

    A group that does not exist is made. docs/ordering.md and docs/clients.md say what there is to choose.
    """
    with connected("configure", config, url, patience_s) as client:
        from fairway.groups.config import as_document

        before = _find(client, subject, group)
        after = before
        if changes:
            after = _changed(before, changes)
            client.configure(subject, group, after, expected_version=after.version - 1)
        elif before is None:
            raise Refused(Code.NO_SUCH_GROUP, f"there is no group {group} on {subject}: make it with NAME=VALUE")
        if after is None:
            return
        document = as_document(after)
        if json:
            output.write_json({"subject": subject, "group": group, **document})
            return
        known = {} if before is None else as_document(before)
        rows = [(name, _shown(value), _was(name, value, known)) for name, value in document.items()]
        output.show_rows(output.table("configuration", "setting", "value", ""), rows, "")


def _find(client: Client, subject: str, group: str) -> GroupConfig | None:
    """As it is; None: there is no such group, or no such subject."""
    from fairway.groups.config import decode
    from fairway.protocol.admin import Depth

    try:
        _, subjects = describe(client, Depth.CONSUMERS, subject, group)
    except Refused as refused:
        if refused.code is not Code.NO_SUCH_SUBJECT:
            raise
        return None
    for each in (one for of in subjects for one in of.groups):
        if each.config is None:
            raise Refused(Code.UNSUPPORTED, "this broker does not say how a group is configured: upgrade it")
        return decode(each.config)
    return None


def _changed(before: GroupConfig | None, changes: list[str]) -> GroupConfig:
    import msgspec

    from fairway.groups import GroupConfig

    document: dict[str, Any] = msgspec.to_builtins(before if before is not None else GroupConfig(version=0))
    names = sorted(document.keys() - _NOT_BY_HAND)
    for change in changes:
        name, is_given, value = change.partition("=")
        if not is_given or name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}=...?" if near else f"there are {', '.join(names)}"
            raise Misuse(f"{change!r} is no NAME=VALUE of a group's configuration: {hint}")
        document[name] = None if value in ("", "none") and name.endswith("max_handling_ms") else value
    document["version"] += 1
    try:
        return msgspec.convert(document, GroupConfig, strict=False)
    except msgspec.ValidationError as error:
        raise Misuse(f"a group cannot be configured so: {error}") from error


def _shown(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _was(name: str, value: object, known: dict[str, Any]) -> str:
    return "" if not known or known.get(name) == value or name == "version" else f"was {_shown(known.get(name))}"
