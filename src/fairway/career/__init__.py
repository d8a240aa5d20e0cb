"""Careers: leader election for programs. One of many candidates works at a time, and hands over in order.

    candidate            `Career` and `AioCareer`, the class that a user writes; `Leadership`, which a career sees;
                         `elect` and `elect_async`: a candidate in a thread, or on an event loop
    state_machine        the candidate's next step, as a table; no I/O
    election             the interface of an election, an election with a thread, and one within a process
    zookeeper_election   an election on ZooKeeper
    meta_election        an election at a meta server

The election calls the candidate's core when something changes: elected, confirmed, suspended, lost. The candidate asks
the core for the next duty, and carries it out: campaign, inaugurate, execute, hand over, resign.
"""

from __future__ import annotations

from fairway.career.candidate import AioCandidacy, AioCareer, Candidacy, Career, Leadership, elect, elect_async
from fairway.career.election import Election, ElectionListener, LocalBallot, LocalElection
from fairway.career.meta_election import MetaElection
from fairway.career.state_machine import Confirmation
from fairway.career.zookeeper_election import ElectionFailed, ZooKeeperElection

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
