"""A short run of the fuzzer; `python -m tests.hostile.batch_fuzz` is the long one."""

from __future__ import annotations

from tests.hostile import batch_fuzz


def test_any_bytes_are_a_batch_or_a_remote_protocol_error() -> None:
    report = batch_fuzz.run(inputs=20_000, seed=20_000)
    assert report.clean, report.examples[:3]
    assert report.inputs == 20_000
    assert report.accepted > 500, "a fuzzer whose every input is refused at the first byte tests little"
    assert report.refused > 10_000
    assert report.memory_measured == 40


def test_the_fuzzer_replays_from_its_seed() -> None:
    assert batch_fuzz.run(inputs=500, seed=7) == batch_fuzz.run(inputs=500, seed=7)
