"""Free ports: none is given twice while a server may still be on its way to it."""

from __future__ import annotations

import socket

import pytest

from fairway.runtime import host
from fairway.runtime.host import free_port


def test_a_port_is_not_given_again_before_anybody_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_FIRST", 29_000)
    monkeypatch.setattr(host, "_LAST", 29_099)
    given = [free_port() for _ in range(40)]
    assert len(set(given)) == 40


def test_another_process_cannot_be_given_it_either() -> None:
    port = free_port()
    with socket.socket() as elsewhere:
        try:
            elsewhere.bind(("127.0.0.1", port))  # as `free_port` itself asks
        except OSError:
            return
    raise AssertionError(f"{port} could be taken again")


def test_a_server_can_listen_there_and_restart() -> None:
    port = free_port()
    for _ in range(2):
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)) as near:
            far, _ = server.accept()
            near.close()
            far.close()


def test_a_process_keeps_few_of_them() -> None:
    for _ in range(200):
        free_port()
    assert len(host._reserved) <= host._RESERVED_MAX
