"""One suite, three forms."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from tests.unit.lookup.remote_form import on_meta_server
from tests.unit.registry import forms
from tests.unit.registry.forms import Form


@pytest.fixture(
    params=["simulated", "sqlite", "remote", pytest.param("zookeeper", marks=pytest.mark.xdist_group("zookeeper"))]
)
def form(request: pytest.FixtureRequest, tmp_path: Path) -> Form:
    match request.param:
        case "simulated":
            return forms.simulated
        case "sqlite":
            return partial(forms.on_sqlite, tmp_path / "meta")
        case "remote":
            return partial(on_meta_server, tmp_path / "meta")
        case _:
            return partial(forms.on_zookeeper, re.sub(r"\W", "-", request.node.name))
