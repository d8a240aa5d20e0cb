"""A short run of the fuzzer; `python -m tests.hostile.frame_fuzz` is the long one. And proof that it can fail."""

from __future__ import annotations

from fairway.protocol import Frame, FrameReader
from tests.hostile import frame_fuzz


def test_any_bytes_are_events_or_a_remote_protocol_error() -> None:
    report = frame_fuzz.run(inputs=20_000, seed=20_000)
    assert report.clean, report.examples[:3]
    assert report.inputs == 20_000
    assert report.lived > 2_000, "a fuzzer that ends every conversation at its first byte tests little"
    assert report.ended > 5_000
    assert report.events > 10_000
    assert report.memory_measured == 100


def test_the_fuzzer_replays_from_its_seed() -> None:
    assert frame_fuzz.run(inputs=500, seed=7) == frame_fuzz.run(inputs=500, seed=7)


class _Trusting(FrameReader):
    """Planted: believes the length that a header claims."""

    def next_frame(self) -> Frame | None:
        frame = super().next_frame()
        if self._gathered and self._wanted > 24:
            bytearray(self._wanted)
        return frame


class _Forgetful(FrameReader):
    """Planted: loses a byte of what arrives in pieces."""

    def _set_aside(self, wanted: int) -> None:
        super()._set_aside(wanted)
        if self._gathered > 30:
            block = bytearray(self._partial[0])
            block[30] = 0
            self._partial[0] = block


class _Careless(FrameReader):
    """Planted: indexes into attachments without looking."""

    def next_frame(self) -> Frame | None:
        frame = super().next_frame()
        if frame is not None and frame.verb == 23:
            frame.attachments[0]
        return frame


def test_planted_bugs_are_found() -> None:
    assert frame_fuzz.run(inputs=5_000, seed=1, reader=_Trusting).over_allocations
    assert frame_fuzz.run(inputs=500, seed=1, reader=_Forgetful).disagreements
    assert frame_fuzz.run(inputs=500, seed=1, reader=_Careless).other_exceptions
