"""Writes the pages of docs/reference that say what the code says: `python -m docs.reference`.

commands.md        every verb of `fairway`, with its arguments and options
configuration.md   its table of settings; the text around the table is written by hand
metrics.md         every figure of /metrics, asked of a small cluster that the script starts for a moment
errors.md          every error and every code, with a remedy; an error without a remedy here ends the script
api/*.md           the names that `fairway` and its public packages export

A page names this script in a comment. A test writes all of them again and compares the files.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from typer.core import TyperArgument
from typer.main import get_command

import fairway
from docs import api
from docs.pages import NOTE, cell, joined, table
from fairway import errors
from fairway.__main__ import app
from fairway.cli.settings import FILE_VARIABLE, SETTINGS
from fairway.runtime.host import free_port
from fairway.runtime.process import Child

FOLDER = Path(__file__).parent / "reference"
START_S = 120.0


# --- commands ---------------------------------------------------------------------------------------------------------

COMMANDS = """[The command line](cli.md) shows how the verbs are used, and has the exit statuses. This page has
every verb with its arguments and options. `fairway VERB --help` says the same.

## Options of most verbs

A line *Also* names those of them that a verb has. [Configuration](configuration.md) says which value counts when there
are several."""

COMMON = ("json", "url", "patience_s", "config")  # of nearly every verb: said once, at the beginning
JOBS = ("archive", "replay", "trace", "repetition", "report", "reconcile")


def commands() -> str:
    root = get_command(app)
    verbs = list(walked(root, ("fairway",)))
    common: dict[str, Any] = {}
    for each in (each for _, verb in verbs for each in verb.params if each.name in COMMON):
        common.setdefault(each.name, each)
    parts = [
        NOTE,
        "# Commands and options",
        COMMANDS,
        options([common[name] for name in COMMON]),
    ]
    for path, verb in verbs:
        parts += described(path, verb)
    return joined(parts)


def walked(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb below a command, a group that works without a verb included."""
    nested = getattr(command, "commands", {})
    if not nested or getattr(command, "invoke_without_command", False):
        yield path, command
    for name, each in nested.items():
        if path == ("fairway", "pipeline"):
            yield (*path, name), job(name)
        else:
            yield from walked(each, (*path, name))


def job(name: str) -> Any:
    """The command of a job on Spark, which has options of its own."""
    from fairway.spark.jobs.job import as_app

    return get_command(as_app(importlib.import_module(f"fairway.spark.jobs.{name}").command, name))


def described(path: tuple[str, ...], verb: Any) -> list[str]:
    arguments = [each for each in verb.params if isinstance(each, TyperArgument)]
    own = [each for each in verb.params if not isinstance(each, TyperArgument) and each.name not in (*COMMON, "help")]
    usage = " ".join([*path, *(["[OPTIONS]"] if own else []), *map(shown_argument, arguments)])
    parts = [f"## {' '.join(path)}", textwrap.indent(usage, "    "), inspect.cleandoc(verb.help or "")]
    if arguments:
        rows = [(f"`{shown_argument(each)}`", cell(getattr(each, "help", "") or "")) for each in arguments]
        parts.append(table("argument", "what it is", rows=rows))
    if own:
        parts.append(options(own))
    also = [f"`--{each.name.replace('_', '-')}`" for each in verb.params if each.name in COMMON]
    return [*parts, f"*Also:* {', '.join(also)}."] if also else parts


def shown_argument(argument: Any) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return f"{name if argument.required else f'[{name}]'}{'...' if argument.nargs == -1 else ''}"


def options(found: list[Any]) -> str:
    rows = []
    for each in found:
        names = ", ".join(f"`{name}`" for name in (*each.opts, *each.secondary_opts))
        value = "" if getattr(each, "is_flag", False) else f" `{cell(value_of(each))}`"
        rows.append((names + value, cell(getattr(each, "help", "") or "") + default_of(each)))
    return table("option", "what it does", rows=rows)


