"""Messages to a meta server: routes of subjects, decisions of operators, and the registry that a meta server keeps."""

from __future__ import annotations

import enum

from fairway.protocol.messages import ControlMessage, Natural


class ClientRole(enum.IntEnum):
    """The asker. The answer depends on it: delayed messages go to delay servers, all others to brokers."""

    PRODUCER = 1
    CONSUMER = 2
    SCHEDULER = 3  # a producer of delayed messages
    TOOL = 4  # gets everything


class Route(ControlMessage, frozen=True):
    """Ask where these subjects are. With `known`, ask only for changes since; the answer comes on a change, or in time.

    A request that waits for a change is a poll. A second request with the same asker and poll number over the same
    connection replaces the waiting poll, which the server answers at once. A request with a poll number that does not
    wait adds its subjects to the poll of that number instead.
    """

    asker: ClientRole
    subjects: list[str]  # empty: all, for tools, by name, as many as an answer holds
    known: Natural = 0  # `version` of an answer about all of these; 0: none, answer at once
    wait_ms: Natural = 0
    may_create: bool = False  # assign an unknown subject to broker groups, where policy allows it
    after: str = ""  # when asking for all subjects: those behind this name
    poll: Natural = 0  # above 0 only if `polls_max` of an answer allows it


class Copy(ControlMessage, frozen=True):
    """One copy of a group, for people and tools."""

    directory: str  # hex
    address: str  # HOST:PORT; empty: the copy is away
    role: str = ""  # master, follower, catching up, waiting, away
    epoch: Natural = 0
    ends: list[Natural] = []  # noqa: RUF012  (msgspec copies an empty default)  # of its logs, as it last reported
    is_in_sync: bool = False
    program: str = ""
    http_port: Natural | None = None
    load: dict[str, float] = {}  # noqa: RUF012
    started_ms: Natural = 0


class GroupRoute(ControlMessage, frozen=True):
    """One broker group, or one group of delay servers: copies of the same logs, whose master answers."""

    name: str
    kind: str  # "broker" or "delay"
    epoch: Natural
    master: str  # HOST:PORT; empty while there is no master
    replicas: list[str]  # HOST:PORT of the others that are alive
    is_writable: bool  # whether the group takes messages
    why: str = ""  # if not writable: the reason
    is_draining: bool = False
    min_in_sync: Natural = 1
    copies: list[Copy] = []  # noqa: RUF012  # for tools only


class SubjectRoute(ControlMessage, frozen=True):
    """One subject. Without groups: no subject has that name, and `why` says what can be done."""

    name: str
    groups: list[str]  # broker groups that hold messages of the subject, all to be consumed from
    writable: list[str]  # groups that take new messages; of a dead group's companions only those that are alive
    is_read_only: bool = False  # by an operator
    is_ordered: bool = False  # a key stays with one broker group
    paused: list[str] = []  # noqa: RUF012  # consumer groups that are paused
    why: str = ""  # where no group is writable: the reason
    options: dict[str, str] = {}  # noqa: RUF012


class Routed(ControlMessage, frozen=True):
    """The routes that were asked for, with the groups that those subjects name."""

    version: Natural  # of the meta server's whole state: at one meta server the version only grows
    subjects: list[SubjectRoute]
    groups: list[GroupRoute]
    is_old: bool = False  # the registry cannot be reached, and this is its last known state
    metas: list[str] = []  # noqa: RUF012  # for tools: the meta servers that are alive
    has_more: bool = False  # when asking for all subjects: ask again behind the last one
    joined: Natural = 0  # the poll that reports changes of these subjects from this version on; 0: none does
    polls_max: Natural = 0  # poll numbers that an asker may use on one connection, from 1 on; older servers: none


class RouteChange(enum.IntEnum):
    """A change of a subject or of a group of servers."""

    CREATE = 1  # a subject: on `groups`, or on `number` of them, chosen by load (0: as the policy says)
    EXTEND = 2  # a subject: to `groups` as well, or until it is on `number` groups
    RETREAT = 3  # a subject: no new messages to `groups`; what they hold is consumed
    READ_ONLY = 4  # a subject; `is_on`
    PAUSE = 5  # `groups` of consumers on a subject; `is_on`
    OPTIONS = 6  # a subject: `options`; an empty value removes an option
    DRAIN = 7  # a group of servers: no new messages to it; `is_on`
    DECOMMISSION = 8  # a group of servers: remove it from the registry, or only the copies named in `groups`
    PROMOTE = 9  # a group of servers: another master, the copy named in `groups`, or one that is in sync
    REMOVE = 10  # a subject: remove it from the registry; all broker groups remove its messages first


class Govern(ControlMessage, frozen=True):
    """Ask for one change by an operator. A repeated request changes nothing more."""

    change: RouteChange
    name: str  # of the subject, or of the group of servers
    groups: list[str] = []  # noqa: RUF012
    number: Natural = 0
    is_on: bool = True
    is_forced: bool = False  # although messages or data would be lost
    options: dict[str, str] = {}  # noqa: RUF012


class Governed(ControlMessage, frozen=True):
    """The change is in the registry."""

    sentence: str  # the change, for people; empty: there was nothing to change
    groups: list[str] = []  # noqa: RUF012  # of the subject, from now on


class Act(enum.IntEnum):
    """An operation on the registry that a meta server keeps."""

    OPEN = 1  # a session: `value` names it, `number` is its time-out in ms; answered with its id
    TOUCH = 2  # keep the session alive
    CLOSE = 3
    GET = 4
    CHILDREN = 5
    CREATE = 6
    PUT = 7
    REMOVE = 8
    WATCH = 9  # answered when the node or its children are no longer as at `number`, or after `wait_ms`
    FEED = 10  # answered with changes below the node since `number`, or after `wait_ms`; with feature FEED only


class Register(ControlMessage, frozen=True):
    """One request to the registry."""

    act: Act
    session: Natural
    path: str = ""
    value: bytes = b""
    number: Natural = 0  # the expected version plus one (0: any); or as the act defines
    is_ephemeral: bool = False
    is_numbered: bool = False
    wait_ms: Natural = 0


class Registered(ControlMessage, frozen=True):
    """The answer; an error is in `trouble`: exists, missing, stale, over."""

    trouble: str = ""
    path: str = ""
    value: bytes = b""
    version: Natural = 0
    owner: Natural = 0
    children: list[str] = []  # noqa: RUF012  # of FEED: paths
    number: Natural = 0
    exists: bool = False  # of FEED: these are all changes since then; otherwise anything may have changed
