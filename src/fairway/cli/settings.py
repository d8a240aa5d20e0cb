"""Settings: flags, environment variables, the keys of `fairway.toml`, and how they are resolved.

All come from the fields of `CliOptions`. A field `port` is `--port` on the command line, `FAIRWAY_PORT` in the
environment and `port = ...` in the file. To add a setting, add a field with its description, use the field, and add its
row to docs/reference/configuration.md (a test compares them).

`resolve` takes the first that has a value: a flag, the environment, the file, the default. It remembers the origin of
each setting, which `fairway config show` prints. `server_flags` and `gathered` give verbs the options of settings.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from msgspec import Meta

from fairway import limits
from fairway.cli import output
from fairway.cli.arguments import AsJson
from fairway.errors import Misuse
from fairway.redaction import without_password
from fairway.runtime import host, terminal

ENVIRONMENT_PREFIX = "FAIRWAY_"
_KEEP_HOURS_MAX = 876_600  # a century; the least is 3.6 s: ages are kept in milliseconds, and 0 is for ever
_GIB_MAX = 1_048_576  # a pebibyte
_HORIZON_DAYS_MAX = 36_525  # a century


class DurabilityChoice(enum.Enum):
    """As `fairway.storage` has it; a help text need not import the storage."""

    SYNC = "sync"
    MEMORY = "memory"


class OnOff(enum.Enum):
    ON = "on"
    OFF = "off"


class CliOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. The description of a field is its help text and its documentation."""

    # --- commands that speak to a broker
    url: Annotated[
        str,
        Meta(
            description="The server to connect to: fairway://HOST:PORT[,HOST:PORT] of a broker, meta://HOST:PORT of a "
            "cluster. Append ?delay=HOST:PORT for a separate delay server."
        ),
    ] = "fairway://127.0.0.1:20880"
    patience_s: Annotated[float, Meta(ge=0, description="How long to wait for a server that does not answer yet.")] = (
        0.0
    )

    # --- commands that run a broker
    data: Annotated[str | None, Meta(description="The data directory; created if it is missing.")] = None
    host: Annotated[str, Meta(description="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="The port to listen on; 0: any free port.")] = 20880
    http_port: Annotated[
        Annotated[int, Meta(ge=0, le=65_535)] | None,
        Meta(description="Serve /metrics, /livez and /readyz on this port; 0: any free port. Unset: not at all."),
    ] = None
    allow_remote: Annotated[
        bool,
        Meta(description="Listen on an address that other machines can reach, although there is no authentication."),
    ] = False
    durability: Annotated[
        DurabilityChoice,
        Meta(
            description="When the broker confirms a message or an ack. sync: when it survives a power cut. memory: "
            "when it survives a crash of the process; a power cut may lose the last 100 ms."
        ),
    ] = DurabilityChoice.SYNC
    memory_mib: Annotated[
        int,
        Meta(
            ge=1,
            description="The memory limit of a server. --buffer-mib and --pending-max are parts of it; the rest is for "
            "groups, dedupe windows, names and connections. The server refuses a sum that does not fit.",
        ),
    ] = limits.MEMORY_MIB
    buffer_mib: Annotated[
        int,
        Meta(
            ge=66,
            description="The memory limit of each buffer: incomplete frames, waiting requests, and answers that "
            "clients have not read.",
        ),
    ] = 128
    keep_hours: Annotated[
        Annotated[float, Meta(ge=0.001, le=_KEEP_HOURS_MAX)] | Literal["forever"] | None,
        Meta(
            description="Delete older messages that no group still needs, and their history; forever: delete nothing. "
            "The data directory records the value; unset: the recorded value, 168 in a new directory."
        ),
    ] = None
    keep_gib: Annotated[
        Annotated[float, Meta(gt=0, le=_GIB_MAX)] | None,
        Meta(description="Delete the oldest messages beyond this size that no group still needs; unset: no limit."),
    ] = None
    keep_owed_gib: Annotated[
        Annotated[float, Meta(gt=0, le=_GIB_MAX)] | None,
        Meta(
            description="Beyond this size delete even messages that a group still needs, and count them as lost; "
            "unset: never."
        ),
    ] = None
    low_water_mib: Annotated[
        int, Meta(ge=64, description="With less free disk space than this, take only acks and no messages.")
    ] = 128
    horizon_days: Annotated[
        Annotated[float, Meta(gt=0, le=_HORIZON_DAYS_MAX)],
        Meta(description="How far ahead a delayed message may be due."),
    ] = 731.0
    pending_max: Annotated[
        int,
        Meta(ge=1, description="The most delayed messages that may be pending; each takes 61 bytes of memory."),
    ] = 15_000_000
    log_data: Annotated[
        str | None,
        Meta(
            description="A directory for the log of new delayed messages, such as one on a small fast disk; unset: in "
            "the data directory."
        ),
    ] = None
    broker: Annotated[
        str | None,
        Meta(
            description="Where a separate delay server sends due messages: HOST:PORT[,HOST:PORT] of a broker group. "
            "Several groups need names, and spaces between them: NAME=HOST:PORT NAME=HOST:PORT."
        ),
    ] = None

    # --- servers of a cluster
    registry: Annotated[
        str | None,
        Meta(
            description="The registry of a cluster: zookeeper://HOST:PORT[,HOST:PORT], meta://HOST:PORT of a meta "
            "server that keeps the registry, or sqlite:DIR for that meta server itself."
        ),
    ] = None
    session_ms: Annotated[
        int,
        Meta(ge=500, description="The others take a server for dead after this time without a heartbeat."),
    ] = 6_000
    group: Annotated[
        str | None,
        Meta(description="The server group that this server is a copy of; needs --registry. Unset: a single server."),
    ] = None
    advertise: Annotated[
        str | None,
        Meta(description="HOST:PORT where others reach this server; unset: where the server listens."),
    ] = None
    min_in_sync: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="With fewer copies in sync than this, a group takes only acks and no messages; unset: the "
            "value of the group, 1 for a new one."
        ),
    ] = None
    create_subjects: Annotated[
        OnOff,
        Meta(
            description="Whether a meta server creates subjects on first use; off: only `fairway subject create` does."
        ),
    ] = OnOff.ON
    spread: Annotated[
        int,
        Meta(
            ge=1,
            description="How many broker groups a meta server assigns to a new subject; it takes the least loaded.",
        ),
    ] = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of `CliOptions`, with all its names."""

    name: str
    type: Any
    default: Any
    description: str

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"{ENVIRONMENT_PREFIX}{self.name.upper()}"

    @property
    def shown_default(self) -> str:
        return shown(self.default)


def shown(value: object) -> str:
    """A value as a user writes it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value.value) if isinstance(value, enum.Enum) else without_password(str(value))