def value_of(option: Any) -> str:
    kind = option.type_descriptor.annotation
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return " or ".join(str(each.value) for each in kind)
    return option.metavar or getattr(kind, "__name__", "VALUE").upper()


def default_of(option: Any) -> str:
    """What counts when the option is not given, unless the help says so."""
    default = option.default
    if default in (None, False, (), "") or callable(default) or not getattr(option, "show_default", False):
        return ""
    shown = option.opts[0] if default is True else getattr(default, "value", default)
    return f" Default: `{shown}`."


# --- settings ---------------------------------------------------------------------------------------------------------


def configuration() -> str:
    """The page as it is, with the table of today."""
    text = (FOLDER / "configuration.md").read_text(encoding="utf-8")
    before, rest = text.split("<!-- settings: written by docs/reference.py -->\n", 1)
    after = rest.split("<!-- end of settings -->\n", 1)[1]
    rows = [
        (f"`{each.name}`", f"`{each.flag}`", f"`{each.variable}`", each.shown_default, each.description)
        for each in SETTINGS.values()
    ]
    rows.append(
        ("", "`--config`", f"`{FILE_VARIABLE}`", "fairway.toml", "The file of settings; never in the file itself.")
    )
    shown = table("setting", "flag", "variable", "default", "what it is", rows=rows)
    marked = f"<!-- settings: written by docs/reference.py -->\n{shown}\n<!-- end of settings -->\n"
    return before + marked + after


# --- metrics ----------------------------------------------------------------------------------------------------------

METRICS = """A server with `--http-port` shows its figures at `/metrics`, in the text format of Prometheus.
[What to watch](../how-to/operations.md#what-to-watch) says which of them mean trouble, and what to do then. A counter
begins at 0 with its process.

*On* names the servers that show a figure: `broker` is every broker, and `delay` every delay server. `fairway up` is
both in one process. Figures of copies and replicas are those of a server that is one copy of several."""

HELP = re.compile(r"# HELP (\S+) (.*)")
TYPE = re.compile(r"# TYPE (\S+) (\S+)")
SAMPLE = re.compile(r"(fairway_\w+?)(?:_bucket|_sum|_count)?(?:\{(?P<labels>.*)\})? \S+")


@dataclass
class Metric:
    """One family of /metrics."""

    name: str
    kind: str = ""
    about: str = ""
    labels: list[str] = field(default_factory=list)  # as far as the small cluster shows them
    servers: list[str] = field(default_factory=list)


RARE_LABELS = {"fairway_delay_refusals_total": ["target", "code"]}  # shown after the first refusal


def metrics() -> str:
    found: dict[str, Metric] = {}
    for server, text in pages():
        read(server, text, found)
    for name, labels in RARE_LABELS.items():
        found[name].labels = labels
    rows = [
        (
            f"`{each.name}`",
            each.kind,
            ", ".join(f"`{label}`" for label in each.labels),
            ", ".join(each.servers),
            cell(each.about),
        )
        for each in sorted(found.values(), key=lambda each: each.name)
    ]
    parts = [
        NOTE,
        "# Metrics",
        METRICS,
        table("figure", "kind", "labels", "on", "what it is", rows=rows),
    ]
    return joined(parts)


def read(server: str, text: str, into: dict[str, Metric]) -> None:
    """Add the families of one page."""
    for line in text.splitlines():
        if about := HELP.fullmatch(line):
            metric = into.setdefault(about[1], Metric(about[1]))
            metric.about = about[2]
            metric.servers += [server] if server not in metric.servers else []
        elif kind := TYPE.fullmatch(line):
            into[kind[1]].kind = kind[2]
        elif (sample := SAMPLE.fullmatch(line)) and sample["labels"]:
            family = into.get(sample[1]) or into[line.split("{")[0]]
            names = [each for each in re.findall(r'(\w+)="', sample["labels"]) if each != "le"]
            family.labels += [each for each in names if each not in family.labels]


