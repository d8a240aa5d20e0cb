"""beanstalkd over a plain socket: `put` with a delay, a few hundred at a time before the answers are read; `reserve`.

A delay is in whole seconds and counts from when the server reads it, so a message is taken to be due two seconds after
it was written to the socket. Workers have asked for their next job when one is due.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

from bench.peers.driving import PAYLOAD, Driver, Gate, Result, Task
from bench.peers.due import FAR_S, IDLE_S_MAX, LEAD_S, count_of, due_us_of, now_us, payload_of, ticks

PIPELINE = 500
WORKERS = 4  # threads, a connection each
ASK = b"reserve-with-timeout 1\r\n"


class Line:
    """A connection; lines are answered in order."""

    def __init__(self, task: Task, tube: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", task.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(IDLE_S_MAX)
        self._file = self._socket.makefile("rb", buffering=1 << 16)
        self.write(f"use {tube}\r\nwatch {tube}\r\n".encode())
        self.answer(b"USING")
        self.answer(b"WATCHING")

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self, word: bytes) -> bytes:
        line = self._file.readline()
        if not line.startswith(word):
            raise RuntimeError(f"beanstalkd says {line.decode().strip() or 'nothing'} instead of {word.decode()}")
        return line

    def job(self) -> tuple[bytes, bytes] | None:
        """The id and body of the next one that was reserved; None: there was none for a second."""
        words = self.answer(b"").split()
        return None if words == [b"TIMED_OUT"] else (words[1], self._file.read(int(words[2]) + 2)[:-2])

    def put(self, payloads: list[bytes], delay_s: int) -> None:
        """All of them, then their answers."""
        self.write(b"".join(b"put 1 %d 60 %d\r\n%b\r\n" % (delay_s, len(each), each) for each in payloads))
        for _ in payloads:
            self.answer(b"INSERTED")


def pump(line: Line, until_s: float) -> int:
    sent = 0
    while time.perf_counter() < until_s:
        line.put([PAYLOAD] * PIPELINE, FAR_S)
        sent += PIPELINE
    return sent


def schedule(task: Task, gate: Gate) -> Result:
    pump(Line(task, "warm"), time.perf_counter() + task.warm_s)
    line = Line(task, task.subject)
    start_s = gate.open()
    sent = pump(line, start_s + task.seconds)
    return gate.result(sent)


def schedule_paced(task: Task, gate: Gate) -> Result:
    line = Line(task, task.subject)
    gate.open()
    for send_s, dues in ticks(task):
        time.sleep(max(0.0, send_s - time.monotonic()))
        due_us = now_us() + LEAD_S * 1_000_000
        line.put([payload_of(due_us)] * len(dues), LEAD_S)
    return gate.result(count_of(task))


def receive_due(task: Task, gate: Gate) -> Result:
    in_hand: list[int] = []
    lines = [Line(task, task.subject) for _ in range(WORKERS)]
    gate.open()
    heard_s = [time.monotonic()]

    def work(line: Line) -> None:
        line.write(ASK)
        while len(in_hand) < count_of(task) and time.monotonic() < heard_s[0] + IDLE_S_MAX:
            job = line.job()
            if job is None:
                line.write(ASK)
                continue
            in_hand.append(now_us() - due_us_of(job[1]))
            heard_s[0] = time.monotonic()
            line.write(b"delete %b\r\n%b" % (job[0], ASK))
            line.answer(b"DELETED")

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, lines))
    return gate.result(len(in_hand), in_hand)


DRIVERS: dict[str, Driver] = {
    "schedule_many": schedule,
    "schedule_each": schedule,
    "schedule_paced": schedule_paced,
    "receive_due": receive_due,
}
