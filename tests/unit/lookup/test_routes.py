"""Routes that keep themselves fresh: what is asked, when, and what is known meanwhile."""

from __future__ import annotations

from fairway.errors import Code, Refused
from fairway.lookup.routes import DOUBT_MS, LOOK_SUBJECTS_MAX, POLL_SUBJECTS, Routes
from fairway.protocol.line import Answer, Ask, ConnectionLost
from fairway.protocol.route_messages import ClientRole, GroupRoute, Route, Routed, SubjectRoute
from fairway.runtime.rng import SeededRng

MS = 1_000_000


def group(name: str, master: str = "a:1", epoch: int = 1) -> GroupRoute:
    return GroupRoute(name, "broker", epoch, master, [], is_writable=bool(master))


def subject(name: str, *groups: str) -> SubjectRoute:
    return SubjectRoute(name, list(groups), list(groups))


class Stage:
    """A `Routes` on a line that is open, with room for as much as it likes."""

    def __init__(self, asker: ClientRole = ClientRole.CONSUMER, *wanted: str) -> None:
        self.changes = 0
        self.now_ns = 0
        self.routes = Routes(asker, SeededRng(1), self._changed, may_create=asker is ClientRole.PRODUCER)
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

    def answer(
        self,
        ask: Ask,
        version: int,
        subjects: list[SubjectRoute],
        groups: list[GroupRoute],
        *,
        joined: int = 0,
        polls_max: int = 0,
    ) -> None:
        routed = Routed(version, subjects, groups, joined=joined, polls_max=polls_max)
        self.routes.answered(ask.token, Answer(routed), self.now_ns)

    def polling(self) -> Ask:
        """Looked up, and in its long poll."""
        look, _ = self.one()
        self.answer(look, 7, [subject("orders", "g1")], [group("g1")])
        poll, _ = self.one()
        return poll


def test_what_is_wanted_is_looked_up_at_once_and_polled_for_from_then_on() -> None:
    stage = Stage(ClientRole.PRODUCER, "orders")
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
    stage = Stage(ClientRole.CONSUMER, "orders")
    poll = stage.polling()
    stage.answer(poll, 9, [subject("orders", "g1", "g2")], [group("g1", "b:2", 2), group("g2")])
    assert stage.changes == 2
    assert stage.routes.groups == {"g1": group("g1", "b:2", 2), "g2": group("g2")}
    assert stage.one()[1].known == 9


def test_a_poll_that_tells_nothing_changes_nothing() -> None:
    stage = Stage(ClientRole.CONSUMER, "orders")
    stage.answer(stage.polling(), 9, [], [])
    assert stage.changes == 1
    assert stage.routes.subject("orders") == subject("orders", "g1")
    assert stage.one()[1].known == 9


def test_a_subject_that_comes_later_is_looked_up_alone_and_joins_the_poll() -> None:
    stage = Stage(ClientRole.CONSUMER, "orders")
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
    stage = Stage(ClientRole.CONSUMER, "orders")
    old = stage.polling()
    stage.routes.want("mails")
    look, _ = stage.one()
    stage.answer(look, 8, [subject("mails", "g2")], [group("g2")])
    stage.answer(old, 20, [subject("orders", "g3")], [group("g3")])  # mails may have changed at 9
    assert stage.one()[1].known == 7


def test_a_lost_connection_leaves_what_is_known_and_everything_is_asked_anew() -> None:
    stage = Stage(ClientRole.CONSUMER, "orders")
    poll = stage.polling()
    stage.routes.answered(poll.token, ConnectionLost("gone"), 0)
    assert stage.routes.group("g1") == group("g1")
    assert list(stage.routes.asks(0, 0)) == []
    stage.routes.opened(0)
    _, asked = stage.one()
    assert (asked.subjects, asked.known, asked.wait_ms) == (["orders"], 0, 0)


def test_an_answer_of_the_connection_before_is_nobodys() -> None:
    stage = Stage(ClientRole.CONSUMER, "orders")
    look, _ = stage.one()
    stage.routes.opened(0)
    stage.answer(look, 99, [subject("orders", "g9")], [group("g9")])
    assert stage.routes.subject("orders") is None


def test_a_doubt_leads_to_another_look_but_not_to_a_flood_of_them() -> None:
    stage = Stage(ClientRole.CONSUMER, "orders")
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
    stage = Stage(ClientRole.CONSUMER, "orders")
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
    stage = Stage(ClientRole.CONSUMER, "orders")
    assert list(stage.routes.asks(0, 5)) == []
    assert stage.routes.next_deadline() is None


def test_what_is_forgotten_takes_its_groups_along() -> None:
    stage = Stage(ClientRole.CONSUMER, "orders", "mails")
    look, _ = stage.one()
    stage.answer(look, 2, [subject("orders", "g1"), subject("mails", "g1", "g2")], [group("g1"), group("g2")])
    stage.routes.forget("mails")
    assert list(stage.routes.groups) == ["g1"]
    assert stage.one()[1].subjects == ["orders"]


