"""Output of the command line: raw where a program reads it, harmless where a terminal shows it.

Payloads, keys, headers, reasons, names and the messages of servers come from other people. A terminal obeys its input:
an escape sequence in a payload can move the cursor, hide text, set the title, or have the terminal type an answer into
the shell. So all text for a terminal passes `escaped` here, and no other module writes to stdout or stderr
(`tests/tidy` checks this). A pipe or a file gets the same text unchanged.

`escaped` writes a character as JSON does, `\\n` or `\\u001b`. So an escaped JSON document is still the same document.
These characters are escaped:

- C0 and DEL: U+0000 to U+001F and U+007F. Escape sequences begin with ESC; CR, BS and VT overwrite earlier text.
- C1: U+0080 to U+009F. Some terminals take U+009B for the beginning of an escape sequence, as a byte and as UTF-8.
- Characters that change the direction of text (bidi marks, embeddings, overrides, isolates), which make a text read
  differently from its contents.
- Line and paragraph separators, deprecated format characters and interlinear annotations, which terminals may obey.
- Lone surrogates, which cannot be encoded.

Markup of rich (`[red]`, `[link=...]`) in a text is plain text: a console of this module reads none. A style is given as
`rich.text.Text`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

_PIPED_COLUMNS = 140  # a pipe has no width; the widest table of the command line fits

_CONTROLS = re.compile(
    r"[\x00-\x1f\x7f-\x9f"
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction
    r"\u2028\u2029\u206a-\u206f\ufff9-\ufffb"
    r"\ud800-\udfff]"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
LINES = "\n\t"  # kept in a text of several lines
_MARKED = _CONTROLS.search


def escaped(text: str, *, keep: str = "") -> str:
    """The text with every character escaped that a terminal may obey, except for those in `keep`."""
    if _MARKED(text) is None:
        return text
    return _CONTROLS.sub(lambda found: found[0] if found[0] in keep else _written_out(found[0]), text)


def _written_out(character: str) -> str:
    return _SHORT.get(character) or f"\\u{ord(character):04x}"


def is_terminal(*, err: bool = False) -> bool:
    """Whether stdout, or stderr, is a terminal."""
    return _stream(err).isatty()


def shown(text: str, *, err: bool = False, keep: str = "") -> str:
    """The text for stdout, or stderr: escaped for a terminal, unchanged for a program."""
    return escaped(text, keep=keep) if is_terminal(err=err) else text


def say(sentence: str, *, err: bool = False) -> None:
    """Write one line to stdout, or stderr, and flush. A newline in it is escaped: it would forge another line."""
    _write(_stream(err), shown(sentence, err=err) + "\n")
    flush(err=err)


def write_text(text: str) -> None:
    """Write a text of several lines to stdout, such as a JSON document."""
    _write(sys.stdout, shown(text, keep=LINES))


def write_payload(payload: bytes) -> None:
    """Write a payload and a newline to stdout. A terminal gets text: bytes that are not UTF-8 become `\\x9b`."""
    if is_terminal():
        write_text(payload.decode("utf-8", "backslashreplace") + "\n")
    else:
        sys.stdout.buffer.write(payload + b"\n")


def flush(*, err: bool = False) -> None:
    """Return when all output has left this process."""
    _stream(err).flush()


def console(*, err: bool = False) -> Console:
    """A rich console for stdout, or stderr: it reads no markup, adds no colours of its own, and escapes."""
    from rich.console import Console
    from rich.segment import Segment

    class EscapingConsole(Console):
        """Escapes each piece of text on its way to a terminal; rich's own control codes are not text."""

        def render_str(self, text: str, **how: Any) -> Text:
            """Escape before rich silently drops some of the characters."""
            return super().render_str(escaped(text, keep=LINES) if self.is_terminal else text, **how)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if self.is_terminal and not segment.control and _MARKED(segment.text) is not None:
                    yield Segment(escaped(segment.text, keep="\n"), segment.style)  # rich ends its lines with "\n"
                else:
                    yield segment

    made = EscapingConsole(stderr=err, highlight=False, emoji=False, markup=False)
    if not made.is_terminal:
        made.width = _PIPED_COLUMNS
    return made


def _stream(err: bool) -> TextIO:
    return sys.stderr if err else sys.stdout


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:  # the locale lacks that character
        coding = stream.encoding or "ascii"
        stream.write(text.encode(coding, "backslashreplace").decode(coding))
