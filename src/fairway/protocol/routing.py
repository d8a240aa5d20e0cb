"""What is asked of a meta server: where subjects are, and the registry that it keeps for those who have no other."""

from __future__ import annotations

import enum

from fairway.protocol.messages import ControlMessage, Natural


class ClientRole(enum.IntEnum):
    """Who asks. The answer depends on it: delayed messages go to delay servers, everything else to brokers."""

    PRODUCER = 1
    CONSUMER = 2
    SCHEDULER = 3  # a producer of delayed messages
    TOOL = 4  # wants to know of everything


class Route(ControlMessage, frozen=True):
    """Where are these subjects? With `known`, only what has changed since; answered when something has, or in time.

    A question that waits for a change is a poll. A second question with the same asker and poll number over the same
    connection replaces the poll that waits, which the server answers at once. A question with a poll number that does
    not wait adds its subjects to the poll of that number instead.
    """

    asker: ClientRole
    subjects: list[str]  # empty: all, for tools, by name, as many as an answer holds
    known: Natural = 0  # `version` of an answer about all of these; 0: none, answer at once
    wait_ms: Natural = 0
    may_create: bool = False  # a subject that nobody knows is assigned to broker groups, where policy allows it
    after: str = ""  # of all subjects: those behind this name
    poll: Natural = 0  # above 0 only where `polls_max` of an answer allows it


class Copy(ControlMessage, frozen=True):
    """One copy of a group, for people and their tools."""

    directory: str  # hex
    address: str  # HOST:PORT; empty: it is away
    role: str = ""  # master, follower, catching up, waiting, away
    epoch: Natural = 0
    ends: list[Natural] = []  # noqa: RUF012  (msgspec copies an empty default)  # of its logs, as it said last
    is_in_sync: bool = False
    program: str = ""
    http_port: Natural | None = None
    load: dict[str, float] = {}  # noqa: RUF012
    started_ms: Natural = 0


class GroupRoute(ControlMessage, frozen=True):
    """One broker group, or one group of delay servers: several copies of the same logs, one of which answers."""

    name: str
    kind: str  # "broker" or "delay"
    epoch: Natural
    master: str  # HOST:PORT; empty while there is none
    replicas: list[str]  # HOST:PORT of the others that live
    is_writable: bool  # whether it takes messages
    why: str = ""  # if not: what is wrong
    is_draining: bool = False
    min_in_sync: Natural = 1
    copies: list[Copy] = []  # noqa: RUF012  # for tools only


class SubjectRoute(ControlMessage, frozen=True):
    """One subject. Without groups: there is none of that name, and `why` says what can be done."""

    name: str
    groups: list[str]  # broker groups that hold messages of it, all of them to be consumed from
    writable: list[str]  # those that new messages go to; of a dead group's fellows only those that live
    is_read_only: bool = False  # by command
    is_ordered: bool = False  # a key stays with one broker group
    paused: list[str] = []  # noqa: RUF012  # consumer groups that are switched off
    why: str = ""  # where nothing is writable: what is wrong
    options: dict[str, str] = {}  # noqa: RUF012


class Routed(ControlMessage, frozen=True):
    """What the meta server knows of what was asked for, with the groups that those subjects name."""

    version: Natural  # of the whole picture: it only grows, as long as one meta server is asked
    subjects: list[SubjectRoute]
    groups: list[GroupRoute]
    is_old: bool = False  # the registry cannot be reached: this is how it was
    metas: list[str] = []  # noqa: RUF012  # for tools: the meta servers that live
    has_more: bool = False  # of all subjects: ask again behind the last one
    joined: Natural = 0  # the poll that tells of changes of these subjects from this version on; 0: none does
    polls_max: Natural = 0  # poll numbers that an asker may use on one connection, from 1 on; older servers: none


class RouteChange(enum.IntEnum):
    """What is to become of a subject or of a group of servers."""

    CREATE = 1  # a subject: on `groups`, or on `number` of them, chosen by load (0: as the policy says)
    EXTEND = 2  # a subject: to `groups` as well, or to as many that it is `number` in all
    RETREAT = 3  # a subject: no new messages to `groups`; what they hold is consumed
    READ_ONLY = 4  # a subject; `is_on`
    PAUSE = 5  # `groups` of consumers on a subject; `is_on`
    OPTIONS = 6  # a subject: `options`; an empty value takes one away
    DRAIN = 7  # a group of servers: no new messages to it; `is_on`
    DECOMMISSION = 8  # a group of servers: forget it, or only the copies named in `groups`
    PROMOTE = 9  # a group of servers: another master, the copy named in `groups`, or one that is in sync
    REMOVE = 10  # a subject: forget it; its messages are removed before, on all broker groups


class Govern(ControlMessage, frozen=True):
    """One decision of an operator. Asked twice, it leaves things as if it had been asked once."""

    change: RouteChange
    name: str  # of the subject, or of the group of servers
    groups: list[str] = []  # noqa: RUF012
    number: Natural = 0
    is_on: bool = True
    is_forced: bool = False  # although something would be lost by it
    options: dict[str, str] = {}  # noqa: RUF012


class Governed(ControlMessage, frozen=True):
    """Done: it is in the registry."""

    sentence: str  # what was changed, for people; empty: it was so already
    groups: list[str] = []  # noqa: RUF012  # of the subject, from now on


class Act(enum.IntEnum):
    """What to do with the registry that a meta server keeps."""

    OPEN = 1  # a session: `value` names it, `number` is its time-out in ms; answered with its id
    TOUCH = 2  # keep it alive
    CLOSE = 3
    GET = 4
    CHILDREN = 5
    CREATE = 6
    PUT = 7
    REMOVE = 8
    WATCH = 9  # answered when the node or its children are no longer as at `number`, or after `wait_ms`
    FEED = (
        10  # answered with what has changed below the node since `number`, or after `wait_ms`; with feature FEED only
    )


class Register(ControlMessage, frozen=True):
    """One question to the registry."""

    act: Act
    session: Natural
    path: str = ""
    value: bytes = b""
    number: Natural = 0  # the version expected, plus one (0: any); or what the act says
    is_ephemeral: bool = False
    is_numbered: bool = False
    wait_ms: Natural = 0


class Registered(ControlMessage, frozen=True):
    """The answer; what went wrong is in `trouble`: exists, missing, stale, over."""

    trouble: str = ""
    path: str = ""
    value: bytes = b""
    version: Natural = 0
    owner: Natural = 0
    children: list[str] = []  # noqa: RUF012  # of FEED: paths
    number: Natural = 0
    exists: bool = False  # of FEED: these are all changes since then; else anything may have changed
