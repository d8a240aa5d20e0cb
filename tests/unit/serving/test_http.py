"""The pages: what is answered, in what form, and to whom not."""

from __future__ import annotations

import asyncio
import re

import pytest

from fairway.broker.metrics import GROUPS_MAX
from fairway.errors import CannotListen
from fairway.serving import http
from fairway.serving.metrics import Histogram, MetricsText
from tests.support.raw import Raw
from tests.unit.broker.scene import BROKER, PORT, Scene, options_of, staged, staged_with

HTTP_PORT = 20881
WITH_HTTP = options_of(http_port=HTTP_PORT)
SAMPLE = re.compile(r'(?P<name>fairway_[a-z_]+)(\{(?P<labels>([a-z]+="[^"\n]*",?)*)\})? (?P<value>[0-9.e+-]+|\+Inf)$')


class Visitor(asyncio.Protocol):
    def __init__(self) -> None:
        self.received = b""
        self.gone = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set_result(None)


async def ask(scene: Scene, *parts: bytes) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of the answer."""
    transport, visitor = await scene.sim.net.host("visitor").connect(Visitor, BROKER, HTTP_PORT)
    for part in parts:
        transport.write(part)
        await asyncio.sleep(0.1)
    await visitor.gone
    head, _, body = visitor.received.decode().partition("\r\n\r\n")
    if not head:
        return 0, {}, ""
    first, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["Content-Length"]) == len(body)
    assert headers["Connection"] == "close"
    return int(first.split(" ")[1]), headers, body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: broker\r\nUser-Agent: test\r\n\r\n".encode()


@staged_with(WITH_HTTP)
async def test_probes_and_pages(scene: Scene) -> None:
    assert (await ask(scene, get("/livez")))[::2] == (200, "alive\n")
    assert (await ask(scene, get("/readyz?verbose")))[::2] == (200, "ready\n")
    status, _, text = await ask(scene, get("/etc/passwd"))
    assert (status, text) == (404, "there are only /metrics, /livez, /readyz\n")


@staged_with(WITH_HTTP)
async def test_a_request_may_come_byte_by_byte(scene: Scene) -> None:
    head = get("/livez")
    assert (await ask(scene, *(head[at : at + 1] for at in range(len(head)))))[0] == 200


@staged_with(WITH_HTTP)
async def test_what_is_no_get_is_refused(scene: Scene) -> None:
    status, headers, _ = await ask(scene, b"POST /livez HTTP/1.1\r\n\r\n")
    assert (status, headers["Allow"]) == (405, "GET")
    for nonsense in (
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /livez HTTP/2\r\n\r\n",
        b"\xff\x00 \xfe x\r\n\r\n",
        b"GET / HTTP/1.1 x\r\n\r\n",
    ):
        assert (await ask(scene, nonsense))[0] == 400
    assert (await ask(scene, b"GET /\xff HTTP/1.1\r\n\r\n"))[0] == 404


@staged_with(WITH_HTTP)
async def test_a_head_without_an_end_is_refused(scene: Scene) -> None:
    assert (await ask(scene, b"GET /livez HTTP/1.1\r\n" + b"x" * http.HEAD_BYTES_MAX))[0] == 400


@staged_with(WITH_HTTP)
async def test_whoever_is_slow_is_cut_off_and_a_probe_gets_in_before_that(scene: Scene) -> None:
    net = scene.sim.net.host("visitor")
    slow = [(await net.connect(Visitor, BROKER, HTTP_PORT))[1] for _ in range(http.CONNECTIONS_MAX)]
    begun = asyncio.get_running_loop().time()
    assert (await ask(scene, get("/livez")))[0] == 200
    assert [each.gone.done() for each in slow] == [True] + [False] * (http.CONNECTIONS_MAX - 1), "the oldest made room"
    await asyncio.gather(*(each.gone for each in slow))
    assert asyncio.get_running_loop().time() - begun < http.CONNECTION_S_MAX + 1
    assert (await ask(scene, get("/livez")))[0] == 200


@staged_with(WITH_HTTP)
async def test_who_has_asked_keeps_its_place_before_who_has_not(scene: Scene) -> None:
    net = scene.sim.net.host("visitor")
    transport, reader = await net.connect(Visitor, BROKER, HTTP_PORT)
    transport.pause_reading()  # the oldest of all, and its answer is on its way
    transport.write(get("/metrics"))
    await asyncio.sleep(0.1)
    idle = [(await net.connect(Visitor, BROKER, HTTP_PORT))[1] for _ in range(2 * http.CONNECTIONS_MAX)]
    await asyncio.sleep(0.1)
    assert sum(each.gone.done() for each in idle) >= http.CONNECTIONS_MAX
    transport.resume_reading()
    await reader.gone
    assert reader.received.startswith(b"HTTP/1.1 200 OK")


@staged_with(WITH_HTTP)
async def test_who_does_not_read_its_answer_makes_room_where_all_have_asked(scene: Scene) -> None:
    net = scene.sim.net.host("visitor")
    for _ in range(2 * http.CONNECTIONS_MAX):
        transport, _ = await net.connect(Visitor, BROKER, HTTP_PORT)
        transport.pause_reading()
        transport.write(get("/metrics"))
        await asyncio.sleep(0.01)
    assert (await ask(scene, get("/livez")))[0] == 200


@staged_with(WITH_HTTP)
async def test_a_broker_that_stops_is_alive_but_not_ready(scene: Scene) -> None:
    lingering = await Raw.connect(scene.sim.net.host("lingering"), BROKER, PORT)
    lingering.stop_reading()  # it never hears the goodbye
    stopping = asyncio.create_task(scene.broker.stop())
    await asyncio.sleep(1)
    assert (await ask(scene, get("/readyz")))[::2] == (503, "stopping\n")
    assert (await ask(scene, get("/livez")))[0] == 200
    await stopping
    scene.disk = scene.disk.crash_process()
    await scene.start()


@staged_with(WITH_HTTP)
async def test_every_line_of_the_metrics_is_in_the_format(scene: Scene) -> None:
    worker = await scene.worker("ann")
    await scene.send(b"a", b"bc")
    handed = await worker.pull()
    await worker.ack(handed)
    status, headers, text = await ask(scene, get("/metrics"))
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert text.endswith("\n")
    typed: set[str] = set()
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            typed.add(line.split(" ")[2])
            continue
        found = SAMPLE.match(line)
        assert found, line
        assert re.sub("_(bucket|sum|count)$", "", found["name"]) in typed or found["name"] in typed
        values[line.rsplit(" ", 1)[0]] = float(found["value"])
    assert values["fairway_produced_messages_total"] == 2
    assert values["fairway_pulled_messages_total"] == 2
    assert values["fairway_settled_messages_total"] == 2
    assert values['fairway_group_lag{subject="orders",group="billing"}'] == 0
    assert values["fairway_connections"] == 2
    assert values['fairway_buffered_bytes{what="waiting"}'] == 0
    assert values["fairway_groups_not_shown"] == 0
    assert values['fairway_sync_seconds_count{log="messages"}'] == values['fairway_syncs_total{log="messages"}'] > 0


@staged
async def test_nothing_is_served_unless_asked_for(scene: Scene) -> None:
    assert scene.broker.http_url is None


def test_a_port_that_is_taken_stops_the_start() -> None:
    async def story(scene: Scene) -> None:
        with pytest.raises(CannotListen):
            await scene.broker._listeners._net.listen(asyncio.Protocol, BROKER, HTTP_PORT)

    Scene("taken", WITH_HTTP).play(story)


def test_labels_are_escaped_and_histograms_add_up() -> None:
    out = MetricsText()
    out.family("odd", "gauge", "About.", [({"name": 'a"b\\c\nd'}, 0.5)])
    times = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        times.note(value)
    out.histogram_ms("time", "About.", {"x": times})
    assert out.text().splitlines()[2:] == [
        r'fairway_odd{name="a\"b\\c\nd"} 0.5',
        "# HELP fairway_time About.",
        "# TYPE fairway_time histogram",
        'fairway_time_bucket{log="x",le="0.001"} 2',
        'fairway_time_bucket{log="x",le="0.002"} 3',
        'fairway_time_bucket{log="x",le="+Inf"} 4',
        'fairway_time_sum{log="x"} 0.012',
        'fairway_time_count{log="x"} 4',
    ]


@staged_with(WITH_HTTP)
async def test_groups_beyond_the_bound_are_counted_not_shown(scene: Scene) -> None:
    client = await scene.connect()
    for number in range(GROUPS_MAX + 3):
        await client.join("orders", f"group-{number}", "ann")
    _, _, text = await ask(scene, get("/metrics"))
    assert "fairway_groups_not_shown 3\n" in text
    assert text.count("fairway_group_lag{") == GROUPS_MAX
