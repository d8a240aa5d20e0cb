"""The contract of `Net`: the same tests on real sockets (asyncio, uvloop) and in simulation under several seeds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest

from fairway.errors import CannotListen, Misuse, Unreachable
from fairway.runtime.host import free_port
from fairway.runtime.net import Net, RealNet
from fairway.simulation import simulate
from tests.unit.runtime.recorder import Door, Recorder, until

MIB = 1 << 20


@dataclass(frozen=True)
class Pair:
    """Two hosts; the server is reached at `address`."""

    server: Net
    client: Net
    address: str

    async def meet(self, door: Door) -> tuple[Recorder, Recorder]:
        """A connection: its ends at the client and at the server."""
        listener = await self.server.listen(door, self.address, 0)
        _, near = await self.client.connect(Recorder, self.address, listener.port)
        await until(lambda: door.guests and door.guests[-1].events)
        listener.close()
        await listener.wait_closed()
        return near, door.guests[-1]


Scenario: TypeAlias = Callable[[Pair], Coroutine[Any, Any, None]]


def on_real_sockets(scenario: Scenario, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scenario(Pair(RealNet(), RealNet(), "127.0.0.1"))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def in_simulation(scenario: Scenario, seed: int) -> None:
    simulate(lambda world: scenario(Pair(world.net.host("server"), world.net.host("client"), "server")), seed)


@pytest.fixture(params=["asyncio", "uvloop", *(f"seed {seed}" for seed in range(5))])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    kind: str = request.param
    if kind == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        return lambda scenario: on_real_sockets(scenario, uvloop.new_event_loop)
    if kind == "asyncio":
        return lambda scenario: on_real_sockets(scenario, asyncio.new_event_loop)
    return lambda scenario: in_simulation(scenario, int(kind.removeprefix("seed ")))


Run: TypeAlias = Callable[[Scenario], None]


def test_bytes_arrive_both_ways_in_order(run: Run) -> None:
    there = b"".join(b"%d," % number for number in range(20_000))
    back = b"".join(b"%d;" % number for number in range(20_000))

    async def scenario(pair: Pair) -> None:
        near, far = await pair.meet(Door())
        for start in range(0, len(there), 1_000):
            near.transport.write(there[start : start + 1_000])
        far.transport.writelines([back[:7], memoryview(back)[7:]])
        await until(lambda: far.data == there and near.data == back)
        near.transport.close()
        await until(lambda: near.lost and far.lost)

    run(scenario)


def test_made_comes_first_and_lost_once_last_and_not_from_within(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.meet(Door())
        assert near.events == ["connection_made"]
        near.transport.write(b"x")
        near.transport.close()
        near.transport.close()
        assert near.transport.is_closing()
        assert not near.lost
        await until(lambda: near.lost and far.lost)
        near.transport.abort()
        await asyncio.sleep(0.01)
        assert near.events == ["connection_made", "connection_lost"]
        assert far.events == ["connection_made", "data_received", "eof_received", "connection_lost"]
        assert near.problem is far.problem is None

    run(scenario)


def test_each_end_knows_both_names(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.meet(Door())
        assert near.transport.get_extra_info("peername") == far.transport.get_extra_info("sockname")
        assert near.transport.get_extra_info("sockname") == far.transport.get_extra_info("peername")
        assert near.transport.get_extra_info("peername")[0] == pair.address
        assert near.transport.get_extra_info("no such thing", "default") == "default"
        near.transport.close()
        await until(lambda: near.lost and far.lost)

    run(scenario)


def test_close_delivers_what_was_written(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.meet(Door())
        near.transport.write(b"m" * MIB)
        near.transport.close()
        near.transport.write(b"too late")
        await until(lambda: near.lost and far.lost)
        assert far.data.startswith(b"m" * MIB)
        assert far.problem is None

    run(scenario)


def test_one_direction_may_end_while_the_other_goes_on(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.meet(Door(keep_open=True))
        assert near.transport.can_write_eof()
        near.transport.write(b"question")
        near.transport.write_eof()
        with pytest.raises(RuntimeError):
            near.transport.write(b"more")
        await until(lambda: "eof_received" in far.events)
        assert far.data == b"question"
        far.transport.write(b"answer")
        far.transport.close()
        await until(lambda: near.lost and far.lost)
        assert near.data == b"answer"
        assert near.problem is far.problem is None

    run(scenario)


def test_a_writer_is_paused_while_the_reader_is_slow_and_resumed_after(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.meet(Door())
        far.transport.pause_reading()
        assert not far.transport.is_reading()
        written = 0
        while "pause_writing" not in near.events:
            assert written < 256 * MIB, "no kernel takes that much"
            near.transport.write(b"w" * 65_536)
            written += 65_536
        low, high = near.transport.get_write_buffer_limits()
        assert high < near.transport.get_write_buffer_size() <= high + 65_536
        await asyncio.sleep(0.05)
        assert far.data == b""
        far.transport.resume_reading()
        await until(lambda: "resume_writing" in near.events)
        assert near.transport.get_write_buffer_size() <= low
        await until(lambda: len(far.data) == written)
        assert near.events == ["connection_made", "pause_writing", "resume_writing"]
        near.transport.close()
        await until(lambda: near.lost and far.lost)

    run(scenario)


def test_the_limits_of_the_write_buffer_can_be_set(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.meet(Door())
        assert limits_after(near) == (16 * 1_024, 64 * 1_024)
        assert limits_after(near, high=1_000) == (250, 1_000)
        assert limits_after(near, low=10) == (10, 40)
        with pytest.raises(ValueError, match="high"):
            near.transport.set_write_buffer_limits(high=1, low=2)
        near.transport.close()
        await until(lambda: near.lost and far.lost)

    def limits_after(end: Recorder, **limits: int) -> object:
        end.transport.set_write_buffer_limits(**limits)
        return end.transport.get_write_buffer_limits()

    run(scenario)


def test_abort_drops_what_is_unsent_and_both_ends_hear_once(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.meet(Door())
        far.transport.pause_reading()
        near.transport.write(b"a" * 16 * MIB)
        near.transport.abort()
        assert not near.lost
        far.transport.resume_reading()
        await until(lambda: near.lost and far.lost)
        assert near.problem is None
        assert far.problem is None or isinstance(far.problem, ConnectionError)
        assert len(far.data) < 16 * MIB
        assert far.data == b"a" * len(far.data)
        assert near.events.count("connection_lost") == far.events.count("connection_lost") == 1

    run(scenario)


def test_an_address_without_a_listener_is_unreachable(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        listener = await pair.server.listen(Recorder, pair.address, 0)
        listener.close()
        await listener.wait_closed()
        with pytest.raises(Unreachable, match=f"cannot connect to {pair.address}:{listener.port}: .*[Rr]efused|Errno"):
            await pair.client.connect(Recorder, pair.address, listener.port)
        with pytest.raises(Unreachable):
            await pair.client.connect(Recorder, "x" * 64, 80)

    run(scenario)


def test_connections_outlive_their_listener_and_its_port_is_free_again(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        first, second = Door(), Door()
        listener = await pair.server.listen(first, pair.address, 0)
        _, near = await pair.client.connect(Recorder, pair.address, listener.port)
        await until(lambda: first.guests)
        listener.close()
        await listener.wait_closed()
        again = await pair.server.listen(second, pair.address, listener.port)
        assert again.port == listener.port
        near.transport.write(b"still here")
        await until(lambda: first.guests[0].data == b"still here")
        _, other = await pair.client.connect(Recorder, pair.address, again.port)
        await until(lambda: second.guests and second.guests[0].events)
        again.close()
        near.transport.close()
        other.transport.close()
        await until(lambda: first.guests[0].lost and second.guests[0].lost)

    run(scenario)


def test_a_port_that_is_taken_and_a_port_that_is_none_are_told_apart(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        listener = await pair.server.listen(Recorder, pair.address, 0)
        with pytest.raises(CannotListen, match=f"cannot listen on {pair.address}:{listener.port}"):
            await pair.server.listen(Recorder, pair.address, listener.port)
        with pytest.raises(CannotListen):
            await pair.server.listen(Recorder, "192.0.2.1", 0)
        with pytest.raises(Misuse, match="no such port: 65536"):
            await pair.server.listen(Recorder, pair.address, 65_536)
        with pytest.raises(Misuse, match="no such port: 0"):
            await pair.client.connect(Recorder, pair.address, 0)
        listener.close()
        await listener.wait_closed()

    run(scenario)


def test_a_protocol_that_raises_loses_its_connection_and_is_reported(run: Run) -> None:
    class Clumsy(Recorder):
        def data_received(self, data: bytes) -> None:
            raise LookupError("planted")

    async def scenario(pair: Pair) -> None:
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        clumsy = Clumsy()
        listener = await pair.server.listen(lambda: clumsy, pair.address, 0)
        _, near = await pair.client.connect(Recorder, pair.address, listener.port)
        near.transport.write(b"x")
        await until(lambda: near.lost and clumsy.lost)
        assert [str(each) for each in reported] == ["planted"]
        assert clumsy.problem is reported[0]
        listener.close()

    run(scenario)


def test_only_bytes_can_be_written(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.meet(Door())
        with pytest.raises(TypeError):
            near.transport.write("text")  # type: ignore[arg-type]
        near.transport.write(b"")
        near.transport.close()
        await until(lambda: near.lost and far.lost)
        assert far.data == b""

    run(scenario)


def test_a_factory_that_raises_reaches_the_caller_and_leaves_no_connection(run: Run) -> None:
    def raising() -> Recorder:
        raise LookupError("planted")

    async def scenario(pair: Pair) -> None:
        door = Door()
        listener = await pair.server.listen(door, pair.address, 0)
        with pytest.raises(LookupError, match="planted"):
            await pair.client.connect(raising, pair.address, listener.port)
        await asyncio.sleep(0.01)
        assert door.guests == []
        listener.close()

    run(scenario)


def test_a_name_for_several_addresses_gets_no_free_port_of_its_own() -> None:
    async def main() -> str:
        try:
            listener = await RealNet().listen(Recorder, "localhost", 0)
        except Misuse as problem:
            return str(problem)
        listener.close()
        return "one address"

    outcome = asyncio.run(main())
    assert outcome == "one address" or "several addresses" in outcome


@pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)
def test_a_reserved_port_that_another_program_listens_at_first_is_refused(run: Run) -> None:
    """Two programs may bind one port while neither listens; uvloop keeps the error of the second one to itself."""

    async def scenario(pair: Pair) -> None:
        first, second = RealNet(), RealNet()
        port = free_port()
        await first.reserve("127.0.0.1", port)
        await second.reserve("127.0.0.1", port)
        listener = await first.listen(Recorder, "127.0.0.1", port)
        with pytest.raises(CannotListen, match="another program listens there"):
            await second.listen(Recorder, "127.0.0.1", port)
        listener.close()
        await listener.wait_closed()

    run(scenario)


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the system keeps what it likes")
@pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)
def test_what_a_client_does_not_read_stays_where_it_is_counted(run: Run) -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.meet(Door())
        near.transport.pause_reading()
        for _ in range(4):
            far.transport.write(b"m" * MIB)
            await asyncio.sleep(0.05)
        assert far.transport.get_write_buffer_size() > 2 * MIB
        near.transport.resume_reading()
        await until(lambda: len(near.data) == 4 * MIB)
        near.transport.close()
        await until(lambda: near.lost and far.lost)

    run(scenario)
