"""Settings: a flag counts before the environment, the file and the default; `config show` names the origin."""

from __future__ import annotations

import inspect
import json
import re
import typing
from pathlib import Path

import msgspec
import pytest

from fairway.cli import broker, delay, meta, subject
from fairway.cli.settings import SETTINGS, CliOptions, DurabilityChoice, resolve
from fairway.errors import Misuse
from fairway.storage import retention
from tests.tidy.source import ROOT
from tests.unit.cli.running import Cli

NOBODY = Cli("fairway://127.0.0.1:1")
ROW = re.compile(r"^\| `(\w+)` \| `([\w-]+)` \| `(\w+)` \| (\S+) \| (.+) \|$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty directory, and no settings from outside."""
    monkeypatch.chdir(tmp_path)
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.delenv("FAIRWAY_CONFIG", raising=False)


def test_without_anything_there_are_defaults() -> None:
    settings = resolve(None)
    assert settings.options == CliOptions()
    assert set(settings.origins.values()) == {"default"}


def test_the_nearest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("fairway.toml").write_text('port = 1\nhost = "::1"\nbuffer_mib = 70\nkeep_hours = 1.5\n')
    monkeypatch.setenv("FAIRWAY_PORT", "2")
    monkeypatch.setenv("FAIRWAY_HOST", "localhost")
    settings = resolve(None, port=3)
    options = settings.options
    assert (options.port, options.host, options.buffer_mib, options.keep_hours) == (3, "localhost", 70, 1.5)
    assert settings.origins["port"] == "flag --port"
    assert settings.origins["host"] == "environment FAIRWAY_HOST"
    assert settings.origins["buffer_mib"] == "file fairway.toml"
    assert settings.origins["data"] == "default"


def test_text_of_the_environment_becomes_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"ALLOW_REMOTE": "true", "DURABILITY": "memory", "HTTP_PORT": "0", "PATIENCE_S": "1.5"}.items():
        monkeypatch.setenv(f"FAIRWAY_{name}", text)
    monkeypatch.setenv("FAIRWAY_DATA", "")
    options = resolve(None).options
    assert (options.allow_remote, options.durability, options.http_port) == (True, DurabilityChoice.MEMORY, 0)
    assert (options.patience_s, options.data) == (1.5, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "no setting 'prot'; did you mean 'port'?"),
        ("http-port = 1", "did you mean 'http_port'?"),
        ("zzz = 1", "there are url, patience_s, data"),
        ("port = 70000", "port from file fairway.toml"),
        ('port = "80"', "Expected `int`, got `str`"),
        ('durability = "maybe"', "durability from file"),
        ("port = ", "cannot be read"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_the_reason(text: str, words: str) -> None:
    Path("fairway.toml").write_text(text)
    with pytest.raises(Misuse) as caught:
        resolve(None)
    assert words in str(caught.value)
    assert "fairway.toml" in str(caught.value)


def test_a_file_that_was_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Misuse, match=r"there is no file .*mine.toml"):
        resolve(tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_text("port = 5")
    assert resolve(tmp_path / "mine.toml").options.port == 5
    monkeypatch.setenv("FAIRWAY_CONFIG", str(tmp_path / "mine.toml"))
    assert resolve(None).options.port == 5


def test_config_show_says_where_each_value_came_from() -> None:
    Path("fairway.toml").write_text("port = 1\n")
    shown = json.loads(NOBODY.run("config", "show", "--json", FAIRWAY_HOST="localhost", FAIRWAY_PROT="7"))
    assert shown["settings"]["port"] == {"value": 1, "from": "file fairway.toml"}
    assert shown["settings"]["host"] == {"value": "localhost", "from": "environment FAIRWAY_HOST"}
    assert shown["settings"]["durability"] == {"value": "sync", "from": "default"}
    assert shown["unknown_variables"] == ["FAIRWAY_PROT"]
    table, said = NOBODY.both("config", "show", FAIRWAY_PROT="7")
    assert all(setting.flag in table and setting.variable in table for setting in SETTINGS.values())
    assert "FAIRWAY_PROT is set" in said


def test_a_wrong_setting_is_usage_for_every_verb() -> None:
    Path("fairway.toml").write_text("prot = 1\n")
    for arguments in (("config", "show"), ("subjects",), ("up", "--data", "d"), ("doctor",)):
        assert "did you mean 'port'?" in NOBODY.fails(*arguments, status=2)


@pytest.mark.parametrize("hours", ["inf", "nan", "-inf", "1e30", "1e-7", "0", "-1", "1000000"])
def test_an_age_that_no_directory_can_record_is_refused(hours: str) -> None:
    with pytest.raises(Misuse, match="keep_hours from flag --keep-hours"):
        resolve(None, keep_hours=hours)


@pytest.mark.parametrize("hours", ["0.001", "876600"])
def test_the_smallest_and_the_greatest_age_can_be_recorded(hours: str) -> None:
    age_ms = broker.broker_options(resolve(None, keep_hours=hours).options).store.retention.age_ms_max
    assert age_ms is not None
    assert retention.unpack(retention.pack(age_ms)) == age_ms == float(hours) * 3_600_000


@pytest.mark.parametrize("name", ["keep_gib", "keep_owed_gib", "horizon_days"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e30"])
def test_a_bound_that_is_no_number_is_refused(name: str, value: str) -> None:
    with pytest.raises(Misuse, match=name):
        resolve(None, **{name: value})


# --- one truth, derived twins -----------------------------------------------------------------------------------------


def test_the_document_has_every_setting_as_it_is() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    expected = [
        (each.name, each.flag, each.variable, each.shown_default, each.description) for each in SETTINGS.values()
    ]
    assert ROW.findall(text) == expected


def test_every_setting_is_a_flag_of_the_right_kind() -> None:
    """A flag is `T | None` where the setting is a `T`, because not given is not a value."""
    flags = {}
    for verb in (broker.up, broker.serve, delay.serve, meta.serve, subject.subjects):
        hints = typing.get_type_hints(verb)
        flags.update({name: hints[name] for name in inspect.signature(verb).parameters if name in SETTINGS})
    assert flags.keys() == SETTINGS.keys()
    hints = typing.get_type_hints(CliOptions)
    for name, hint in flags.items():
        wanted = set(_kinds(hints[name])) - {type(None)}
        if any(typing.get_origin(each) is typing.Literal for each in wanted):
            wanted = {str}  # a number or a word is text that `settings` converts
        assert set(_kinds(hint)) - {type(None)} == wanted
    assert [field.name for field in msgspec.structs.fields(CliOptions)] == list(SETTINGS)


def _kinds(hint: typing.Any) -> tuple[typing.Any, ...]:
    return typing.get_args(hint) or (hint,)
