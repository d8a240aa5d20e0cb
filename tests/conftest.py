"""Settings for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest

# No deadline: a noisy machine is not a failure. The blob replays a failure elsewhere.
hypothesis.settings.register_profile("fairway", deadline=None, print_blob=True)
hypothesis.settings.load_profile("fairway")

# Whatever starts programs in the background of a shell has them ignore Ctrl-C, and their children too. Tests that
# interrupt somebody would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# --- databases: real ones, started when the first test needs them ----------------------------------------------------

_SERVERS = {"postgres_url": "postgresql", "mariadb_url": "mariadb"}


@pytest.hookimpl(wrapper=True)  # before pytest-xdist looks at the groups, in a hook of the same name, and after it has
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Tests of one server go to one process of `make test`, so that it is started once."""
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("xdist_group") is None:
            asked = item.callspec.params.get("database_url") if hasattr(item, "callspec") else None
            names = {asked, *(_SERVERS.get(name) for name in item.fixturenames)}
            for server in ("mariadb", "postgresql"):  # who needs both goes to the one that takes longer to start
                if server in names:
                    item.add_marker(pytest.mark.xdist_group(server))
                    break
    yield
    # pytest-xdist 3.8 writes the group behind the test's name in `_nodeid`. Since pytest 9.2 that is not where the name
    # is, and no group has any effect.
    for item in items:
        named = item.__dict__.get("_nodeid")
        if named is not None and named != item.nodeid:
            item._id = type(item.id).parse(named)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL. Its commits wait for no disk: programs are killed here, but nobody cuts its power."""
    from tests.support.databases import postgresql  # most tests need no database

    with postgresql(is_durable=False) as url:
        yield url


@pytest.fixture(scope="session")
def mariadb_url() -> Iterator[str]:
    """A MariaDB; the same."""
    from tests.support.databases import mariadb

    with mariadb(is_durable=False) as url:
        yield url


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """A test that leaves a handler behind is found here, not by another test that waits for its own signal for ever."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
