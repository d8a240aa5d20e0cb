"""The options of the sources `fairway` and `fairway.events`, and of the sink. Errors name the option and a remedy."""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from fairway.client import url as urls
from fairway.errors import BadName, Misuse
from fairway.limits import KIB, MIB
from fairway.names import MOMENTS, GroupName, Subject
from fairway.protocol.messages import Whence
from fairway.spark.server_groups import ServerGroupAddress, SubjectPart

DEFAULT_URL: Final = f"{urls.SCHEME}127.0.0.1:{urls.DEFAULT_PORT}"
PATIENCE_S: Final = 60  # a restarting broker is back much sooner; otherwise the task fails, and Spark retries elsewhere
POLL_MS: Final = 1_000  # the long poll of an idle stream: stopping a query takes no longer
_SIZES: Final = {"": 1, "k": KIB, "m": MIB, "g": 1024 * MIB}
_GLOB: Final = re.compile(r"[*?\[]")


def by_lower_case(names: str) -> dict[str, str]:
    """Names of options, by the lower-case names under which Spark gives them."""
    return {each.lower(): each for each in names.split()}


READ_OPTIONS: Final = by_lower_case(
    "url subject path starting ending minPartitions maxMessagesPerTrigger maxBytesPerTrigger group failOnDataLoss "
    "includeHeaders from keys tags patienceSeconds pollMs"
)
WRITE_OPTIONS: Final = by_lower_case(
    "url subject path group keepIds writeId patienceSeconds checkpointLocation queryName"
)
EVENT_OPTIONS: Final = by_lower_case(
    "url subject path group query starting ending minPartitions maxBytesPerTrigger maxEventsPerTrigger failOnDataLoss "
    "patienceSeconds pollMs delayed"
)
HELD: Final = MOMENTS  # the subject where queries of events keep their beginnings
_EVERYTHING: Final = "*,*:*"  # the broker's internal subjects too: dead letters, inboxes


@dataclass(frozen=True)
class Where:
    """A place in a subject, in the protocol's terms."""

    whence: Whence
    value: int = 0


EARLIEST: Final = Where(Whence.EARLIEST)
LATEST: Final = Where(Whence.LATEST)


@dataclass(frozen=True)
class Places:
    """Where to begin or end: a common place, and others for some subjects, or for subjects in single broker groups."""

    common: Where
    of: Mapping[str, Where]
    within: Mapping[str, Mapping[str, Where]] = field(default_factory=dict)  # by subject and broker group
    elsewhere: Where = EARLIEST  # for a named subject in a broker group that is not named

    def place(self, part: SubjectPart) -> Where:
        named = self.within.get(part.subject)
        if named is not None:
            return named.get(part.broker_group, self.elsewhere)
        return self.of.get(part.subject, self.common)

    def check(self, option: str, parts: Iterable[SubjectPart]) -> None:
        """Refuse a bare sequence for a subject in several broker groups: each group counts its own sequences."""
        groups: dict[str, list[str]] = {}
        for part in parts:
            if self.place(part).whence is Whence.SEQUENCE and part.subject not in self.within:
                groups.setdefault(part.subject, []).append(part.broker_group)
        for subject, held in groups.items():
            if len(held) > 1:
                sequence = self.place(SubjectPart(subject, held[0])).value
                raise Misuse(
                    f"option {option}: {subject} is in broker groups {', '.join(held)}, each of which has sequences of "
                    f'its own: say one for each, {{"{subject}": {{"{held[0]}": {sequence}}}}}'
                )


@dataclass(frozen=True)
class ReadOptions:
    """The options of a reader, parsed."""

    url: str
    subjects: tuple[str, ...]  # names and patterns
    starting: Places
    ending: Places
    min_partitions: int | None
    messages_per_trigger: int | None
    bytes_per_trigger: int | None
    group: str | None
    fail_on_data_loss: bool
    include_headers: bool
    keys: tuple[str, ...] | None  # None: messages with any key, or without one
    tags: tuple[str, ...]
    patience_s: int
    poll_ms: int
    has_ending: bool
    is_replica: bool = False

    def place(self, broker_group: str) -> ServerGroupAddress:
        """Where that broker group is read."""
        return ServerGroupAddress(self.url, self.patience_s, broker_group, self.is_replica)

    @property
    def names(self) -> tuple[str, ...]:
        """The subjects given by their full names."""
        return tuple(each for each in self.subjects if not is_pattern(each))

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(each for each in self.subjects if is_pattern(each))


@dataclass(frozen=True)
class WriteOptions:
    """The options of a writer, parsed."""

    url: str
    subject: str | None  # None: a column names it
    group: str | None  # the only group that gets the messages; None: all groups of the subject
    keep_ids: bool
    write_id: str | None
    patience_s: int


@dataclass(frozen=True)
class EventOptions:
    """The options of a reader of events, parsed."""

    read: ReadOptions
    groups: frozenset[str] | None  # None: any, and `produced`
    events_per_trigger: int | None
    query: str | None  # the name under which the broker keeps where a stream begins
    has_delayed: bool  # with the events of delay servers

    @property
    def starting(self) -> Where:
        return self.read.starting.common

    @property
    def ending(self) -> Where:
        return self.read.ending.common


