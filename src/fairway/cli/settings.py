"""Where a setting comes from: a flag, else the environment, else `fairway.toml`, else the default.

The first of these that has a value is taken, setting by setting, and which one it was is remembered: `fairway config
show` says it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fairway.cli.options import ENVIRONMENT_PREFIX, SETTINGS, CliOptions, Setting
from fairway.errors import Misuse
from fairway.redaction import without_password
from fairway.world import host

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


@dataclass(frozen=True, slots=True)
class Settings:
    """The options in force, and where each came from."""

    options: CliOptions
    origins: dict[str, str]
    file: Path | None
    strangers: tuple[str, ...]  # variables that look like ours and are not


def resolve(config: Path | None, **flags: object) -> Settings:
    """Flags that are None were not given. `Misuse` names the setting, where it was found, and what is wrong."""
    variables = host.environment()
    path = _file(config, variables)
    in_file = {} if path is None else _read(path)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS.values():
        raw, origin, is_text = _find(setting, flags, variables, in_file, path)
        origins[setting.name] = origin
        values[setting.name] = raw if origin == DEFAULT else _converted(setting, raw, origin, is_text=is_text)
    return Settings(CliOptions(**values), origins, path, _strangers(variables))


def _find(
    setting: Setting, flags: Mapping[str, object], variables: Mapping[str, str], in_file: Mapping[str, object],
    path: Path | None,
) -> tuple[object, str, bool]:  # fmt: skip
    """The value that counts, where it is, and whether it is text that stands for something else."""
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
        raise Misuse(f"{setting.name} from {origin}: {error}, and it is {_shown(raw)!r}") from error


def _shown(raw: object) -> object:
    return without_password(raw) if isinstance(raw, str) else raw


def _file(config: Path | None, variables: Mapping[str, str]) -> Path | None:
    """The file to read; one that was named must be there."""
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
            raise Misuse(f"{path}: there is no setting {key!r}{_near(key)}")
    return found


def _near(key: str) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), SETTINGS, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(SETTINGS)}"


def _strangers(variables: Mapping[str, str]) -> tuple[str, ...]:
    ours = {setting.variable for setting in SETTINGS.values()} | {FILE_VARIABLE}
    return tuple(sorted(name for name in variables if name.startswith(ENVIRONMENT_PREFIX) and name not in ours))
