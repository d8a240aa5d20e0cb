"""Routes that keep themselves fresh: what is asked, when, and what is known meanwhile."""

from __future__ import annotations

from fairway.errors import Code, Refused
from fairway.lookup.routes import DOUBT_MS, LOOK_SUBJECTS_MAX, Routes
from fairway.protocol.routing import Asker, GroupRoute, Route, Routed, SubjectRoute
from fairway.protocol.session import Answer, Ask, Lost
from fairway.world.rng import SeededRng

MS = 1_000_000


def group(name: str, master: str = "a:1", epoch: int = 1) -> GroupRoute:
    return GroupRoute(name, "broker", epoch, master, [], is_writable=bool(master))


def subject(name: str, *groups: str) -> SubjectRoute:
    return SubjectRoute(name, list(groups), list(groups))


class Stage:
    """A `Routes` on a line that is open, with room for as much as it likes."""

    def __init__(self, asker: Asker = Asker.CONSUMER, *wanted: str) -> None:
        self.changes = 0
        self.now_ns = 0
        self.routes = Routes(asker, SeededRng(1), self._changed, may_create=asker is Asker.PRODUCER)
        self.routes.opened(0)
        for name in wanted:
            self.routes.want(name)

    def _changed(self) -> None:
        self.changes += 1

    def asks(self, room: int = 100) -> list[Ask]:
        return list(self.routes.asks(room, self.now_ns))

    def one(self) -> tuple[Ask, Route]:
        [ask] = self.asks()
        assert isinstance(ask.message, Route)
        return ask, ask.message

    def answer(self, ask: Ask, version: int, subjects: list[SubjectRoute], groups: list[GroupRoute]) -> None:
        self.routes.answered(ask.token, Answer(Routed(version, subjects, groups)), self.now_ns)

    def polling(self) -> Ask:
        """Looked up, and in its long poll."""
        look, _ = self.one()
        self.answer(look, 7, [subject("orders", "g1")], [group("g1")])
        poll, _ = self.one()
        return poll


def test_what_is_wanted_is_looked_up_at_once_and_polled_for_from_then_on() -> None:
    stage = Stage(Asker.PRODUCER, "orders")
    assert stage.routes.subject("orders") is None
    look, asked = stage.one()
    assert (asked.subjects, asked.known, asked.wait_ms, asked.may_create) == (["orders"], 0, 0, True)
    assert stage.asks() == []
    stage.answer(look, 7, [subject("orders", "g1")], [group("g1", "a:1")])
    assert stage.changes == 1
    assert stage.routes.group("g1") == group("g1", "a:1")
    _, asked = stage.one()
    assert (asked.subjects, asked.known) == (["orders"], 7)
    assert asked.wait_ms > 0
    assert stage.asks() == []


def test_nothing_is_asked_before_anything_is_wanted() -> None:
    stage = Stage()
    assert stage.asks() == []
    assert stage.routes.next_deadline() is None


def test_a_change_is_told_and_the_next_poll_names_its_version() -> None:
    stage = Stage(Asker.CONSUMER, "orders")
    poll = stage.polling()
    stage.answer(poll, 9, [subject("orders", "g1", "g2")], [group("g1", "b:2", 2), group("g2")])
    assert stage.changes == 2
    assert stage.routes.groups == {"g1": group("g1", "b:2", 2), "g2": group("g2")}
    assert stage.one()[1].known == 9


def test_a_poll_that_tells_nothing_changes_nothing() -> None:
    stage = Stage(Asker.CONSUMER, "orders")
    stage.answer(stage.polling(), 9, [], [])
    assert stage.changes == 1
    assert stage.routes.subject("orders") == subject("orders", "g1")
    assert stage.one()[1].known == 9


def test_a_subject_that_comes_later_is_looked_up_alone_and_joins_the_poll() -> None:
    stage = Stage(Asker.CONSUMER, "orders")
    old = stage.polling()
    stage.routes.want("mails")
    look, asked = stage.one()
    assert (asked.subjects, asked.known) == (["mails"], 0)
    stage.answer(look, 12, [subject("mails", "g2")], [group("g2")])
    _, asked = stage.one()
    assert (asked.subjects, asked.known) == (["orders", "mails"], 7), "a change of orders since 7 is not known here"
    stage.answer(old, 12, [], [])  # the meta server has let go of it
    assert stage.asks() == []


def test_a_poll_about_fewer_subjects_does_not_hide_a_change_of_the_new_one() -> None:
    stage = Stage(Asker.CONSUMER, "orders")
    old = stage.polling()
    stage.routes.want("mails")
    look, _ = stage.one()
    stage.answer(look, 8, [subject("mails", "g2")], [group("g2")])
    stage.answer(old, 20, [subject("orders", "g3")], [group("g3")])  # mails may have changed at 9
    assert stage.one()[1].known == 7


