"""Two broker groups of one broker each, and a meta server that says what a test tells it to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import fairway
from fairway.protocol.route_messages import GroupRoute, SubjectRoute
from tests.support.stub_server import FakeMeta, group
from tests.unit.client.broker import WAIT_S, Running, running


class Cluster:
    """Groups are named a, b, ...; every subject is on both of the first two, unless told otherwise."""

    def __init__(self, brokers: dict[str, Running], meta: FakeMeta) -> None:
        self.brokers = brokers
        self.meta = meta
        meta.new_subject = lambda name: SubjectRoute(name, [*brokers], [*brokers])

    @property
    def url(self) -> str:
        return self.meta.url

    def all_up(self) -> list[GroupRoute]:
        return [group(name, broker.port) for name, broker in self.brokers.items()]

    def mend(self) -> None:
        for broker in self.brokers.values():
            if not broker.is_running:
                broker.start()
        self.meta.is_mute = False
        self.meta.tell(*self.all_up())


@contextmanager
def clustered(data: Path, *names: str) -> Iterator[Cluster]:
    with ExitStack() as stack:
        brokers = {name: stack.enter_context(running(data / name)) for name in names or ("a", "b")}
        meta = stack.enter_context(FakeMeta())
        made = Cluster(brokers, meta)
        meta.tell(*made.all_up())
        yield made


def stored(broker: Running, subject: str) -> list[bytes]:
    with fairway.connect(broker.url) as direct:
        try:
            return [payload for page in direct.scan(subject) for payload in page.batch.payloads]
        except fairway.Refused:
            return []


def fill(cluster: Cluster, subject: str, count: int) -> None:
    """So many messages to each group."""
    for broker in cluster.brokers.values():
        with fairway.connect(broker.url) as direct:
            direct.send_many(subject, [b"x"] * count).result(WAIT_S)
    cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"]))