def is_pattern(text: str) -> bool:
    return _GLOB.search(text) is not None


def matches(name: str, pattern: str) -> bool:
    """Whether the name of a subject matches; internal subjects match only patterns with a colon."""
    return fnmatch.fnmatchcase(name, pattern) and (":" not in name or ":" in pattern)


def hint(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of an error about an unknown name: a known name like it, or else a sentence."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def items_of(text: str) -> tuple[str, ...]:
    """The items of a list with commas, each once."""
    return tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))


def is_meant(name: str, subjects: tuple[str, ...]) -> bool:
    """Whether the option `subject` means this subject, by its name or by a pattern. `HELD`, where queries keep their
    beginnings, must be named in full."""
    return any((matches(name, each) and name != HELD) if is_pattern(each) else name == each for each in subjects)


def read_options(raw: Mapping[str, str]) -> ReadOptions:
    options = known(raw, READ_OPTIONS)
    subjects = _subjects(options)
    return ReadOptions(
        url=url_of(options),
        subjects=subjects,
        starting=_places(options, "starting", EARLIEST, subjects),
        ending=_places(options, "ending", LATEST, subjects),
        min_partitions=count_of(options, "minPartitions"),
        messages_per_trigger=count_of(options, "maxMessagesPerTrigger"),
        bytes_per_trigger=_size(options, "maxBytesPerTrigger"),
        group=_group(options),
        fail_on_data_loss=flag_of(options, "failOnDataLoss", True),
        include_headers=flag_of(options, "includeHeaders", True),
        keys=_keys(options),
        tags=tuple(each.strip() for each in options.get("tags", "").split(",") if each.strip()),
        patience_s=count_of(options, "patienceSeconds") or PATIENCE_S,
        poll_ms=count_of(options, "pollMs") or POLL_MS,
        has_ending="ending" in options,
        is_replica=_is_replica(options),
    )


def _is_replica(options: Mapping[str, str]) -> bool:
    said = options.get("from", "master")
    if said not in {"master", "replica"}:
        raise Misuse(f"from={said!r}: it is master or replica")
    target = urls.parse_any(url_of(options))
    if said == "replica" and len(target.brokers) == 1:
        raise Misuse(
            f"from=replica: {url_of(options)} is one broker. Name both copies ({urls.SCHEME}HOST:PORT,HOST:PORT) or a "
            f"meta server ({urls.META_SCHEME}HOST:PORT), or leave the option out"
        )
    return said == "replica"


def write_options(raw: Mapping[str, str]) -> WriteOptions:
    options = known(raw, WRITE_OPTIONS)
    subject = options.get("subject") or options.get("path")
    group = _group(options)
    parse = Subject.parse if group is None else Subject.parse_joinable
    return WriteOptions(
        url=url_of(options),
        subject=None if subject is None else named("subject", subject, parse),
        group=group,
        keep_ids=flag_of(options, "keepIds", False),
        write_id=options.get("writeid"),
        patience_s=count_of(options, "patienceSeconds") or PATIENCE_S,
    )


def event_options(raw: Mapping[str, str]) -> EventOptions:
    options = known(raw, EVENT_OPTIONS, "fairway.events")
    raw_groups = options.pop("group", None)
    groups = None
    if raw_groups is not None:
        groups = frozenset(named("group", each, GroupName.parse) for each in items_of(raw_groups))
    query = options.pop("query", None)
    query = None if query is None else named("query", query, GroupName.parse)
    most = count_of(options, "maxEventsPerTrigger")
    has_delayed = flag_of(options, "delayed", False)
    for name in ("maxeventspertrigger", "delayed"):
        options.pop(name, None)
    if not (options.get("subject") or options.get("path")):
        options["subject"] = _EVERYTHING
    read = read_options(options)
    for name, places in (("starting", read.starting), ("ending", read.ending)):
        if places.of or places.common.whence is Whence.SEQUENCE:
            raise Misuse(
                f"option {name}: events of all subjects are read together, so it is earliest, latest or a time"
            )
    if has_delayed and groups is not None:
        raise Misuse("option delayed: what is delayed is no group's yet; leave it out, or the option group")
    return EventOptions(read, groups, most, query, has_delayed)


def known(raw: Mapping[str, str], names: Mapping[str, str], source: str = "fairway") -> dict[str, str]:
    """The options under lower-case names, as Spark compares them. An unknown name is an error, or a typo would go
    unnoticed."""
    options = {name.lower(): value for name, value in raw.items()}
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {names[near[0]]}?" if near else f"there are {', '.join(sorted(names.values()))}"
            raise Misuse(f"format {source} has no option {name!r}: {hint}")
    return options


def url_of(options: Mapping[str, str]) -> str:
    url = options.get("url", DEFAULT_URL)
    urls.parse_any(url)
    return url


