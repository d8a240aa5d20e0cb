"""Draws the pictures of docs/concepts: `python docs/images.py` writes them, each as SVG.

A picture is boxes, arrows and words at fixed places. It has a background of its own and follows the reader's choice
between light and dark. Words that do not fit their box, boxes that overlap and words that lie on something else are
errors, so a picture that is drawn can be read. A test draws each picture again and compares the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "concepts" / "images"
LINE = 18
SIZE = 13

STYLE = """
  text { font: 13px "Segoe UI", "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; fill: #1f2933 }
  .title { font-weight: bold }
  .small { fill: #52606d }
  .page { fill: #ffffff; stroke: #cbd2d9 }
  .arrow { fill: none; stroke: #52606d; stroke-width: 1.5 }
  .head { fill: #52606d }
  .client { fill: #e3f0fb; stroke: #2b6cb0 }
  .server { fill: #e6f4ea; stroke: #2f855a }
  .log { fill: #fdf3dc; stroke: #b7791f }
  .work { fill: #f3e8fb; stroke: #7b4bb3 }
  .area { fill: none; stroke: #9aa5b1; stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb }
    .small { fill: #b8c2cc }
    .page { fill: #161b22; stroke: #3e4c59 }
    .arrow { stroke: #b8c2cc }
    .head { fill: #b8c2cc }
    .client { fill: #14304b; stroke: #63a4e0 }
    .server { fill: #12372a; stroke: #5fbf8f }
    .log { fill: #42310f; stroke: #e0b050 }
    .work { fill: #33204a; stroke: #b794e0 }
    .area { stroke: #7b8794 }
  }
"""

Rectangle = tuple[float, float, float, float]  # left, top, right, bottom
Point = tuple[float, float]


def width_of(words: str) -> float:
    """An upper estimate, for the widest of the fonts."""
    return len(words) * SIZE * 0.56


@dataclass
class Picture:
    """What is drawn, in order; `taken` has the rectangles on which nothing else may lie."""

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)
    taken: list[tuple[str, Rectangle]] = field(default_factory=list)

    def box(self, kind: str, left: float, top: float, width: float, height: float, *lines: str) -> None:
        """A box with lines of words in its middle; the first line is its name."""
        for line in lines:
            if width_of(line) > width - 8:
                raise ValueError(
                    f"{self.title}: {line!r} is too wide for its box: {width_of(line):.0f} > {width - 8:.0f}"
                )
        if len(lines) * LINE > height - 4:
            raise ValueError(f"{self.title}: {lines[0]!r} is too high for its box")
        self._take(lines[0], (left, top, left + width, top + height))
        self.parts.append(f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{height}" rx="6"/>')
        first = top + height / 2 - (len(lines) - 1) * LINE / 2 + SIZE * 0.36
        for number, line in enumerate(lines):
            style = "title" if number == 0 else "small"
            self._text(line, left + width / 2, first + number * LINE, style, "middle")

    def area(self, left: float, top: float, width: float, height: float, name: str) -> None:
        """A dashed frame around other parts, with its name in its upper left corner."""
        self.parts.append(f'<rect class="area" x="{left}" y="{top}" width="{width}" height="{height}" rx="8"/>')
        self.words(name, left + 10, top + 18, is_title=True)

    def words(self, words: str, left: float, baseline: float, *, is_title: bool = False) -> None:
        self._take(words, (left, baseline - SIZE + 2, left + width_of(words), baseline + 3))
        self._text(words, left, baseline, "title" if is_title else "small", "start")

    def arrow(self, *points: Point) -> None:
        """A line through the points, with a head at the last one."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="arrow" d="M{path}" marker-end="url(#head)"/>')

    def _take(self, name: str, wanted: Rectangle) -> None:
        left, top, right, bottom = wanted
        if left < 4 or top < 4 or right > self.width - 4 or bottom > self.height - 4:
            raise ValueError(f"{self.title}: {name!r} lies outside")
        for other, (its_left, its_top, its_right, its_bottom) in self.taken:
            if left < its_right and its_left < right and top < its_bottom and its_top < bottom:
                raise ValueError(f"{self.title}: {name!r} lies on {other!r}")
        self.taken.append((name, wanted))

    def _text(self, words: str, x: float, y: float, style: str, anchor: str) -> None:
        self.parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def svg(self) -> str:
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f'<defs>{head}<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
                f'<rect class="page" x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="10"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


def groups() -> Picture:
    picture = Picture("A subject and its groups", 760, 330)
    for number, top in enumerate((70, 190)):
        picture.box("client", 20, top, 120, 60, f"producer {number + 1}", "sends")
        picture.arrow((140, top + 30), (200, 142 if number == 0 else 178))
    picture.box("log", 200, 120, 190, 80, "order.changed", "a subject: messages", "in the order stored")
    for top, group, consumers in ((30, "billing", 2), (190, "mailer", 1)):
        height = 54 * consumers + 40
        picture.area(470, top, 270, height, f"group {group}")
        for number in range(consumers):
            line = top + 32 + number * 54
            picture.box("client", 580, line, 145, 44, f"consumer {number + 1}", "acks each message")
            picture.arrow((390, 145 if group == "billing" else 175), (470, top + height / 2), (580, line + 22))
    picture.words("Each group gets every message.", 470, 308)
    picture.words("A message goes to one consumer of a group.", 20, 308)
    return picture


def logs() -> Picture:
    picture = Picture("The logs of a broker", 760, 350)
    picture.box("client", 20, 50, 110, 56, "producer", "sends a batch")
    picture.area(170, 20, 430, 260, "broker, one data directory")
    picture.box("log", 190, 50, 390, 56, "message log", "the truth: all batches of all subjects, in order")
    picture.box("log", 190, 132, 180, 56, "consume log", "per subject: places")
    picture.box("work", 400, 132, 180, 56, "groups", "state of consumers")
    picture.box("log", 190, 214, 390, 56, "action log", "the truth about groups: pull, ack, retry, dead")
    picture.box("client", 640, 132, 100, 56, "consumer", "handles")
    picture.arrow((130, 70), (190, 70))
    picture.arrow((190, 92), (130, 92))
    picture.words("receipt", 52, 124)
    picture.arrow((280, 106), (280, 132))
    picture.arrow((370, 160), (400, 160))
    picture.arrow((580, 150), (640, 150))
    picture.arrow((640, 172), (580, 172))
    picture.arrow((490, 188), (490, 214))
    picture.words("A receipt, and the answer to an ack, leave after the bytes are synced.", 20, 310)
    picture.words("The consume log and the groups can be made again from the two logs.", 20, 332)
    return picture


def fairness() -> Picture:
    picture = Picture("Actors share the time of the broker", 760, 340)
    rows = (
        (40, "billing", "100 consumers", "many requests", "used 8.2 ms"),
        (130, "fraud", "2 consumers", "few requests", "used 8.0 ms"),
        (220, "report", "reads old data", "waits for the disk", "suspended"),
    )
    for top, group, who, mailbox, used in rows:
        picture.box("client", 20, top, 150, 60, f"group {group}", who)
        picture.box("work", 230, top, 150, 60, "its mailbox", mailbox)
        picture.box("server", 440, top, 120, 60, "its account", used)
        picture.arrow((170, top + 30), (230, top + 30))
        picture.arrow((380, top + 30), (440, top + 30))
    picture.box("server", 620, 120, 120, 80, "scheduler", "next: the actor", "with least time")
    picture.arrow((560, 70), (590, 70), (620, 140))
    picture.arrow((560, 160), (620, 160))
    picture.words("fraud is next, because it has had less than billing. report waits for its data.", 20, 310)
    return picture


def delay() -> Picture:
    picture = Picture("A delayed message", 760, 336)
    picture.box("client", 20, 60, 110, 56, "producer", "after=3 days")
    picture.area(170, 20, 420, 250, "delay server")
    picture.box("log", 190, 60, 170, 56, "message log", "receipt: it is synced")
    picture.box("log", 400, 60, 170, 56, "buckets", "hours, days, months")
    picture.box("work", 400, 140, 170, 56, "wheel", "messages due soon")
    picture.box("log", 190, 140, 170, 56, "dispatch log", "intents, sent batches")
    picture.box("server", 190, 222, 170, 38, "sender")
    picture.box("server", 640, 213, 100, 56, "broker", "its subject")
    picture.arrow((130, 88), (190, 88))
    picture.arrow((360, 88), (400, 88))
    picture.arrow((485, 116), (485, 140))
    picture.arrow((400, 168), (360, 168))
    picture.arrow((275, 196), (275, 222))
    picture.arrow((360, 241), (640, 241))
    picture.words("The intent is synced before the message leaves. After a crash the same bytes leave", 20, 298)
    picture.words("again under the same numbers, and the broker recognises what it has stored.", 20, 318)
    return picture


def copies() -> Picture:
    picture = Picture("Copies, and how another one takes over", 760, 380)
    picture.box("server", 300, 20, 200, 60, "registry", "epoch, master, in-sync set")
    picture.area(190, 110, 420, 180, "broker group east")
    picture.box("server", 210, 150, 150, 60, "copy a", "master of epoch 7")
    picture.box("log", 440, 140, 150, 56, "copy b", "replica, in sync")
    picture.box("log", 440, 220, 150, 56, "copy c", "replica, in sync")
    picture.box("client", 20, 150, 110, 60, "client", "sends, acks")
    picture.arrow((130, 170), (210, 170))
    picture.arrow((210, 192), (130, 192))
    picture.arrow((360, 170), (440, 168))
    picture.arrow((360, 192), (440, 246))
    picture.arrow((348, 150), (360, 80))
    picture.arrow((530, 140), (460, 80))
    picture.box("client", 640, 20, 100, 60, "meta server", "has routes")
    picture.arrow((500, 50), (640, 50))
    picture.words("The master answers when every copy of the in-sync set has synced the bytes.", 20, 318)
    picture.words("When its session ends, a copy of that set takes over with epoch 8. It has everything", 20, 340)
    picture.words("that was answered. No copy acknowledges anything to the master of epoch 7 any more.", 20, 362)
    return picture


def spark() -> Picture:
    picture = Picture("The Spark pipeline", 760, 350)
    picture.area(20, 20, 190, 250, "Fairway")
    picture.box("log", 40, 50, 150, 56, "message log", "batches of columns")
    picture.box("log", 40, 126, 150, 56, "action log", "events of groups")
    picture.box("log", 40, 202, 150, 56, "delay server", "pending messages")
    picture.area(270, 20, 200, 250, "sources of Spark")
    picture.box("work", 285, 50, 170, 56, 'format("fairway")', "read and write")
    picture.box("work", 285, 126, 170, 56, "fairway.events", "the life of messages")
    picture.box("work", 285, 202, 170, 56, "fairway.delayed", "pending messages")
    picture.arrow((190, 70), (285, 70))
    picture.arrow((285, 90), (190, 90))
    picture.arrow((190, 154), (285, 154))
    picture.arrow((190, 230), (285, 230))
    picture.box("server", 540, 30, 200, 38, "archive to Parquet")
    picture.box("server", 540, 78, 200, 38, "replay, repetition")
    picture.box("server", 540, 136, 200, 38, "trace, reconcile")
    picture.box("server", 540, 202, 200, 56, "report", "shares, lags, forecast")
    picture.arrow((455, 66), (540, 50))
    picture.arrow((455, 90), (540, 97))
    picture.arrow((455, 154), (540, 155))
    picture.arrow((455, 170), (540, 222))
    picture.arrow((455, 234), (540, 238))
    picture.words("A range of sequences is a task. Tasks scan without a group, so they disturb no cursor.", 20, 308)
    picture.words("Rows of the sink carry producer sequences: a task that runs twice stores them once.", 20, 330)
    return picture


PICTURES = {
    "groups.svg": groups,
    "logs.svg": logs,
    "fairness.svg": fairness,
    "delay.svg": delay,
    "copies.svg": copies,
    "spark.svg": spark,
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
