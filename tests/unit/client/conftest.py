"""A broker for all tests of a module: each test has subjects of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fairway
from tests.unit.client.broker import Running, running


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("client") / "data") as started:
        yield started


@pytest.fixture
def client(broker: Running) -> Iterator[fairway.Client]:
    with fairway.connect(broker.url) as connected:
        yield connected


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> str:
    return f"s.{request.node.name.replace('[', '.').replace(']', '')}"[:150]