def _description(hint: Any) -> str:
    found = [each.description for each in getattr(hint, "__metadata__", ()) if isinstance(each, Meta)]
    return next((each for each in found if each), "")


SETTINGS: dict[str, Setting] = {
    field.name: Setting(field.name, field.type, field.default, _description(field.type))
    for field in msgspec.structs.fields(CliOptions)
}


def flag(name: str, metavar: str | None = None, default: object = None) -> Any:
    """The option of a command for a setting. Its value is None unless it is given: see `settings.resolve`. `default`:
    what the command takes instead of the setting's own default."""
    setting = SETTINGS[name]
    words = f"{setting.description} ({setting.variable}; {default or setting.shown_default})"
    return typer.Option(setting.flag, metavar=metavar, help=words, show_default=False)


def gathered(
    into: str, options: Mapping[str, Any], gather: Callable[..., object]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a verb more options, by name and annotation, behind those of its own.

    An option that is not given is None, or False where it is a switch. The verb gets what `gather` makes of all of
    them, as its keyword argument `into`.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def run(**given: Any) -> None:
            collected = gather(**{name: given.pop(name) for name in options})
            verb(**given, **{into: collected})

        signature = inspect.signature(verb, eval_str=True)
        parameters = [each for each in signature.parameters.values() if each.name != into]
        for name, annotation in options.items():
            default = False if typing.get_args(annotation)[0] is bool else None
            parameters.append(inspect.Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
        run.__dict__["__signature__"] = signature.replace(parameters=parameters)
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


FILE_NAME = "fairway.toml"
FILE_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
DEFAULT = "default"

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help=f"Settings in TOML ({FILE_VARIABLE}; {FILE_NAME} in the current directory, if there is one).",
        show_default=False,
    ),
]


# What stands for the value of a flag; the values of the others are a choice.
_METAVARS = {
    "url": "URL",
    "registry": "URL",
    "host": "HOST",
    "broker": "HOST:PORT",
    "advertise": "HOST:PORT",
    "group": "NAME",
    **dict.fromkeys(("port", "http_port", "pending_max", "min_in_sync", "spread"), "N"),
    "patience_s": "SECONDS",
    "session_ms": "MS",
    "keep_hours": "HOURS",
    "horizon_days": "DAYS",
    **dict.fromkeys(("keep_gib", "keep_owed_gib"), "GIB"),
    **dict.fromkeys(("memory_mib", "buffer_mib", "low_water_mib"), "MIB"),
    **dict.fromkeys(("data", "log_data"), "DIR"),
}
_TYPES = {**typing.get_type_hints(CliOptions), "keep_hours": str}
_annotated: Any = Annotated
_FLAGS: dict[str, Any] = {name: _annotated[_TYPES[name] | None, flag(name, _METAVARS.get(name))] for name in SETTINGS}
Url = _FLAGS["url"]
Patience = _FLAGS["patience_s"]
Data = _FLAGS["data"]
RegistryUrl = _FLAGS["registry"]
ServerFlags = dict[str, Any]

