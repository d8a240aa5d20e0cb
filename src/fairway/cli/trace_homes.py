"""Who is asked for a message: the broker that the URL names, or every broker group that a meta server knows of.

In a cluster a message lies in one broker group, and what was redriven or replayed of it may lie in another. Each group
numbers its messages by itself and has an action log of its own, so each is asked over a connection of its own. One that
nobody answers for is passed over, and named: what the others know is told all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fairway.cli import meta_client
from fairway.cli.client import describe
from fairway.errors import Code, Refused, Unreachable

if TYPE_CHECKING:
    from fairway import Client
    from fairway.cli.options import CliOptions
    from fairway.protocol.admin import SubjectDescription
    from fairway.protocol.routing import GroupRoute


@dataclass(frozen=True)
class Home:
    """A broker group, as one asks it."""

    name: str | None  # None: a broker that is named by its address
    client: Client
    subjects: list[SubjectDescription] = field(default_factory=list)  # to look in, with their groups

    def has_log(self, log_id: str) -> bool:
        from fairway.protocol.admin import Depth

        return f"{self.client.describe(depth=Depth.SUBJECTS).broker.log_id:016x}" == log_id


@dataclass(frozen=True)
class SearchScope:
    """All of them, and why others could not be asked, by their names."""

    client: Client  # of the whole: it knows the delay servers
    homes: list[Home]
    unasked: dict[str, str] = field(default_factory=dict)


@contextmanager
def asked(client: Client, options: CliOptions, subject: str | None, *, is_lenient: bool) -> Iterator[SearchScope]:
    """Those who may hold a message, of one subject if that is meant. `is_lenient`: it need not be there."""
    from fairway.client.url import parse_any

    with ExitStack() as stack:
        unasked: dict[str, str] = {}
        homes = [Home(None, client)]
        if parse_any(options.url).meta:
            homes = list(_connected(_broker_groups(options), options, stack, unasked))
        homes = _with_subjects(homes, subject, unasked, is_lenient=is_lenient)
        if not homes:
            said = "; ".join(f"{name}: {why}" for name, why in unasked.items())
            raise Unreachable(f"none of the broker groups at {options.url} can be asked ({said})")
        yield SearchScope(client, homes, unasked)


def _broker_groups(options: CliOptions) -> list[GroupRoute]:
    found = [each for each in meta_client.everything(options).groups if each.kind == "broker"]
    if not found:
        raise Unreachable(f"no broker is registered at {options.url}: start brokers with --registry and --group")
    return sorted(found, key=lambda each: each.name)


def _connected(
    routes: Sequence[GroupRoute], options: CliOptions, stack: ExitStack, unasked: dict[str, str]
) -> Iterator[Home]:
    import fairway
    from fairway.client.url import SCHEME

    for each in routes:
        if not each.master:
            unasked[each.name] = each.why or "nobody leads it"
            continue
        url = SCHEME + ",".join((each.master, *each.replicas))
        try:
            yield Home(each.name, stack.enter_context(fairway.connect(url, patience=options.patience_s)))
        except Unreachable as error:
            unasked[each.name] = str(error)


def _with_subjects(
    homes: Sequence[Home], subject: str | None, unasked: dict[str, str], *, is_lenient: bool
) -> list[Home]:
    """What each has; what a broker keeps for itself only where it is named."""
    from fairway.protocol.admin import Depth

    found: list[Home] = []
    refusals: list[Refused] = []
    for home in homes:
        subjects: list[SubjectDescription] = []
        try:
            _, subjects = describe(home.client, Depth.GROUPS, subject)
        except Refused as refused:
            if refused.code is not Code.NO_SUCH_SUBJECT:
                raise
            refusals.append(refused)
        except TimeoutError as error:
            if home.name is None:
                raise
            unasked[home.name] = str(error)
            continue
        wanted = [each for each in subjects if subject is not None or ":" not in each.name]
        found.append(Home(home.name, home.client, wanted))
    if found and len(refusals) == len(found) and not unasked and not is_lenient:
        raise refusals[0]
    return found