def _subjects(options: Mapping[str, str]) -> tuple[str, ...]:
    raw = options.get("subject") or options.get("path")
    if not raw:
        raise Misuse(
            'which subject? Say .option("subject", "orders"), a list "orders,payments", or a pattern "orders.*"'
        )
    subjects = items_of(raw)
    for each in subjects:
        if not is_pattern(each):
            named("subject", each, Subject.parse_any)
    return subjects


def named(option: str, raw: str, parse: object) -> str:
    try:
        return str(parse(raw))  # type: ignore[operator]
    except BadName as error:
        raise Misuse(f"option {option}: {error}") from None


def _group(options: Mapping[str, str]) -> str | None:
    return named("group", options["group"], GroupName.parse) if "group" in options else None


def _keys(options: Mapping[str, str]) -> tuple[str, ...] | None:
    """The keys of a list with commas; keys that contain commas or spaces come as JSON."""
    raw = options.get("keys")
    if raw is None:
        return None
    if not raw.lstrip().startswith("["):
        keys: Any = [each.strip() for each in raw.split(",") if each.strip()]
    else:
        try:
            keys = json.loads(raw)
        except ValueError as error:
            raise Misuse(f'option keys is not JSON ({error}): write ["c-1", "c-2"], or c-1,c-2') from None
    if not keys or not all(isinstance(each, str) for each in keys):
        raise Misuse(f'option keys={raw!r}: name a key or more, such as c-1,c-2, or as JSON ["c-1", "c-2"]')
    return tuple(keys)


def _places(options: Mapping[str, str], name: str, default: Where, subjects: tuple[str, ...]) -> Places:
    raw = options.get(name)
    if raw is None:
        return Places(default, {})
    text = raw.strip()
    if not text.startswith("{"):
        return Places(place_of(name, text), {})
    try:
        said = json.loads(text)
    except ValueError as error:
        raise Misuse(f'option {name} is not JSON ({error}): write {{"orders": 4200, "payments": "latest"}}') from None
    unknown = [each for each in said if each not in subjects and not any(map(is_pattern, subjects))]
    if unknown:
        raise Misuse(f"option {name} names {unknown[0]!r}, which is not among the subjects {', '.join(subjects)}")
    of = {subject: place_of(name, str(place)) for subject, place in said.items() if not isinstance(place, dict)}
    within = {
        subject: {group: place_of(name, str(place)) for group, place in places.items()}
        for subject, places in said.items()
        if isinstance(places, dict)
    }
    return Places(default, of, within)


def options_of(url: str, patience_s: int, subjects: Iterable[str]) -> dict[str, str]:
    """The options that every read of a job gives."""
    return {"url": url, "subject": ",".join(dict.fromkeys(subjects)), "patienceSeconds": str(patience_s)}


def options_of_ranges(url: str, patience_s: int, ranges: Mapping[SubjectPart, tuple[int, int]]) -> dict[str, str]:
    """The options for messages between two sequences of each subject."""
    begins, ends = ({part: each[place] for part, each in ranges.items()} for place in (0, 1))
    told = options_of(url, patience_s, (part.subject for part in ranges))
    return {**told, "starting": explicit(begins), "ending": explicit(ends)}


def explicit(places: Mapping[SubjectPart, int]) -> str:
    """Sequences in the form of the options `starting` and `ending`, each in its broker group."""
    said: dict[str, dict[str, int]] = {}
    for part, sequence in places.items():
        said.setdefault(part.subject, {})[part.broker_group] = sequence
    return json.dumps(said)


def place_of(name: str, text: str) -> Where:
    if text.lower() in {"earliest", "latest"}:
        return EARLIEST if text.lower() == "earliest" else LATEST
    if text.isascii() and text.isdigit():
        return Where(Whence.SEQUENCE, int(text))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Misuse(
            f"option {name}={text!r}: say earliest, latest, a time such as 2026-01-31T08:00:00Z, a sequence, "
            'or one for each subject as JSON, {"orders": 4200}'
        ) from None
    if moment.tzinfo is None:
        raise Misuse(f"option {name}={text!r} says no time zone: write {text}Z for UTC")
    return Where(Whence.TIME, max(0, round(moment.timestamp() * 1_000)))


def count_of(options: Mapping[str, str], name: str) -> int | None:
    """A whole number from 1 up; None: the option is not given."""
    raw = options.get(name.lower())
    if raw is None:
        return None
    if not (raw.isascii() and raw.isdigit() and int(raw) > 0):
        raise Misuse(f"option {name}={raw!r}: it is a whole number from 1 up")
    return int(raw)


def _size(options: Mapping[str, str], name: str) -> int | None:
    raw = options.get(name.lower())
    if raw is None:
        return None
    found = re.fullmatch(r"(\d+)([kmg]?)b?", raw.strip().lower(), re.ASCII)
    if found is None or not int(found[1]):
        raise Misuse(f"option {name}={raw!r}: it is a number of bytes, such as 67108864 or 64m")
    return int(found[1]) * _SIZES[found[2]]


def flag_of(options: Mapping[str, str], name: str, default: bool) -> bool:
    raw = options.get(name.lower())
    if raw is None:
        return default
    if raw.lower() not in {"true", "false"}:
        raise Misuse(f"option {name}={raw!r}: it is true or false")
    return raw.lower() == "true"
