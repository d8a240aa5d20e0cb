"""`fairway tail SUBJECT`: what is stored, and what comes, without a group: nobody is kept from anything by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import messages, place
from fairway.cli.client import AsJson, Patience, Subject, Url, connected
from fairway.cli.settings import ConfigFile
from fairway.errors import Code, InvariantViolated, Refused
from fairway.world import host, terminal

if TYPE_CHECKING:
    from fairway import Client
    from fairway.client.commands import SeekTarget
    from fairway.protocol.admin import Scanned
    from fairway.protocol.page import LazyBatch
    from fairway.world.workers import Ending

_LOOK_S = 0.2  # between two looks at a subject that has nothing new

From = Annotated[str, typer.Option("--from", metavar="PLACE", help=place.HELP)]
Count = Annotated[int | None, typer.Option("--count", "-n", min=1, metavar="N", help="End after so many messages.")]
Follow = Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for more; or end at what is stored now.")]


def tail(
    subject: Subject,
    start: From = "latest",
    count: Count = None,
    follow: Follow = True,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Print the payloads of a subject, one a line, from a place on, and wait for more until Ctrl-C.

    It reads the log and belongs to no group, so nothing is acked and nobody gets less. Names of the broker's own work,
    too: dead:GROUP:SUBJECT.
    """
    with connected("tail", config, url, patience_s) as client, host.asked_to_end() as ending:
        _Tail(client, subject, ending, as_json=json).run(place.parse(start), count, is_following=follow)


class _Tail:
    """One walk through a subject."""

    def __init__(self, client: Client, subject: str, ending: Ending, *, as_json: bool) -> None:
        self._client = client
        self._subject = subject
        self._ending = ending
        self._as_json = as_json
        self._printed = 0

    def run(self, start: SeekTarget, count: int | None, *, is_following: bool) -> None:
        at = self._begin(start, is_following=is_following)
        while True:
            before = at
            for page in self._pages(at):
                for sequence in range(max(at, page.first_sequence), page.end_sequence):
                    self._print(page, sequence)
                    if self._printed == count:
                        terminal.flush()
                        return
                at = max(at, page.end_sequence)
            terminal.flush()
            if not is_following or self._ending.wait(_LOOK_S if at == before else 0.0):
                return

    def _pages(self, at: int) -> Iterator[LazyBatch]:
        """What is stored from there on, until somebody asks for the end."""
        for page in self._client.scan(self._subject, at):
            yield page
            if self._ending.is_asked:
                return

    def _print(self, page: LazyBatch, sequence: int) -> None:
        self._printed += 1
        if self._as_json:
            messages.write_line(messages.of_page(self._subject, page, sequence))
        else:
            terminal.write_payload(page.batch.payloads[sequence - page.first_sequence])

    def _begin(self, start: SeekTarget, *, is_following: bool) -> int:
        """The sequence that the place is now, so that nothing that comes meanwhile is passed over."""
        has_waited = False
        while not self._ending.is_asked:
            try:
                sequence = self._where(start).next_sequence
            except Refused as refused:
                if refused.code is not Code.NO_SUCH_SUBJECT or not is_following:
                    raise
                if not has_waited:
                    terminal.say(f"fairway tail: nothing was sent to {self._subject} yet, waiting for it", err=True)
                start, has_waited = "earliest", True
                self._ending.wait(_LOOK_S)
            else:
                return start if isinstance(start, int) else sequence
        return 0

    def _where(self, start: SeekTarget) -> Scanned:
        from fairway.client.commands import place_of
        from fairway.protocol.admin import Scan, Scanned

        whence, value = place_of(start)
        told = self._client.ask(Scan(self._subject, whence, value, None, 0))
        if not isinstance(told, Scanned):
            raise InvariantViolated(f"a scan was answered with {told!r}")
        return told
