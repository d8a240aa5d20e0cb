"""A consumer that stood still: its diary dates what waited in its socket, and the checker takes that as a reason."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fairway import Message
from fairway.runtime.clock import ManualClock
from tests.crash.broker_worker import LEASE_MS
from tests.crash.clients_diary import SLACK_NS, ClientReading, ClientScribe, ClientTruth, Diary
from tests.simulation.broker_truth import Owner, Promise
from tests.tidy.source import ROOT

MS = 1_000_000


class Play:
    """Two consumers of one group on one clock, and what their diaries say."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.clock.advance(60_000)
        self.lines: list[bytes] = []
        producer = ClientScribe(self.clock, self.lines.append)
        producer.note_sent("orders", [b"p/1:"], self.clock.monotonic_ns())
        producer.note_receipt("orders", 0, [b"p/1:"])
        owner = Owner("g", "orders", LEASE_MS * MS, 0)
        self.stopped, self.other = (
            Diary(owner, name, is_back=False, clock=self.clock, write=self.lines.append) for name in ("a", "b")
        )

    def run(self, ms: int, *diaries: Diary) -> None:
        """Let time pass for the processes of these, which find nothing."""
        for at_ms in range(0, ms, 20):
            self.clock.advance(20)
            for diary in diaries:
                diary.pulse.tick()
                if at_ms % 200 == 0:
                    diary.note_nothing()

    def judge(self, folder: Path) -> ClientTruth:
        path = folder / "said"
        path.write_bytes(b"".join(self.lines))
        truth = ClientTruth()
        ClientReading(truth, LEASE_MS).read([path], [])
        return truth


def message() -> Message:
    return cast(
        "Message", SimpleNamespace(payload=b"p/1:", sequence=0, key="p/1", headers={"name": "p/1"}, tags=("p",))
    )


@pytest.mark.parametrize("first", ["the pulse", "the program"])
def test_a_frame_that_waited_for_a_stopped_consumer_is_no_duplicate(first: str, tmp_path: Path) -> None:
    play = Play()
    play.run(1_000, play.stopped, play.other)
    play.run(2 * LEASE_MS, play.other)  # meanwhile the broker's answer waits in the socket of the one that is stopped
    play.other.note_messages([message()])
    play.clock.advance(20)
    if first == "the pulse":
        play.stopped.pulse.tick()
    play.stopped.note_nothing()
    play.stopped.note_messages([message()])
    play.stopped.pulse.tick()
    truth = play.judge(tmp_path)
    assert truth.breaches == []
    assert truth.reasons["overtaken"] == 1
    assert truth.standstills == 1


def test_a_frame_that_comes_to_a_consumer_that_ran_is_a_duplicate(tmp_path: Path) -> None:
    play = Play()
    play.run(1_000 + 2 * LEASE_MS, play.stopped, play.other)
    play.other.note_messages([message()])
    play.run(20, play.stopped)
    play.stopped.note_messages([message()])
    truth = play.judge(tmp_path)
    assert {breach.promise for breach in truth.breaches} == {Promise.DUPLICATE}
    assert truth.standstills == 0


def test_an_empty_hand_counts_again_when_the_consumer_has_run_for_a_while(tmp_path: Path) -> None:
    play = Play()
    play.run(1_000, play.stopped, play.other)
    play.run(2 * LEASE_MS, play.other)
    play.run(2 * SLACK_NS // MS, play.stopped, play.other)
    play.other.note_messages([message()])
    play.run(20, play.stopped)
    play.stopped.note_messages([message()])
    truth = play.judge(tmp_path)
    assert {breach.promise for breach in truth.breaches} == {Promise.DUPLICATE}
    assert truth.standstills == 1


PROGRAM = """
import time
from fairway.runtime.clock import RealClock
from tests.crash.clients_diary import ClientScribe, Pulse

Pulse(RealClock(), ClientScribe().note_standstill).start()
print("begun", flush=True)
time.sleep(60)
"""


def test_a_stopped_process_notices_that_it_stood_still() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"begun\n"
            process.send_signal(signal.SIGSTOP)
            time.sleep(1)
            process.send_signal(signal.SIGCONT)
            spans: list[int] = []
            while not spans or spans[-1] < 900 * MS:  # a busy machine may have its own
                _, method, (began_ns, ended_ns) = json.loads(process.stdout.readline())
                assert method == "standstill"
                spans.append(ended_ns - began_ns)
        finally:
            process.kill()
