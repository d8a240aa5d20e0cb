"""A subject whose name a disk has lost: its messages can be read, and mix with nobody else's."""

from __future__ import annotations

import pytest

from fairway.errors import Code, Refused
from fairway.names import Subject
from tests.unit.storage.helpers import World, messages

LOST = Subject.nameless(1)


@pytest.mark.parametrize("name", ["nameless-1", "nameless-9999999", "nameless-1-2"])
def test_nobody_creates_a_subject_of_such_a_name(name: str) -> None:
    with World() as world:
        before = world.store.messages.log.end
        with pytest.raises(Refused, match="would stand for a subject whose name is lost") as caught:
            world.send([b"x"], Subject.parse(name))
        assert caught.value.code is Code.BAD_NAME
        with pytest.raises(Refused):
            world.store.ensure_subject(Subject.parse(name))
        assert world.store.messages.log.end == before


@pytest.mark.parametrize("name", ["nameless", "nameless-x", "nameless-1-2-3", "x-nameless-1", "Nameless-1"])
def test_names_that_only_look_like_it_are_anybodys(name: str) -> None:
    with World() as world:
        world.produce([b"x"], Subject.parse(name))
        assert messages(world.store, Subject.parse(name)) == {0: b"x"}


def test_nobody_sends_to_a_subject_whose_name_is_lost() -> None:
    with World() as world:
        world.produce([b"a"])
        subjects = world.store.messages.views.subjects
        state = subjects.by_id(1)
        subjects.cut(0)
        lost = subjects.advance(state.id, state.next_sequence)
        assert lost.name == LOST
        with pytest.raises(Refused, match="nameless-1 stands for a subject whose name is lost: it can only be read"):
            world.send([b"b"], LOST)
        assert messages(world.store, LOST) == {0: b"a"}


def test_a_subject_of_an_early_version_takes_messages_as_before() -> None:
    with World() as world:
        subjects, log = world.store.messages.views.subjects, world.store.messages.log
        state = subjects.introduce(Subject("nameless-7"), log.end)
        world.produce([b"a"], Subject("nameless-7"))
        assert messages(world.store, Subject("nameless-7")) == {0: b"a"}
        assert not state.nameless
