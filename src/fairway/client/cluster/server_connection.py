"""The interface of a connection to one server, common to the blocking and the asyncio client."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from fairway.client.core import ClientCore
from fairway.client.url import BrokerAddress
from fairway.protocol.producer_session import ProducerSession


class Linked(Protocol):
    """A link, driven by a thread or by a loop."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def stir(self) -> None: ...

    def pump(self) -> None: ...

    def check(self) -> None: ...

    def redirect(self, addresses: Sequence[BrokerAddress], leader: BrokerAddress | None) -> None: ...


class ServerConnection(Protocol):
    """A line, its sessions and its link."""

    @property
    def core(self) -> ClientCore[Any, Any]: ...

    @property
    def producing(self) -> ProducerSession[Any, Any]: ...

    @property
    def link(self) -> Linked: ...


ConnectionT = TypeVar("ConnectionT", bound=ServerConnection)
