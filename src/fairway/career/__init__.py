"""Leader careers: one of many candidates rules at a time, and leaves in order.

law          what a candidate does next, as a table; no I/O
office       the law with a lock and a clock around it, and what a career sees of it
careers      what a user writes
candidacy    a candidate in a thread           candidacy_aio   the same on a loop
election     the port                          zookeeper, meta, local   its forms
"""

from __future__ import annotations

from fairway.career.candidacy import Candidacy
from fairway.career.candidacy_aio import AioCandidacy
from fairway.career.careers import AioCareer, Career
from fairway.career.electing import elect, elect_async
from fairway.career.election import Election, ElectionListener
from fairway.career.law import Confirmation
from fairway.career.local import LocalBallot, LocalElection
from fairway.career.meta import MetaElection
from fairway.career.office import Leadership
from fairway.career.zookeeper import ElectionFailed, ZooKeeperElection

__all__ = [
    "AioCandidacy",
    "AioCareer",
    "Candidacy",
    "Career",
    "Confirmation",
    "Election",
    "ElectionFailed",
    "ElectionListener",
    "Leadership",
    "LocalBallot",
    "LocalElection",
    "MetaElection",
    "ZooKeeperElection",
    "elect",
    "elect_async",
]