# Hidden in the help of a verb, whose other lines it would leave too narrow for the names of variables.
_DenyRemote = Annotated[
    bool, typer.Option("--no-allow-remote", hidden=True, help="Do not, whatever FAIRWAY_ALLOW_REMOTE or the file says.")
]


def _given(*, no_allow_remote: bool = False, **flags: Any) -> ServerFlags:
    return {**flags, "allow_remote": False} if no_allow_remote else flags


def server_flags(*names: str, **others: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for a verb that runs a server: it takes these settings as options, and --config.

    The verb gets them as `flags`, for `resolve(**flags)`. `others`: annotations instead of the usual ones.
    """
    options = {name: others.get(name, _FLAGS[name]) for name in names}
    return gathered("flags", {**options, "no_allow_remote": _DenyRemote, "config": ConfigFile}, _given)


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved options, and the origin of each."""

    options: CliOptions
    origins: dict[str, str]
    file: Path | None
    strangers: tuple[str, ...]  # variables with the prefix that are no settings


def resolve(config: Path | None, **flags: object) -> Settings:
    """Resolve all settings; a flag that is None was not given. `Misuse` names the setting, its origin and the fault."""
    variables = host.environment()
    path = _file(config, variables)
    in_file = {} if path is None else _read(path)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS.values():
        raw, origin, is_text = _find(setting, flags, variables, in_file, path)
        origins[setting.name] = origin
        values[setting.name] = raw if origin == DEFAULT else _converted(setting, raw, origin, is_text=is_text)
    ours = {setting.variable for setting in SETTINGS.values()} | {FILE_VARIABLE}
    strangers = sorted(name for name in variables if name.startswith(ENVIRONMENT_PREFIX) and name not in ours)
    return Settings(CliOptions(**values), origins, path, tuple(strangers))


def _find(
    setting: Setting, flags: Mapping[str, object], variables: Mapping[str, str], in_file: Mapping[str, object],
    path: Path | None,
) -> tuple[object, str, bool]:  # fmt: skip
    """The first value, its origin, and whether it is text to convert."""
    if flags.get(setting.name) is not None:
        return flags[setting.name], f"flag {setting.flag}", isinstance(flags[setting.name], str)
    if variables.get(setting.variable):
        return variables[setting.variable], f"environment {setting.variable}", True
    if setting.name in in_file:
        return in_file[setting.name], f"file {path}", False
    return setting.default, DEFAULT, False


def _converted(setting: Setting, raw: object, origin: str, *, is_text: bool) -> object:
    try:
        return msgspec.convert(raw, type=setting.type, strict=not is_text)
    except msgspec.ValidationError as error:
        raise Misuse(f"{setting.name} from {origin}: {error}; the value is {_without_password(raw)!r}") from error


def _without_password(value: object) -> object:
    return without_password(value) if type(value) is str else value


def _file(config: Path | None, variables: Mapping[str, str]) -> Path | None:
    """The file to read; a file that the user names must exist."""
    if config is None and variables.get(FILE_VARIABLE):
        config = Path(variables[FILE_VARIABLE])
    if config is None:
        return Path(FILE_NAME) if Path(FILE_NAME).is_file() else None
    if not config.is_file():
        raise Misuse(f"there is no file {config}: check --config and {FILE_VARIABLE}")
    return config


def _read(path: Path) -> dict[str, object]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise Misuse(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise Misuse(f"{path} cannot be read: its values are nested too deeply") from error
    for key in found:
        if key not in SETTINGS:
            near = difflib.get_close_matches(key.replace("-", "_"), SETTINGS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SETTINGS)}"
            raise Misuse(f"{path}: there is no setting {key!r}; {hint}")
    return found


app = typer.Typer(no_args_is_help=True, help="Settings: their values and origins.")


@app.callback()
def _root() -> None:
    """Settings: their values and origins."""


@app.command()
def show(config: ConfigFile = None, json: AsJson = False) -> None:
    """Show every setting, its value, and where the value came from.

    Order: flag, environment, file, default; the first that has a value counts.
    """
    with output.failures("config show"):
        settings = resolve(config)
    if json:
        values = {
            name: {"value": _without_password(getattr(settings.options, name)), "from": origin}
            for name, origin in settings.origins.items()
        }
        file = None if settings.file is None else str(settings.file)
        output.write_json({"file": file, "settings": values, "unknown_variables": list(settings.strangers)})
        return
    table = output.table("settings", "setting", "value", "from", "flag", "variable")
    rows = [
        (name, shown(getattr(settings.options, name)), origin, SETTINGS[name].flag, SETTINGS[name].variable)
        for name, origin in settings.origins.items()
    ]
    output.fill(table, rows)
    terminal.console().print(table)
    for name in settings.strangers:
        terminal.say(f"{name} is set, but Fairway has no such setting", err=True)
