"""A server that is asked to end while it starts ends, whatever it waits for."""

from __future__ import annotations

from pathlib import Path

from fairway.protocol import ControlMessage
from fairway.protocol.route_messages import Act, Register, Registered
from fairway.runtime.process import Child
from tests.support.stub_server import Reply, StubServer

END_S = 30.0


class Absent(StubServer):
    """A registry that grants a session, and then says nothing more: it is being stopped, too."""

    def handle(self, message: ControlMessage, reply: Reply) -> None:
        assert isinstance(message, Register)
        if message.act in (Act.OPEN, Act.TOUCH):
            reply(Registered(number=1, version=6_000))


def test_a_copy_that_waits_for_its_registry_ends_when_it_is_told_to(tmp_path: Path) -> None:
    with Absent() as registry:
        where = ("--registry", f"meta://127.0.0.1:{registry.port}", "--group", "east")
        with Child("fairway", "broker", *where, "--data", str(tmp_path / "data"), "--port", "0") as child:
            assert registry.asked.wait(END_S)
            child.terminate()
            assert child.wait(timeout_s=END_S) == 0
