"""Everything that can be set, in one class: flags, environment variables, the keys of `fairway.toml` and
docs/configuration.md all come from it.

A field `port` is `--port` on the command line, `FAIRWAY_PORT` in the environment and `port = ...` in the file. To add
one, add a field here with its description, use it, and add its row to docs/configuration.md (a test compares them).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import typer
from msgspec import Meta

from fairway.redaction import without_password

ENVIRONMENT_PREFIX = "FAIRWAY_"
_KEEP_HOURS_MAX = 876_600  # a century; and 0.001 is 3.6 seconds: ages are recorded in milliseconds, and 0 is for ever
_GIB_MAX = 1_048_576  # a pebibyte
_HORIZON_DAYS_MAX = 36_525  # a century


class DurabilityChoice(enum.Enum):
    """`fairway.storage` has the same; it is not imported for the sake of a help text."""

    SYNC = "sync"
    MEMORY = "memory"


class OnOff(enum.Enum):
    ON = "on"
    OFF = "off"


class CliOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may set. The description of a field is its help text and its documentation."""

    # --- commands that speak to a broker
    url: Annotated[
        str,
        Meta(
            description="The broker to speak to: fairway://HOST:PORT, several with commas between them; "
            "?delay=HOST:PORT behind it for a delay server that is elsewhere."
        ),
    ] = "fairway://127.0.0.1:20880"
    patience_s: Annotated[
        float, Meta(ge=0, description="How many seconds to wait for a broker that does not answer yet.")
    ] = 0.0

    # --- commands that run a broker
    data: Annotated[str | None, Meta(description="The data directory; made where it is missing.")] = None
    host: Annotated[str, Meta(description="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="The port to listen on; 0: any that is free.")] = 20880
    http_port: Annotated[
        Annotated[int, Meta(ge=0, le=65_535)] | None,
        Meta(description="Serve /metrics, /livez and /readyz there, too; 0: any that is free."),
    ] = None
    allow_remote: Annotated[
        bool, Meta(description="Listen where others can connect, although nobody is asked who they are.")
    ] = False
    durability: Annotated[
        DurabilityChoice,
        Meta(
            description="When a message or an ack is answered. sync: when it survives a power cut. memory: when it "
            "survives the death of the process; it is synced ten times a second, and a power cut takes what was not."
        ),
    ] = DurabilityChoice.SYNC
    memory_mib: Annotated[
        int,
        Meta(
            ge=1,
            description="The most memory that a server may take. --buffer-mib and --pending-max are parts of it; what "
            "is left is for groups, dedupe windows, names and connections. A sum that does not fit is refused.",
        ),
    ] = 4_096
    buffer_mib: Annotated[
        int,
        Meta(
            ge=66,
            description="Memory for parts of frames, for requests that wait, and for answers that clients do not read: "
            "for each.",
        ),
    ] = 128
    keep_hours: Annotated[
        Annotated[float, Meta(ge=0.001, le=_KEEP_HOURS_MAX)] | Literal["forever"] | None,
        Meta(
            description="Delete messages that are older, once no group owes them, and what happened to them; forever: "
            "delete nothing. Recorded in the data directory; unset: as recorded there, 168 in a new one."
        ),
    ] = None
    keep_gib: Annotated[
        Annotated[float, Meta(gt=0, le=_GIB_MAX)] | None,
        Meta(description="Delete the oldest messages beyond this size, once no group owes them; unset: no bound."),
    ] = None
    keep_owed_gib: Annotated[
        Annotated[float, Meta(gt=0, le=_GIB_MAX)] | None,
        Meta(description="Beyond this size delete even what a group still owes, and count it as lost; unset: never."),
    ] = None
    low_water_mib: Annotated[
        int, Meta(ge=64, description="With less room than this on the disk no messages are taken, only acks.")
    ] = 128
    horizon_days: Annotated[
        Annotated[float, Meta(gt=0, le=_HORIZON_DAYS_MAX)],
        Meta(description="How far ahead a delayed message may be due."),
    ] = 731.0
    pending_max: Annotated[
        int,
        Meta(ge=1, description="How many delayed messages may be pending; each takes 61 bytes of memory."),
    ] = 15_000_000
    log_data: Annotated[
        str | None,
        Meta(
            description="A directory for what was scheduled and is not yet in its bucket, such as one on a small fast "
            "disk; unset: with the rest of the delayed messages."
        ),
    ] = None
    broker: Annotated[
        str | None,
        Meta(
            description="Where a delay server of its own sends what is due: HOST:PORT[,HOST:PORT] of a broker group. "
            "Several groups have names, and spaces between them: NAME=HOST:PORT NAME=HOST:PORT."
        ),
    ] = None

    # --- servers of a cluster
    registry: Annotated[
        str | None,
        Meta(
            description="Where servers of a cluster find one another: zookeeper://HOST:PORT[,HOST:PORT], "
            "meta://HOST:PORT of a meta server that keeps it, or sqlite:DIR for that meta server itself."
        ),
    ] = None
    session_ms: Annotated[
        int,
        Meta(ge=500, description="After so long without a word from a server the others take it for dead."),
    ] = 6_000
    group: Annotated[
        str | None,
        Meta(description="The group that this server is a copy of; it needs a registry. Unset: it stands alone."),
    ] = None
    advertise: Annotated[
        str | None,
        Meta(description="HOST:PORT where others reach this server; unset: where it listens."),
    ] = None
    min_in_sync: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="With fewer copies than this in sync a group takes no messages, only acks; unset: as the group "
            "has it, and 1 for a new one."
        ),
    ] = None
    create_subjects: Annotated[
        OnOff,
        Meta(description="Whether a meta server makes subjects on first use; off: only by `fairway subject create`."),
    ] = OnOff.ON
    spread: Annotated[
        int, Meta(ge=1, description="How many broker groups a meta server gives a new subject, the least loaded ones.")
    ] = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `CliOptions`, under all its names."""

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
    """A value as people write it."""
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
    names = [f"{setting.flag}/--no-{setting.flag[2:]}"] if setting.default is False else [setting.flag]
    words = f"{setting.description} ({setting.variable}; {default or setting.shown_default})"
    return typer.Option(*names, metavar=metavar, help=words, show_default=False)
