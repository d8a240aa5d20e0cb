"""One broker for each module: its tests use subjects of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.cli.running import Cli, up


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with up(tmp_path_factory.mktemp("broker") / "data", "--low-water-mib", "64") as (_, url):
        yield Cli(url)