def pages() -> list[tuple[str, str]]:
    """What /metrics of each kind of server says, in a cluster of two copies with a consumer group and a refusal."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:

        def started(*words: str) -> tuple[str, str]:
            http = free_port()
            arguments = (*words, "--port", "0", "--http-port", str(http))
            errors_to = Path(directory) / f"{words[0]}.err"
            child = stack.enter_context(Child("fairway", *arguments, errors_to=errors_to))
            ready = child.line(timeout_s=START_S)
            if ready is None:
                raise RuntimeError(f"{' '.join(words)}: {errors_to.read_text(encoding='utf-8')}")
            own = re.search(r"(?:\w+://)?127\.0\.0\.1:\d+", ready)
            return own[0] if own else "", f"http://127.0.0.1:{http}"

        meta, meta_http = started("meta", "--registry", f"sqlite:{directory}/registry")
        copy = ("broker", "--group", "east", "--registry", meta, "--data")
        _, broker_http = started(*copy, f"{directory}/a")
        started(*copy, f"{directory}/b")
        _, delay_http = started("delay", "serve", "--group", "d1", "--registry", meta, "--data", f"{directory}/d")
        with fairway.connect(meta, patience=START_S) as client:
            client.send("order.changed", b"1").result(START_S)
            with client.consumer("order.changed", group="billing") as consumer:
                message = consumer.poll(timeout=START_S)
                if message is not None:
                    message.ack()
            client.send("order.changed", b"2", after=0.5).result(START_S)
            with suppress(fairway.Refused):  # a refusal shows the labels of refusals
                client.seek("order.changed", "nobody", "latest")
            shown = ("fairway_replica_lag_bytes{", "fairway_group_lag{", "fairway_refusals_total{")
            return [
                ("broker", asked(broker_http, *shown)),
                ("delay", asked(delay_http, "fairway_delay_intents{")),
                ("meta", asked(meta_http)),
            ]


def asked(http: str, *wanted: str) -> str:
    """The page, as soon as it shows what is wanted."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        with urllib.request.urlopen(f"{http}/metrics", timeout=START_S) as answer:  # noqa: S310  on loopback
            page = str(answer.read().decode())
        if all(each in page for each in wanted):
            return page
        time.sleep(0.1)
    raise RuntimeError(f"{http}/metrics does not show {', '.join(wanted)}")


# --- errors -----------------------------------------------------------------------------------------------------------

ERRORS = """Every error that Fairway raises on purpose is a `fairway.FairwayError`. Its text says what happened, and
often what to do. [When sending fails](clients.md#when-sending-fails) shows what a producer may get.
[What to do about each error](../how-to/operations.md#what-to-do-about-each-error) is about the sentences of servers."""

REMEDIES = {
    "FairwayError": "Catch it where any of them means the same to you.",
    "RemoteProtocolError": "Upgrade the older side. If both are of one version, report a bug with the sentence.",
    "Misuse": "Mend the program. The sentence names the argument and what is allowed.",
    "BadName": "Choose another name: letters, digits, and the signs that the sentence lists.",
    "InvariantViolated": "Report a bug with the traceback. Start the process again: nothing that was answered is lost.",
    "Refused": "Look at `code`, in the table below.",
    "Unreachable": "See that the server runs and the address is right. `patience=` waits for a server that starts.",
    "NotSent": "Send again when you like: that makes no duplicate.",
    "OutcomeUnknown": "Send again if a duplicate does no harm, or look first (`fairway tail`).",
    "BufferFull": "Slow down, drop the message, or give the producer a larger buffer or a spool.",
    "CircuitOpen": "Answer your own caller at once, and try later.",
    "Deposed": "Let it pass: the transaction rolls back, and the career hands over.",
    "CannotListen": "Stop the other program, or choose another port (`--port 0`: any free one).",
    "StorageFault": "The server stops. Check the device, then start again: recovery sorts it out.",
    "DiskFull": "Make room, or shorten the retention. Acks go on in reserved room.",
    "NoSuchFile": "Check the path. If a file of a data directory is gone, `fairway verify` says what is lost.",
    "DirectoryLocked": "Stop the process that the sentence names; its lock ends with it.",
    "DirectoryMoved": "Put the directory back, or name its new place; then start again.",
    "ReadOnlyDisk": "Remount the file system, or give this user the right to write.",
    "WrongDirectory": "Name another directory, or use the version that the sentence names. Nothing was touched.",
}