def test_many_subjects_are_looked_up_a_part_at_a_time() -> None:
    names = [f"s{number}" for number in range(LOOK_SUBJECTS_MAX + 10)]
    stage = Stage(ClientRole.CONSUMER, *names)
    look, asked = stage.one()
    assert asked.subjects == names[:LOOK_SUBJECTS_MAX]
    stage.answer(look, 5, [subject(name, "g1") for name in asked.subjects], [group("g1")])
    look, asked = stage.one()
    assert asked.subjects == names[LOOK_SUBJECTS_MAX:]
    stage.answer(look, 6, [subject(name, "g1") for name in asked.subjects], [group("g1")])
    _, asked = stage.one()
    assert (asked.subjects, asked.known) == (names, 5)


def test_a_program_that_begins_with_subject_after_subject_does_not_name_all_of_them_for_each() -> None:
    stage = Stage(ClientRole.PRODUCER)
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


# --- meta servers that know several polls -----------------------------------------------------------------------------


class ManyPolls:
    """A meta server that knows poll numbers: it holds polls, lets subjects join them, and tells of changes."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.version = 7
        self.polls: dict[int, tuple[Ask, set[str]]] = {}
        self.named = 0  # subjects in all requests

    def serve(self) -> None:
        """Answer look-ups until nothing is left to ask, and keep the polls."""
        while asks := self.stage.asks():
            for ask in asks:
                assert isinstance(ask.message, Route)
                self.named += len(ask.message.subjects)
                if ask.message.wait_ms:
                    self._park(ask, ask.message)
                else:
                    self._look_up(ask, ask.message)

    def _park(self, ask: Ask, route: Route) -> None:
        before = self.polls.pop(route.poll, None)
        if before is not None:
            self.stage.answer(before[0], self.version, [], [], polls_max=4)
        self.polls[route.poll] = (ask, set(route.subjects))

    def _look_up(self, ask: Ask, route: Route) -> None:
        joined = route.poll if route.poll in self.polls else 0
        if joined:
            self.polls[joined][1].update(route.subjects)
        told = [subject(name, "g1") for name in route.subjects]
        self.stage.answer(ask, self.version, told, [group("g1")], joined=joined, polls_max=4)

    def change(self, name: str, *groups: str) -> None:
        self.version += 1
        for number, (ask, names) in [*self.polls.items()]:
            if name in names:
                del self.polls[number]
                told = [group(each) for each in groups]
                self.stage.answer(ask, self.version, [subject(name, *groups)], told, polls_max=4)


def test_a_subject_joins_a_poll_that_waits_by_its_look_up() -> None:
    stage = Stage(ClientRole.PRODUCER, "orders")
    server = ManyPolls(stage)
    server.serve()
    assert {number: names for number, (_, names) in server.polls.items()} == {1: {"orders"}}
    for number in range(400):
        stage.routes.want(f"s{number}")
        server.serve()
    assert server.named == 402, "each subject once, and the first one in its poll"
    server.change("s7", "g2")
    assert stage.routes.subject("s7") == subject("s7", "g2")
    server.serve()
    assert len(server.polls[1][1]) == 401
    ask, _ = server.polls[1]
    assert isinstance(ask.message, Route)
    assert ask.message.known == 8


def test_many_subjects_are_in_polls_of_a_bounded_size() -> None:
    stage = Stage(ClientRole.CONSUMER, *(f"s{number}" for number in range(3 * POLL_SUBJECTS)))
    server = ManyPolls(stage)
    server.serve()
    assert sorted(server.polls) == [1, 2, 3]
    assert {len(names) for _, names in server.polls.values()} == {POLL_SUBJECTS}
    for number in range(2 * POLL_SUBJECTS):
        stage.routes.want(f"t{number}")
        server.serve()
    assert sorted(server.polls) == [1, 2, 3, 4], "the server allows four: the last one holds the rest"
    assert len(server.polls[4][1]) == 2 * POLL_SUBJECTS


def test_a_poll_that_was_answered_before_the_look_up_is_asked_again_with_the_new_subject() -> None:
    stage = Stage(ClientRole.PRODUCER, "orders")
    server = ManyPolls(stage)
    server.serve()
    stage.routes.want("mails")
    look, asked = stage.one()
    assert asked.poll == 1
    server.change("orders", "g2")
    stage.answer(look, 8, [subject("mails", "g1")], [group("g1")], polls_max=4)
    _, asked = stage.one()
    assert (asked.subjects, asked.known, asked.poll) == (["orders", "mails"], 8, 1)


def test_a_subject_that_could_not_join_does_not_let_the_poll_go_on_without_it() -> None:
    stage = Stage(ClientRole.PRODUCER, "orders")
    server = ManyPolls(stage)
    server.serve()
    stage.routes.want("mails")
    look, _ = stage.one()
    stage.answer(look, 8, [subject("mails", "g1")], [group("g1")], polls_max=4)  # there was no room
    server.version = 12
    server.change("orders", "g2")
    _, asked = stage.one()
    assert (asked.subjects, asked.known) == (["orders", "mails"], 7), "mails may have changed since 8"


def test_another_meta_server_may_know_no_poll_numbers() -> None:
    stage = Stage(ClientRole.PRODUCER, *(f"s{number}" for number in range(2 * POLL_SUBJECTS)))
    ManyPolls(stage).serve()
    stage.routes.opened(0)
    for _ in range(2):
        look, asked = stage.one()
        stage.answer(look, 3, [subject(name, "g1") for name in asked.subjects], [group("g1")])
    _, asked = stage.one()
    assert (len(asked.subjects), asked.poll) == (2 * POLL_SUBJECTS, 0)
    assert stage.asks() == []
