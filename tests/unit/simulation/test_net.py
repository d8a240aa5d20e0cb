"""The faults of the simulated net, and what it leaves to the seed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.errors import CannotListen, InvariantViolated, Misuse, Unreachable
from fairway.limits import KIB
from fairway.simulation import Simulation, simulate
from fairway.simulation.loop import Deadlock
from fairway.simulation.net import CONNECT_S_MAX, UNSENT_BYTES_MAX, SimNet
from fairway.simulation.wire import Conditions
from tests.unit.runtime.recorder import Door, Recorder, until

PORT = 9_000
SEEDS = range(8)


async def meet(net: SimNet, door: Door | None = None, client: str = "client") -> tuple[Recorder, Recorder]:
    """A connection from a client to the server: its ends at the client and at the server."""
    door = door or Door()
    listener = await net.host("server").listen(door, "", PORT)
    _, near = await net.host(client).connect(Recorder, "server", PORT)
    await until(lambda: door.guests and door.guests[-1].events)
    listener.close()
    return near, door.guests[-1]


def run(seed: int, main: Any, **options: Any) -> Any:
    return simulate(main, seed, **options).result


# --- what the seed decides -------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=30), st.integers(0, 10**6), st.integers(1, 500))
def test_bytes_keep_their_order_however_they_are_cut(writes: list[bytes], seed: int, window_bytes: int) -> None:
    async def main(world: Simulation) -> tuple[bytes, list[str]]:
        near, far = await meet(world.net)
        for data in writes:
            near.transport.write(data)
            await asyncio.sleep(world.rng.below(3) / 10_000)
        near.transport.close()
        await until(lambda: near.lost and far.lost)
        return far.data, far.events

    data, events = run(seed, main, conditions=Conditions(window_bytes=window_bytes))
    assert data == b"".join(writes)
    assert events[-2:] == ["eof_received", "connection_lost"]


def test_writes_are_split_and_merged_in_ways_that_the_seed_decides() -> None:
    async def main(world: Simulation) -> tuple[int, ...]:
        near, far = await meet(world.net)
        for _ in range(10):
            near.transport.write(b"x" * 100)
        await until(lambda: len(far.data) == 1_000)
        return tuple(map(len, far.chunks))

    cuts = [run(seed, main) for seed in range(20)]
    assert cuts == [run(seed, main) for seed in range(20)]
    assert len(set(cuts)) > 10
    assert any(size < 100 for cut in cuts for size in cut)
    assert any(size > 100 for cut in cuts for size in cut)


def test_a_net_that_is_not_choppy_costs_fewer_events_and_loses_nothing() -> None:
    writes = [bytes([number]) * 700 for number in range(100)]  # more than a window, in all

    async def main(world: Simulation) -> int:
        near, far = await meet(world.net)
        for data in writes:
            near.transport.write(data)
            await asyncio.sleep(0.001)
        await until(lambda: len(far.data) == 70_000)
        assert far.data == b"".join(writes)
        return world.loop.steps

    smooth = Conditions(is_choppy=False, told_bytes=32 * KIB)
    for seed in SEEDS:
        assert run(seed, main, conditions=smooth) < 0.8 * run(seed, main)


def test_arrivals_on_different_connections_come_in_an_order_that_the_seed_decides() -> None:
    async def main(world: Simulation) -> bytes:
        arrived: list[bytes] = []

        class Post(Recorder):
            def data_received(self, data: bytes) -> None:
                arrived.append(data)

        await world.net.host("server").listen(Post, "", PORT)
        ends = [await world.net.host(name).connect(Recorder, "server", PORT) for name in "abcd"]
        for name, (transport, _) in zip(b"abcd", ends, strict=True):
            transport.write(bytes([name]))
        await until(lambda: len(arrived) == 4)
        return b"".join(arrived)

    assert len({run(seed, main) for seed in range(20)}) > 8


def test_latency_is_what_the_conditions_say() -> None:
    async def main(world: Simulation) -> float:
        near, far = await meet(world.net)
        start = world.loop.time()
        near.transport.write(b"x")
        await until(lambda: far.data)
        return world.loop.time() - start

    slow = Conditions(latency_us=50_000, jitter_us=20_000)
    for seed in SEEDS:
        assert 0.050 <= run(seed, main, conditions=slow) <= 0.0721


def test_conditions_may_change_and_nonsense_is_refused() -> None:
    async def main(world: Simulation) -> None:
        near, far = await meet(world.net)
        world.net.set_conditions(Conditions(latency_us=1_000_000))
        near.transport.write(b"x")
        await asyncio.sleep(0.9)
        assert far.data == b""
        await until(lambda: far.data)

    run(1, main)
    for nonsense in (
        {"latency_us": -1},
        {"window_bytes": 0},
        {"drop_chance": 1.5},
        {"told_bytes": 0},
        {"told_bytes": 40_000},
    ):
        with pytest.raises(Misuse, match="no net is like this"):
            Conditions(**nonsense)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_slow_reader_bounds_the_memory_of_a_writer_that_heeds_the_pause() -> None:
    class Heeding(Recorder):
        written = most = 0

        def fill(self) -> None:
            while not self.events or self.events[-1] != "pause_writing":
                self.transport.write(b"z" * 10 * KIB)
                self.written += 10 * KIB
                self.most = max(self.most, self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            super().resume_writing()
            self.fill()

    async def main(world: Simulation) -> None:
        door = Door()
        await world.net.host("server").listen(door, "", PORT)
        _, writer = await world.net.host("client").connect(Heeding, "server", PORT)
        await until(lambda: door.guests)
        reader = door.guests[0]
        writer.fill()
        for _ in range(50):
            reader.transport.pause_reading()
            await asyncio.sleep(60)
            under_way = writer.written - len(reader.data)
            assert under_way <= (64 + 10 + 64) * KIB, "high water, one write, the window"
            reader.transport.resume_reading()
            await asyncio.sleep(0.005)
        assert writer.most <= (64 + 10) * KIB
        assert len(reader.data) > 1_000 * KIB

    for seed in SEEDS:
        run(seed, main)


def test_a_writer_that_does_not_heed_the_pause_is_found_out() -> None:
    async def main(world: Simulation) -> None:
        near, far = await meet(world.net)
        far.transport.pause_reading()
        near.transport.write(bytes(UNSENT_BYTES_MAX))
        near.transport.write(bytes(65 * KIB))

    with pytest.raises(InvariantViolated, match="pause_writing is not heeded"):
        run(1, main)


# --- partitions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_stall_in_a_partition_and_arrive_after_it(seed: int) -> None:
    async def main(world: Simulation) -> None:
        near, far = await meet(world.net)
        world.net.partition("client", "server")
        near.transport.write(b"there")
        far.transport.write(b"back")
        await asyncio.sleep(3_600)
        assert near.data == far.data == b""
        world.net.heal("client", "server")
        await until(lambda: near.data == b"back" and far.data == b"there")

    run(seed, main)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_partition_may_be_one_way(seed: int) -> None:
    async def main(world: Simulation) -> None:
        near, far = await meet(world.net)
        world.net.partition("client", "server", one_way=True)
        near.transport.write(b"there")
        far.transport.write(b"back")
        await asyncio.sleep(60)
        assert (near.data, far.data) == (b"back", b"")
        world.net.heal("client", "server", one_way=True)
        await until(lambda: far.data == b"there")

    run(seed, main)


def test_without_acknowledgements_a_one_way_sender_comes_to_a_halt() -> None:
    async def main(world: Simulation) -> None:
        near, far = await meet(world.net)
        world.net.partition("server", "client", one_way=True)
        near.transport.write(bytes(100_000))
        await asyncio.sleep(60)
        assert len(far.data) == 64 * KIB
        world.net.heal("client", "server")
        await until(lambda: len(far.data) == 100_000)

    run(1, main)


def test_a_partition_that_comes_and_goes_loses_and_doubles_nothing() -> None:
    async def main(world: Simulation) -> None:
        near, far = await meet(world.net)
        sent = bytearray()
        for number in range(200):
            data = b"%d," % number
            near.transport.write(data)
            sent += data
            (world.net.partition if number % 2 else world.net.heal)("client", "server")
            await asyncio.sleep(world.rng.below(10) / 10_000)
        world.net.heal("client", "server")
        near.transport.close()
        await until(lambda: far.lost)
        assert far.data == sent

    for seed in SEEDS:
        run(seed, main)


@pytest.mark.parametrize(("source", "destination"), [("client", "server"), ("server", "client")])
def test_a_dial_into_a_partition_times_out(source: str, destination: str) -> None:
    async def main(world: Simulation) -> None:
        door = Door()
        await world.net.host("server").listen(door, "", PORT)
        world.net.host("client")
        world.net.partition(source, destination, one_way=True)
        with pytest.raises(Unreachable, match="no answer in 127 s"):
            await world.net.host("client").connect(Recorder, "server", PORT)
        assert world.loop.time() == pytest.approx(CONNECT_S_MAX, abs=0.01)
        world.net.heal(source, destination)
        await asyncio.sleep(1)
        assert all(guest.lost for guest in door.guests)

    for seed in SEEDS:
        run(seed, main)


def test_a_dial_outlasts_a_short_partition_and_can_be_cut_short() -> None:
    async def main(world: Simulation) -> None:
        door = Door()
        await world.net.host("server").listen(door, "", PORT)
        client = world.net.host("client")
        world.net.partition("client", "server")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await client.connect(Recorder, "server", PORT)
        world.loop.call_later(10, world.net.heal, "client", "server")
        transport, _ = await client.connect(Recorder, "server", PORT)
        assert world.loop.time() == pytest.approx(15, abs=0.01)
        await until(lambda: door.guests)
        assert len([guest for guest in door.guests if not guest.lost]) == 1
        transport.close()

    for seed in SEEDS:
        run(seed, main)


# --- broken connections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dropped_connection_is_reset_at_both_ends_once(seed: int) -> None:
    async def main(world: Simulation) -> None:
        near, far = await meet(world.net)
        near.transport.write(bytes(1_000_000))
        world.net.drop(far.transport)
        assert not near.lost
        assert not far.lost
        await until(lambda: near.lost and far.lost)
        assert isinstance(near.problem, ConnectionResetError)
        assert isinstance(far.problem, ConnectionResetError)
        near.transport.write(b"ignored")
        near.transport.close()
        await asyncio.sleep(1)
        assert near.events.count("connection_lost") == far.events.count("connection_lost") == 1

    run(seed, main)


def test_all_connections_of_a_host_can_be_dropped_and_the_others_stay() -> None:
    async def main(world: Simulation) -> None:
        door = Door()
        for name in ("a", "b", "c"):
            await meet(world.net, door, client=name)
        world.net.drop("b")
        await asyncio.sleep(1)
        assert [guest.lost for guest in door.guests] == [False, True, False]
        world.net.drop("server")
        await until(lambda: all(guest.lost for guest in door.guests))
        world.net.drop("server")

    run(1, main)


def test_connections_break_by_themselves_when_the_conditions_say_so() -> None:
    async def main(world: Simulation) -> int:
        await world.net.host("server").listen(Recorder, "", PORT)
        broken = 0
        for _ in range(100):
            try:
                transport, near = await world.net.host("client").connect(Recorder, "server", PORT)
            except Unreachable:
                broken += 1
                continue
            transport.write(b"x")
            await asyncio.sleep(0.1)
            broken += near.lost
            transport.close()
        return broken

    assert 5 < run(1, main, conditions=Conditions(drop_chance=0.05)) < 40


@pytest.mark.parametrize("seed", SEEDS)
def test_writing_to_an_end_that_is_gone_resets_the_writer(seed: int) -> None:
    async def main(world: Simulation) -> None:
        near, far = await meet(world.net, Door(keep_open=True))
        near.transport.close()
        await until(lambda: near.lost and "eof_received" in far.events)
        assert not far.lost
        far.transport.write(b"anybody there?")
        await until(lambda: far.lost)
        assert isinstance(far.problem, ConnectionResetError)

    run(seed, main)


# --- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crashed_host_is_reset_from_outside_and_silent_inside(seed: int) -> None:
    async def main(world: Simulation) -> None:
        near, far = await meet(world.net)
        await world.net.host("server").listen(Recorder, "", PORT)
        near.transport.write(b"on its way")
        world.net.crash("server")
        heard = list(far.events)
        far.transport.write(b"from beyond")
        far.transport.close()
        await until(lambda: near.lost)
        assert isinstance(near.problem, ConnectionResetError)
        with pytest.raises(Unreachable, match="refused"):
            await world.net.host("client").connect(Recorder, "server", PORT)
        await asyncio.sleep(3_600)
        assert far.events == heard
        assert near.data == b""

    run(seed, main)


def test_a_restarted_host_takes_its_old_ports() -> None:
    async def main(world: Simulation) -> None:
        before = world.net.host("server")
        await before.listen(Recorder, "", PORT)
        assert world.net.host("server") is before
        world.net.crash("server")
        after = world.net.host("server")
        assert after is not before
        door = Door()
        await after.listen(door, "", PORT)
        await world.net.host("client").connect(Recorder, "server", PORT)
        await until(lambda: door.guests)

    run(1, main)


def test_the_code_of_a_crashed_host_does_not_run_on() -> None:
    async def dial(world: Simulation) -> None:
        await world.net.host("client").connect(Recorder, "server", PORT)

    async def main(world: Simulation) -> None:
        client = world.net.host("client")
        await world.net.host("server").listen(Recorder, "", PORT)
        dialing = asyncio.create_task(dial(world))
        await asyncio.sleep(0.000_05)
        world.net.crash("client")
        for doomed in (dialing, asyncio.create_task(dial_from(client)), asyncio.create_task(listen_on(client))):
            done, _ = await asyncio.wait([doomed], timeout=3_600)
            assert not done
        await dialing

    async def dial_from(host: Any) -> None:
        await host.connect(Recorder, "server", PORT)

    async def listen_on(host: Any) -> None:
        await host.listen(Recorder, "", PORT)

    with pytest.raises(Deadlock, match="_stand_still_if_crashed"):
        run(1, main)


def test_a_crash_in_a_partition_is_noticed_after_it() -> None:
    async def main(world: Simulation) -> None:
        near, _ = await meet(world.net)
        world.net.partition("client", "server")
        world.net.crash("server")
        await asyncio.sleep(3_600)
        assert not near.lost
        world.net.heal("client", "server")
        await until(lambda: near.lost)

    run(1, main)


# --- names and ports -------------------------------------------------------------------------------------------------


def test_loopback_is_the_host_itself_and_nobody_else() -> None:
    async def main(world: Simulation) -> None:
        door = Door()
        server = world.net.host("server")
        await server.listen(door, "127.0.0.1", PORT)
        await server.connect(Recorder, "localhost", PORT)
        await server.connect(Recorder, "server", PORT)
        with pytest.raises(Unreachable, match="refused"):
            await world.net.host("client").connect(Recorder, "server", PORT)
        with pytest.raises(CannotListen, match="not an address of server"):
            await server.listen(door, "client", PORT + 1)

    run(1, main)


def test_free_ports_come_round_again_and_skip_those_in_use() -> None:
    async def main(world: Simulation) -> None:
        server = world.net.host("server")
        listener = await server.listen(Recorder, "", 0)
        assert all(server.free_port() != listener.port for _ in range(20_000))

    run(1, main)


def test_what_does_not_exist_cannot_be_harmed() -> None:
    async def main(world: Simulation) -> None:
        net = world.net
        net.host("a")
        for harm in (net.crash, net.drop):
            with pytest.raises(Misuse, match="no host 'b'"):
                harm("b")
        with pytest.raises(Misuse, match="no host 'b'"):
            net.partition("a", "b")
        with pytest.raises(Misuse, match="parted from itself"):
            net.partition("a", "a")
        with pytest.raises(Misuse, match="every host itself"):
            net.host("localhost")
        with pytest.raises(Misuse, match="not a connection"):
            net.drop(asyncio.Transport())

    run(1, main)


def test_a_protocol_may_be_replaced_by_another_protocol_only() -> None:
    async def main(world: Simulation) -> None:
        near, far = await meet(world.net)
        successor = Recorder()
        successor.connection_made(near.transport)
        near.transport.set_protocol(successor)
        assert near.transport.get_protocol() is successor
        far.transport.write(b"x")
        await until(lambda: successor.data == b"x")
        with pytest.raises(TypeError):
            near.transport.set_protocol(asyncio.BufferedProtocol())

    run(1, main)


def test_exceptions_of_protocols_fail_the_run() -> None:
    class Clumsy(Recorder):
        def eof_received(self) -> bool:
            raise LookupError("at the end")

        def pause_writing(self) -> None:
            raise LookupError("at the pause")

    def no_protocol() -> Recorder:
        raise LookupError("at the door")

    async def main(world: Simulation) -> None:
        server, client = world.net.host("server"), world.net.host("client")
        door = Door()
        await server.listen(door, "", PORT)
        await server.listen(no_protocol, "", PORT + 1)
        await client.connect(Recorder, "server", PORT + 1)
        _, near = await client.connect(Clumsy, "server", PORT)
        near.transport.write(bytes(1_000_000))
        await until(lambda: door.guests and len(door.guests[0].data) == 1_000_000)
        door.guests[0].transport.write_eof()
        await until(lambda: near.lost)

    with pytest.raises(ExceptionGroup) as caught:
        run(1, main)
    assert [str(each) for each in caught.value.exceptions] == ["at the door", "at the pause", "at the end"]
