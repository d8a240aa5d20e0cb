"""The pictures of the documentation are what `docs/images.py` draws, and a picture that cannot be read is refused."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.tidy.source import ROOT

_spec = importlib.util.spec_from_file_location("docs_images", ROOT / "docs" / "images.py")
assert _spec is not None
assert _spec.loader is not None
images: ModuleType = importlib.util.module_from_spec(_spec)
sys.modules["docs_images"] = images  # dataclasses look their module up
_spec.loader.exec_module(images)


@pytest.mark.parametrize("name", list(images.PICTURES))
def test_each_file_is_what_is_drawn(name: str) -> None:
    drawn = images.PICTURES[name]().svg()
    assert (images.FOLDER / name).read_text(encoding="utf-8") == drawn
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_every_file_has_somebody_who_draws_it() -> None:
    assert {path.name for path in images.FOLDER.iterdir()} == set(images.PICTURES)


def too_wide() -> None:
    images.Picture("planted", 200, 100).box("log", 10, 10, 40, 40, "these words do not fit")


def overlapping() -> None:
    picture = images.Picture("planted", 200, 100)
    picture.box("log", 10, 10, 80, 40, "first")
    picture.words("second", 70, 30)


def outside() -> None:
    images.Picture("planted", 200, 100).words("beyond the edge", 150, 30)


@pytest.mark.parametrize(
    ("plant", "sentence"), [(too_wide, "is too wide"), (overlapping, "'second' lies on 'first'"), (outside, "outside")]
)
def test_a_planted_fault_is_found(plant: Callable[[], None], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plant()
