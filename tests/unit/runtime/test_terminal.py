"""Text that goes to a terminal is shown, not obeyed; a pipe gets it as it is."""

from __future__ import annotations

import io
import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.runtime import terminal

OBEYED = frozenset({"Cc", "Cs", "Zl", "Zp"})
DIRECTIONS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
MARKS = "\u200e\u200f\u061c"


def is_obeyed(character: str) -> bool:
    return (
        unicodedata.category(character) in OBEYED
        or unicodedata.bidirectional(character) in DIRECTIONS
        or character in MARKS
    )


class Screen(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.written = io.BytesIO()
        super().__init__(self.written, encoding=encoding, newline="\n")

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        self.flush()
        return self.written.getvalue().decode(self.encoding)


def watched(monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> Screen:
    """A terminal in the place of stdout, from now to the end of the test."""
    made = Screen(encoding)
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return made


def test_every_character_that_a_terminal_obeys_is_escaped_and_no_other_letter() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        if is_obeyed(character):
            assert terminal.escaped(character).isascii(), f"U+{number:04X}"
            assert terminal.escaped(character).isprintable(), f"U+{number:04X}"
        elif unicodedata.category(character)[0] in "LMNPSZ":
            assert terminal.escaped(character) == character, f"U+{number:04X}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;owned\x07", "\\u001b[2J\\u001b]0;owned\\u0007"),
        ("\x9b31m", "\\u009b31m"),
        ("a\x7f\x08b\rc\nd\te", "a\\u007f\\u0008b\\rc\\nd\\te"),
        ("abc\u202efdp.exe\u2066", "abc\\u202efdp.exe\\u2066"),
        ("Grüße, 世界 👍🏽 שלום", "Grüße, 世界 👍🏽 שלום"),
        ("\udc9b", "\\udc9b"),
    ],
)
def test_an_escape_is_written_as_json_writes_it(text: str, shown: str) -> None:
    assert terminal.escaped(text) == shown


@given(st.text())
def test_a_json_document_means_the_same_when_it_is_escaped(text: str) -> None:
    document = json.dumps({"payload": text}, ensure_ascii=False, indent=2)
    assert json.loads(terminal.escaped(document, keep=terminal.LINES)) == {"payload": text}


def test_lines_are_kept_only_where_they_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)
    terminal.say("refused\nfairway: all is well")
    terminal.write_text("a\n\tb\r\n")
    assert screen.text == "refused\\nfairway: all is well\na\n\tb\\r\n"


def test_a_payload_that_is_no_utf_8_reaches_a_terminal_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)
    terminal.write_payload(b"\x9b31mred \xc2\x9b31m \xff ok")
    assert screen.text == "\\x9b31mred \\u009b31m \\xff ok\n"


def test_a_pipe_gets_the_bytes_as_they_are(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    terminal.write_payload(b"\x1b[31m\x9b\xff")
    terminal.flush()
    terminal.say("\x1b[31m")
    assert capfdbinary.readouterr().out == b"\x1b[31m\x9b\xff\n\x1b[31m\n"


def test_a_locale_without_a_character_shows_it_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = watched(monkeypatch, "ascii")
    terminal.say("Grüße\x1b")
    assert made.text == "Gr\\xfc\\xdfe\\u001b\n"


@pytest.mark.parametrize("text", ["[red]a[/red]", "[link=https://example.org]a[/link]", "[/nothing]", ":bomb: \\[b]"])
def test_markup_of_rich_in_a_text_is_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.table import Table

    screen = watched(monkeypatch)
    table = Table(title=text, caption=text)
    table.add_column(text)
    table.add_row(text)
    console = terminal.console()
    console.print(table)
    console.print(text)
    console.rule(text)
    assert screen.text.count(text) == 6  # title, caption, heading, cell, line, rule
    assert "\x1b]8" not in screen.text


def test_whatever_a_console_draws_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    screen = watched(monkeypatch)
    hostile = "x\x1b]0;owned\x07\x9b2J\u202e"
    console = terminal.console()
    table = Table(title=hostile)
    table.add_column(Text(hostile))
    table.add_row(Text(hostile, "bold"))
    with Live(table, console=console, auto_refresh=False) as live:
        live.update(Text(hostile), refresh=True)
        live.console.print(hostile)
    for each in ("\x1b]", "\x07", "\x9b", "\u202e"):
        assert each not in screen.text
    assert "\\u001b]0;owned" in screen.text
