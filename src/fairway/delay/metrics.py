"""Metrics of the delay server: counters, and gauges that are read at each scrape.

A scrape must not hold up the loop, so nothing here walks over all rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fairway.delay.dispatch.sender import DispatchSender
from fairway.delay.engine import Engine
from fairway.delay.pending_messages import CancelOutcome, PendingDecision
from fairway.delay.schedule.wheel import DueTimes
from fairway.protocol.messages import Produced
from fairway.serving.metrics import Histogram, MetricsText

# Upper bounds in ms: from one tick of the wheel to a broker that was down over a weekend.
LATENESS_MS_BUCKETS: Final = (
    *(5.0, 10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 250.0, 500.0, 1_000.0, 5_000.0, 60_000.0, 3_600_000.0, 86_400_000.0),
)


class Figures:
    """The metrics of one delay server since its start."""

    def __init__(self, engine: Engine, dispatch_sender: DispatchSender) -> None:
        self._engine = engine
        self._dispatch_sender = dispatch_sender
        self.scheduled = 0  # messages; so are the four below
        self.dispatched = 0
        self.repeated = 0  # sent again after a crash or a lost answer: the broker already had them
        self.cancelled = 0
        self.rescheduled = 0
        self.lateness_ms = Histogram(LATENESS_MS_BUCKETS)

    def note_decided(self, decision: PendingDecision) -> None:
        if decision.answer is CancelOutcome.CANCELLED:
            self.cancelled += decision.messages
        elif decision.answer is CancelOutcome.RESCHEDULED:
            self.rescheduled += decision.messages

    def note_sent(self, due_ms: DueTimes, receipt: Produced | None, now_ms: int) -> None:
        """The broker has these messages. Lateness is known only for messages that arrived for the first time."""
        self.dispatched += len(due_ms)
        if receipt is None or receipt.is_duplicate:
            self.repeated += len(due_ms)
            return
        late_ms = np.maximum(now_ms - due_ms, 0)
        places = np.searchsorted(self.lateness_ms.bounds, late_ms, side="left")
        for place, count in enumerate(np.bincount(places).tolist()):
            self.lateness_ms.counts[place] += count
        self.lateness_ms.total += float(late_ms.sum())

    # --- scrapes -----------------------------------------------------------------------------------------------------

    def show(self, out: MetricsText) -> None:
        engine, dispatch_sender = self._engine, self._dispatch_sender
        held_back = engine.held_back
        out.one("delay_pending_messages", "gauge", "Messages scheduled and not yet sent.", engine.rows.pending)
        due = held_back + dispatch_sender.messages
        out.one("delay_due_messages", "gauge", "Of these, due: on their way, or held back.", due)
        out.one("delay_held_back_messages", "gauge", "Of these, held back: no broker takes them now.", held_back)
        out.one("delay_scheduled_messages_total", "counter", "Messages taken.", self.scheduled)
        out.one("delay_dispatched_messages_total", "counter", "Messages that a broker has stored.", self.dispatched)
        out.one("delay_repeated_messages_total", "counter", "Sent again, and recognised.", self.repeated)
        out.one("delay_cancelled_messages_total", "counter", "Messages cancelled.", self.cancelled)
        out.one("delay_rescheduled_messages_total", "counter", "Messages put off or brought forward.", self.rescheduled)
        about = "From a message's due time to the broker's receipt."
        out.histogram_ms("delay_lateness_seconds", about, {"": self.lateness_ms})
        self._storage(out)
        self._targets(out)

    def _storage(self, out: MetricsText) -> None:
        engine = self._engine
        out.one("delay_is_loaded", "gauge", "0: still reading its files, questions wait.", int(engine.is_loaded))
        out.one("delay_buckets", "gauge", "Files of the schedule log.", len(engine.log.files))
        out.one("delay_index_rows", "gauge", "Messages with a row in memory, sent ones included.", len(engine.rows))
        columns = [each for each in vars(engine.rows).values() if isinstance(each, np.ndarray)]
        out.one("delay_index_bytes", "gauge", "Memory of the rows.", sum(each.nbytes for each in columns))
        out.one("delay_wheel_messages", "gauge", "Messages of the hour at hand and the next.", len(engine.wheel))
        out.one("delay_damaged_records", "gauge", "Records that cannot be read any more.", len(engine.damaged))
        out.one("delay_repaired_records", "counter", "Records put back from the message log.", engine.repairs.repaired)
        about = "Of damaged records: messages that the message log does not have either."
        out.one("delay_lost_messages_total", "counter", about, engine.repairs.lost_messages)
        about = "Of damaged records: messages that were read from the message log."
        out.one("delay_salvaged_messages_total", "counter", about, engine.repairs.salvaged_messages)
        out.one("delay_stuck_intents", "gauge", "Batches that cannot be made again after a crash.", len(engine.stuck))

    def _targets(self, out: MetricsText) -> None:
        targets = [({"target": each.name}, each) for each in self._dispatch_sender]
        down = [(labels, int(each.is_down)) for labels, each in targets]
        down += [({"target": name}, 1) for name in self._dispatch_sender.homeless]
        out.family("delay_target_down", "gauge", "1: that broker group cannot be reached.", down)
        intents = [(labels, each.target_sender.intents) for labels, each in targets]
        out.family("delay_intents", "gauge", "Batches on their way.", intents)
        messages = [(labels, each.target_sender.messages) for labels, each in targets]
        messages += [({"target": name}, count) for name, count in self._dispatch_sender.homeless.items()]
        out.family("delay_intent_messages", "gauge", "Messages in them.", messages)
        refused = [(labels, len(each.target_sender.refused)) for labels, each in targets]
        out.family("delay_refused_subjects", "gauge", "Subjects that the broker refuses to take now.", refused)
        codes = [
            (labels | {"code": code.value}, count)
            for labels, each in targets
            for code, count in sorted(each.target_sender.refusals.items(), key=lambda pair: pair[0].value)
        ]
        out.family("delay_refusals_total", "counter", "Batches refused; each is sent again.", codes)
        detours = [(labels, each.target_sender.detours) for labels, each in targets]
        out.family("delay_detours_total", "counter", "Batches sent anew: the broker forgot their stream.", detours)
