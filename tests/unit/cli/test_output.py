"""Every line that a server writes to its log has the time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from fairway.runtime.process import Child
from fairway.runtime.service import stamp

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")


def test_a_stamp_is_utc_to_the_millisecond() -> None:
    assert stamp(1_763_430_123_007) == "2025-11-18T01:42:03.007Z"


def test_a_server_says_that_it_is_ready_on_stdout_and_everything_else_with_the_time(tmp_path: Path) -> None:
    assert _outputs(tmp_path) == (f"fairway broker: ready at PLACE, data in {tmp_path}\n", "")
    (tmp_path / "retention").unlink()  # as in a directory that was made before there was a default: a remark
    ready, log = _outputs(tmp_path)
    assert ready.startswith("fairway broker: ready at ")
    assert "remark: " in log
    assert all(STAMP.match(line) for line in log.splitlines())
    assert "ready at" not in log, "a person at a terminal would read it twice"


def _outputs(data: Path) -> tuple[str, str]:
    """What a broker says on stdout and on stderr until it is told to end."""
    command = [sys.executable, "-m", "fairway", "broker", "--data", str(data), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = server.stdout.readline()
        server.terminate()
        _, log = server.communicate(timeout=60)
    return re.sub(r"fairway://\S+,", "PLACE,", ready), log


def test_a_server_that_does_not_start_answers_in_one_sentence_without_a_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with Child("fairway", "broker", "--data", str(tmp_path / "file"), "--port", "0") as child:
        assert child.wait(timeout_s=60) != 0
