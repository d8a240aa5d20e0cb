"""Each test on each database. The servers are started by `tests/conftest.py`, when the first test needs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.databases import fresh
from tests.support.outboxes import Up
from tests.support.outboxes import up as running


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'test.db'}"
    server = "postgres_url" if request.param == "postgresql" else "mariadb_url"
    return fresh(request.getfixturevalue(server))


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    """The same, for SQLAlchemy."""
    made = sa.create_engine(database_url)
    yield made
    made.dispose()


@pytest.fixture
def lite(tmp_path: Path) -> Iterator[sa.Engine]:
    """For what need not be shown on each of them. It waits for others to let go of the file."""
    made = sa.create_engine(f"sqlite:///{tmp_path / 'lite.db'}", connect_args={"timeout": 30})
    yield made
    made.dispose()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A broker with its delay server, for all tests of a module: each test has subjects of its own."""
    with running(tmp_path_factory.mktemp("up") / "data") as started:
        yield started


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> str:
    return f"s.{request.node.name.replace('[', '.').replace(']', '')}"[:150]