def test_a_lost_connection_leaves_what_is_known_and_everything_is_asked_anew() -> None:
    stage = Stage(Asker.CONSUMER, "orders")
    poll = stage.polling()
    stage.routes.answered(poll.token, Lost("gone"), 0)
    assert stage.routes.group("g1") == group("g1")
    assert list(stage.routes.asks(0, 0)) == []
    stage.routes.opened(0)
    _, asked = stage.one()
    assert (asked.subjects, asked.known, asked.wait_ms) == (["orders"], 0, 0)


def test_an_answer_of_the_connection_before_is_nobodys() -> None:
    stage = Stage(Asker.CONSUMER, "orders")
    look, _ = stage.one()
    stage.routes.opened(0)
    stage.answer(look, 99, [subject("orders", "g9")], [group("g9")])
    assert stage.routes.subject("orders") is None


def test_a_doubt_leads_to_another_look_but_not_to_a_flood_of_them() -> None:
    stage = Stage(Asker.CONSUMER, "orders")
    stage.polling()
    stage.routes.doubt("g1")
    look, asked = stage.one()
    assert (asked.subjects, asked.known) == (["orders"], 0)
    stage.answer(look, 7, [subject("orders", "g1")], [group("g1")])
    stage.routes.doubt("g1")
    assert stage.asks() == []
    assert stage.routes.next_deadline() == DOUBT_MS * MS
    stage.now_ns = DOUBT_MS * MS
    assert stage.one()[1].subjects == ["orders"]
    stage.routes.doubt("another")
    assert stage.asks() == []


def test_a_refusal_is_shown_and_asked_again_after_a_while() -> None:
    stage = Stage(Asker.CONSUMER, "orders")
    look, _ = stage.one()
    refused = Refused(Code.BUSY, "come back", retry_after_ms=500)
    stage.routes.answered(look.token, refused, 0)
    assert (stage.routes.refused, stage.changes) == (refused, 1)
    assert stage.asks() == []
    due_ns = stage.routes.next_deadline()
    assert due_ns is not None
    assert due_ns >= 500 * MS
    stage.now_ns = due_ns
    look, _ = stage.one()
    stage.answer(look, 3, [subject("orders", "g1")], [group("g1")])
    assert stage.routes.refused is None


def test_without_a_connection_no_deadline_is_left_behind() -> None:
    stage = Stage(Asker.CONSUMER, "orders")
    assert list(stage.routes.asks(0, 5)) == []
    assert stage.routes.next_deadline() is None


def test_what_is_forgotten_takes_its_groups_along() -> None:
    stage = Stage(Asker.CONSUMER, "orders", "mails")
    look, _ = stage.one()
    stage.answer(look, 2, [subject("orders", "g1"), subject("mails", "g1", "g2")], [group("g1"), group("g2")])
    stage.routes.forget("mails")
    assert list(stage.routes.groups) == ["g1"]
    assert stage.one()[1].subjects == ["orders"]


def test_many_subjects_are_looked_up_a_part_at_a_time() -> None:
    names = [f"s{number}" for number in range(LOOK_SUBJECTS_MAX + 10)]
    stage = Stage(Asker.CONSUMER, *names)
    look, asked = stage.one()
    assert asked.subjects == names[:LOOK_SUBJECTS_MAX]
    stage.answer(look, 5, [subject(name, "g1") for name in asked.subjects], [group("g1")])
    look, asked = stage.one()
    assert asked.subjects == names[LOOK_SUBJECTS_MAX:]
    stage.answer(look, 6, [subject(name, "g1") for name in asked.subjects], [group("g1")])
    _, asked = stage.one()
    assert (asked.subjects, asked.known) == (names, 5)


def test_a_program_that_begins_with_subject_after_subject_does_not_name_all_of_them_for_each() -> None:
    stage = Stage(Asker.PRODUCER)
    named = 0
    for number in range(1_000):
        stage.now_ns += 1_000_000
        stage.routes.want(f"s{number}")
        for _ in range(3):
            for ask in stage.asks():
                assert isinstance(ask.message, Route)
                if ask.message.wait_ms:
                    named += len(ask.message.subjects)
                else:
                    stage.answer(ask, 7, [subject(each, "g1") for each in ask.message.subjects], [group("g1")])
    assert named < 30_000, "500,000 if each new subject made a poll of its own"
    due_ns = stage.routes.next_deadline()
    assert due_ns is not None
    assert due_ns <= stage.now_ns + 500_000_000
    stage.now_ns = due_ns
    assert len(stage.one()[1].subjects) == 1_000
