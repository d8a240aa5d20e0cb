"""A broker for all tests of a module, and a cluster for all of them: each test has subjects of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fairway
from tests.unit.client.broker import Running, running
from tests.unit.client.cluster import Cluster, clustered


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("client") / "data") as started:
        yield started


@pytest.fixture
def client(broker: Running) -> Iterator[fairway.Client]:
    with fairway.connect(broker.url) as connected:
        yield connected


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with clustered(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """Whole again after the test, whatever that does to it."""
    yield shared_cluster
    shared_cluster.mend()


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> str:
    module = request.module.__name__.rpartition(".")[2]
    return f"{module}.{request.node.name.replace('[', '.').replace(']', '')}"[:150]
