"""The metrics of a broker: the /metrics page.

A scrape must not hold up the loop. Figures of groups cost the most, because a group walks over everything that it has
in flight. So a scrape looks at groups for 5 ms, from where the last scrape stopped, and shows older figures of the
rest. The page shows at most `GROUPS_MAX` groups, and the number of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from fairway.broker.descriptions import dead_letters_of
from fairway.broker.groups import GroupHost
from fairway.replication.copies import families
from fairway.serving.http import show_store
from fairway.serving.memory_plan import MemoryAccount, server_accounts, show, store_accounts
from fairway.serving.metrics import MetricsText

if TYPE_CHECKING:
    from fairway.broker.server import Broker
    from fairway.groups import Description

GROUPS_MAX: Final = 500  # shown: a dozen series each, as many as a scraper likes to take from one address
LOOK_NS_MAX: Final = 5_000_000  # for groups, in one scrape: 25 slices

_GROUP_FIGURES: Final = (
    ("lag", "gauge", "Messages committed and not yet handed out."),
    ("in_flight", "gauge", "Messages held by consumers."),
    ("returned", "gauge", "Messages that the next pull gets, handed back or due again."),
    ("retrying", "gauge", "Messages that wait for their next attempt."),
    ("dying", "gauge", "Messages on their way to dead letter."),
    ("lost_total", "counter", "Messages that retention or rot took before the group was done."),
    ("parked", "gauge", "Messages that wait behind others of their keys."),
    ("is_full", "gauge", "1: as many are behind others of their keys as may be, and the group waits."),
    ("declined_total", "counter", "Messages declined, because others of their keys did what they asked for."),
    ("rate_per_s", "gauge", "Messages per second that the group may have; 0: without limit."),
    ("halted", "gauge", "Keys that wait behind a dead letter; 1 for a group of strict order."),
)


class Metrics:
    """All metrics of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._seen: dict[int, Description] = {}
        self._dead: dict[int, int] = {}
        self._next = 0  # the group that the next scrape looks at first

    def page(self) -> str:
        out = MetricsText()
        self._traffic(out)
        self._connections(out)
        show(out, self.accounts())
        self._storage(out)
        self._chores(out)
        if not self._broker.store.is_closed:  # the count of dead letters reads the directory
            self._groups(out)
        self._copies(out)
        if self._broker.delay is not None:
            self._broker.delay.show(out)
        return out.text()

    def accounts(self) -> list[MemoryAccount]:
        """The memory accounts: everything that clients make this broker hold."""
        broker, memory, keys = self._broker, self._broker.coordinator.memory, self._broker.consume.puller.keys
        found = server_accounts(broker.options.memory_bytes_max, broker.session_manager, broker.waiting)
        found += store_accounts(broker.store)
        found.append(MemoryAccount("groups", memory.bytes_max, lambda: memory.taken_bytes))
        found.append(MemoryAccount("key_windows", keys.bytes_max, lambda: keys.held_bytes))
        return found if broker.delay is None else [*found, *broker.delay.memory_accounts()]

    def _copies(self, out: MetricsText) -> None:
        """Figures of one copy of several."""
        copy_status = self._broker.copy_status
        if copy_status is not None:
            for each in families(copy_status, self._broker.store):
                out.family(*each)

    def _traffic(self, out: MetricsText) -> None:
        broker, meters = self._broker, self._broker.meters
        out.one("produced_batches_total", "counter", "Batches committed.", broker.produce.batches)
        out.one("produced_messages_total", "counter", "Messages committed.", broker.produce.messages)
        out.one("produced_bytes_total", "counter", "Bytes of batches committed.", broker.produce.bytes)
        out.one("duplicate_messages_total", "counter", "Messages sent again.", meters.duplicate_messages)
        out.one("pulls_total", "counter", "Pulls answered, empty ones included.", meters.pulls)
        out.one("pulled_messages_total", "counter", "Messages handed out.", broker.consume.puller.pulled_messages)
        out.one("pulled_bytes_total", "counter", "Bytes of whole batches sent to consumers.", meters.pulled_bytes)
        out.one("settled_messages_total", "counter", "Messages acked, retried, rejected.", meters.settled_messages)
        out.one("stale_messages_total", "counter", "Messages settled by a former holder.", meters.stale_messages)
        out.one("scanned_bytes_total", "counter", "Bytes of batches sent to scans.", meters.scanned_bytes)
        meters.show_refusals(out)
        expired = broker.scheduler.tally.expired.items()
        out.family(
            "expired_requests_total",
            "counter",
            "Requests that ended unserved.",
            [({"why": expiry.value}, count) for expiry, count in expired],
        )

    def _connections(self, out: MetricsText) -> None:
        broker, session_manager = self._broker, self._broker.session_manager
        broker.show_connections(out)
        held = {
            "partial": session_manager.incoming.taken_bytes,
            "waiting": broker.waiting.taken_bytes,
            "unsent": session_manager.outgoing.taken_bytes,
        }
        out.family(
            "buffered_bytes",
            "gauge",
            "Memory held for clients: parts of frames, requests that wait, answers that have not left.",
            [({"what": what}, size) for what, size in held.items()],
        )
        evicted = {"partial": session_manager.incoming.evictions, "unsent": session_manager.outgoing.evictions}
        out.family(
            "evictions_total",
            "counter",
            "Connections ended to free memory.",
            [({"what": what}, count) for what, count in evicted.items()],
        )
        out.one("actors", "gauge", "Actors that had something to do of late.", len(broker.scheduler))

    def _storage(self, out: MetricsText) -> None:
        broker, store = self._broker, self._broker.store
        logs = [({"log": each.directory}, each) for each in (store.messages.log, store.actions.log)]
        out.family("syncs_total", "counter", "Syncs.", [(labels, log.flusher.syncs) for labels, log in logs])
        unsynced = [(labels, log.flusher.unsynced_bytes) for labels, log in logs]
        out.family("unsynced_bytes", "gauge", "Appended and not yet synced.", unsynced)
        out.family("log_end_bytes", "counter", "Where a log ends.", [(labels, log.end) for labels, log in logs])
        times = {name: watch.times_ms for name, watch in broker.sync_watches.items()}
        out.histogram_ms("sync_seconds", "From handing bytes to the disk until they are synced.", times)
        age_ms = max(broker.clock.wall_ms() - store.checkpointed_ms, 0)
        out.one("checkpoint_age_seconds", "gauge", "Since the last checkpoint, or the start.", age_ms / 1_000)
        out.one("rotten_spans", "gauge", "Spans of the logs that the disk has lost.", len(store.rotten))
        out.one("disk_free_bytes", "gauge", "Room left on the disk.", store.free_bytes())
        show_store(out, is_open=not store.is_closed)
        out.one("store_has_room", "gauge", "0: produce is refused, the disk is nearly full.", int(store.has_room))
        out.one("store_is_poisoned", "gauge", "1: the disk failed, nothing is answered.", int(store.fault is not None))
        out.one("subjects", "gauge", "Subjects.", len(store.messages.views.subjects))

    def _chores(self, out: MetricsText) -> None:
        """Figures of the broker's own work."""
        broker, maintenance = self._broker, self._broker.maintenance
        dead_letter_writer = broker.coordinator.dead_letter_writer
        out.one("buried_messages_total", "counter", "Messages moved to dead letter.", dead_letter_writer.buried)
        unreadable = dead_letter_writer.unreadable
        out.one("buried_unreadable_messages_total", "counter", "Of these, lost to rot: no copy was made.", unreadable)
        out.one("redriven_messages_total", "counter", "Dead letters sent back.", broker.admin.redriver.redriven)
        out.one("retired_segments_total", "counter", "Segments that retention took.", maintenance.retired_segments)
        out.one("retired_bytes_total", "counter", "Bytes of the message log in them.", maintenance.retired_bytes)
        forsaken = maintenance.forsaken
        out.one("forsaken_messages_total", "counter", "Messages taken from groups too far behind.", forsaken)
        out.one("removed_groups_total", "counter", "Groups removed because nobody used them.", maintenance.removed)
        removal = broker.admin.removal
        out.one("removed_subjects_total", "counter", "Subjects removed, unused ones too.", removal.removed_subjects)
        refused = broker.creation_rate.refused
        out.one("creations_refused_total", "counter", "Subjects not made: too many a second.", refused)

    # --- groups ------------------------------------------------------------------------------------------------------

    def _groups(self, out: MetricsText) -> None:
        coordinator = self._broker.coordinator
        # a replica may know that a subject is gone, and not its groups
        subjects = self._broker.store.messages.views.subjects
        hosts = [host for host in islice(coordinator.groups, GROUPS_MAX) if host.subject_id in subjects]
        self._look(hosts)
        out.one("groups", "gauge", "Groups, each subject counted.", len(coordinator.groups))
        out.one("groups_not_shown", "gauge", "Groups without figures below.", len(coordinator.groups) - len(hosts))
        named = [(self._names(host), host) for host in hosts if host.id in self._seen]
        for name, kind, about in _GROUP_FIGURES:
            field = name.removesuffix("_total")
            figures = [(labels, getattr(self._seen[host.id], field)) for labels, host in named]
            out.family(f"group_{name}", kind, about, figures)
        dead = [(labels, self._dead[host.id]) for labels, host in named if host.id in self._dead]
        out.family("group_dead", "gauge", "Messages in the dead-letter subject, not redriven.", dead)
        members = [(labels, len(self._seen[host.id].consumers)) for labels, host in named]
        out.family("group_consumers", "gauge", "Members.", members)
        times = [
            (labels, actor) for labels, host in named if (actor := coordinator.scheduler.find(host.key)) is not None
        ]
        # An idle actor is removed and begins again at 0: a counter may do that.
        out.family(
            "group_served_seconds_total",
            "counter",
            "Time of the loop that the group had.",
            [(labels, actor.served_ns / 1e9) for labels, actor in times],
        )
        out.family(
            "group_cold_seconds_total",
            "counter",
            "Time spent on reads that missed the page cache.",
            [(labels, actor.elsewhere_ns / 1e9) for labels, actor in times],
        )

    def _names(self, host: GroupHost) -> dict[str, str]:
        subject = self._broker.store.messages.views.subjects.by_id(host.subject_id)
        return {"subject": str(subject.name), "group": str(host.name)}

    def _look(self, hosts: list[GroupHost]) -> None:
        """Describe as many groups again as there is time for, in turn."""
        self._seen = {host.id: self._seen[host.id] for host in hosts if host.id in self._seen}
        self._dead = {host.id: self._dead[host.id] for host in hosts if host.id in self._dead}
        clock, log = self._broker.clock, self._broker.store.messages
        end_ns = clock.monotonic_ns() + LOOK_NS_MAX
        for host in self._in_turn(hosts):
            now_ns = clock.monotonic_ns()
            if now_ns >= end_ns:
                break
            end = log.end_sequence(host.subject_id)
            self._seen[host.id] = host.describe(end, now_ns=now_ns, now_ms=clock.wall_ms())
            if host.main is None:  # an inbox has the dead letters of its group
                self._dead[host.id] = dead_letters_of(self._broker.coordinator, host)
            self._next += 1

    def _in_turn(self, hosts: list[GroupHost]) -> Iterator[GroupHost]:
        begin = self._next = self._next % max(len(hosts), 1)
        yield from hosts[begin:]
        yield from hosts[:begin]