CLIENT_WAITS = "The client waits and repeats the request. "
NEW_STREAM = "The client begins a new stream. A message that may be stored without a receipt raises `OutcomeUnknown`."
CODE_REMEDIES = {
    "BUSY": CLIENT_WAITS + "If it lasts, see `fairway_refusals_total` and the sentence for the bound.",
    "READ_ONLY": CLIENT_WAITS + "If it lasts, make room on the disk, or `fairway subject read-only SUBJECT --off`.",
    "TOO_LARGE": "Split the message, or keep its body elsewhere and send where it is.",
    "BAD_NAME": "Choose another name.",
    "NOT_MASTER": CLIENT_WAITS + "It finds the master by itself.",
    "SEQUENCE_CONFLICT": "Connect again. The cause is memory copied by a snapshot of a virtual machine, or a bug.",
    "SEQUENCE_GAP": NEW_STREAM,
    "UNKNOWN_PRODUCER": NEW_STREAM,
    "FOREIGN_STREAM": NEW_STREAM,
    "BAD_REQUEST": "Mend the request; the sentence says which value.",
    "UNSUPPORTED": "Upgrade the server, or do without the feature.",
    "NO_SUCH_SUBJECT": "Check the name (`fairway subjects`), or send the first message.",
    "NO_SUCH_GROUP": "Check the name (`fairway groups`), or start a consumer of the group.",
    "NOT_A_MEMBER": "The client joins again. What the consumer held goes to others.",
    "STALE_CONFIG": "Read the group's configuration (`fairway configure SUBJECT GROUP`), then decide.",
    "FENCED": "Stop one of the two processes that have the same consumer id.",
    "EXPIRED": CLIENT_WAITS,
    "DAMAGED": "A consumer waits, and pulls again. See `fairway verify`; take the messages from a copy or an archive.",
    "DRAINING": CLIENT_WAITS + "It connects again, or elsewhere.",
    "TOO_MANY_CONNECTIONS": CLIENT_WAITS + "If it lasts, close idle clients, or raise the limit of descriptors.",
    "PROTOCOL_ERROR": "Upgrade the older side. If both are of one version, report a bug with the sentence.",
    "OTHER": "Read the sentence. Upgrade the client: the server is newer.",
}


def error_types() -> list[type[Exception]]:
    found = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, errors.FairwayError)]
    return [each for each in found if each.__module__ == errors.__name__]


def error_page() -> str:
    rows = [
        (
            f"`{each.__name__}`" + ("" if each.__name__ in fairway.__all__ else " (servers and tools)"),
            f"`{each.__bases__[0].__name__}`",
            cell(inspect.getdoc(each) or ""),
            REMEDIES[each.__name__],
        )
        for each in error_types()
    ]
    told = api.documented(errors.Code)
    codes = [(f"`{each.name}`", cell(told[each.name]), CODE_REMEDIES[each.name].strip()) for each in errors.Code]
    parts = [
        NOTE,
        "# Errors and remedies",
        ERRORS,
        "## Exceptions",
        table("error", "kind of", "what it means", "what to do", rows=rows),
        "## Codes",
        "`Refused.code` says why a request was refused. In every case nothing was appended and nothing changed.",
        table("code", "what it means", "what to do", rows=codes),
    ]
    return joined(parts)


# --- all of it --------------------------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "configuration.md": configuration,
    "errors.md": error_page,
    "metrics.md": metrics,
    "api/README.md": api.package_map,
    **{f"api/{name}.md": partial(api.package_page, name) for name in api.PACKAGES},
}


def main() -> None:
    (FOLDER / "api").mkdir(exist_ok=True)
    for name, write in PAGES.items():
        (FOLDER / name).write_text(write(), encoding="utf-8")


if __name__ == "__main__":
    main()
