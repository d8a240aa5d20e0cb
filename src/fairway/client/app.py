"""`fairway.App`: runs handlers for messages until the program is asked to end, and loses nothing on the way.

    app = fairway.App("fairway://127.0.0.1:20880")

    @app.listener("order.changed", group="hotel", concurrency=8)
    def on_change(message: fairway.Message) -> None: ...

    app.run()                                          until SIGTERM: finish messages in hand, ack, leave

Each listener is one consumer. Plain functions run in `concurrency` threads, and each thread takes one message after the
other. `async def` handlers run in as many tasks, on a loop of their own. `handler_results` says how the end of a
handler settles its messages.

The client renews the lease of a message for as long as its handler runs, even for an hour. If all workers of a listener
are busy for a second, the messages that wait behind them go back to the other consumers.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack

from fairway.client.aio.client import AioClient
from fairway.client.aio.consumer import AioConsumer
from fairway.client.client_log import ClientLog, shown_on_stderr
from fairway.client.core import ClientOptions, Duration, seconds_of
from fairway.client.handler_results import is_surprise, settle
from fairway.client.idempotence import Guarded, Idempotence
from fairway.client.sync.client import Client
from fairway.client.sync.consumer import Consumer
from fairway.client.taken_messages import ConsumerSettings, options_of
from fairway.errors import Misuse
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.delivery import Message, is_last_attempt
from fairway.runtime.clock import RealClock
from fairway.runtime.host import Ending
from fairway.runtime.net import RealNet
from fairway.runtime.rng import RealRng
from fairway.runtime.threads import Workers

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

DRAIN_S = 30.0  # handlers have so long to finish; orchestrators wait as long
BATCH_MAX = 1_000  # messages in one call of a batch handler, by default
_BUSY_NS = 1_000_000_000  # when all workers are busy for so long, waiting messages go back to other consumers
_TICK_S = 0.25
_FOR_EVER_S = 10 * 365 * 86_400.0

_log = logging.getLogger("fairway.app")


@dataclass
class Listener:
    """One handler, and the way it gets its messages."""

    handler: Callable[..., Any]
    options: ConsumerOptions
    concurrency: int
    batch_max: int  # 0: one by one
    idempotent: Idempotence | None = None
    taken_ns: int = 0  # when a worker last took a message

    def __post_init__(self) -> None:
        self.call: Guarded = self._call
        if self.idempotent is not None:
            self.call = self.idempotent.guard(self.handler, is_async=self.is_async, is_batch=self.batch_max > 0)

    def _call(self, messages: Sequence[Message]) -> Any:
        return self.handler(messages if self.batch_max else messages[0])

    @property
    def name(self) -> str:
        return f"{self.options.subject}/{self.options.group}"

    @property
    def description(self) -> str:
        """The listener, as the log describes it."""
        worker = "task" if self.is_async else "thread"
        workers = f"{self.concurrency} {worker}{'s' if self.concurrency > 1 else ''}"
        batches = f", lists of up to {self.batch_max}" if self.batch_max else ""
        handler = getattr(self.handler, "__name__", "handler")
        return f"listener {handler}: subject {self.options.subject}, group {self.options.group}, {workers}{batches}"

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.handler)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `client.consumer`."""
        return {name: getattr(self.options, name) for name in ConsumerOptions.__dataclass_fields__}


class App:
    """A program of listeners. Most programs call `run` alone; `start` and `stop` are for programs that do more."""

    def __init__(self, url: str, *, options: ClientOptions | None = None, drain: Duration = DRAIN_S) -> None:
        self.url = url
        self._options = options
        self._drain_s = seconds_of(drain)
        self._clock = RealClock()
        self.listeners: list[Listener] = []
        self._ending = Ending()
        self._workers = Workers()
        self._client: Client | None = None
        self._consumers: list[tuple[Listener, Consumer]] = []
        self._failure: BaseException | None = None
        self._is_stopping = False
        self._client_log = ClientLog(_log)

    def listener(
        self,
        subject: str,
        *,
        group: str,
        concurrency: int = 1,
        batch: bool = False,
        batch_max: int = BATCH_MAX,
        idempotent: Idempotence | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> Callable[[HandlerT], HandlerT]:
        """Handle the messages of a subject as a member of a group, up to `concurrency` at a time.

        With `batch=True` the handler gets lists of up to `batch_max` messages. With `idempotent`, such as
        `fairway.sql.SqlInbox(engine)`, the effect of a message happens once, however often the message comes. The other
        settings are those of `Client.consumer`.
        """
        if concurrency < 1 or batch_max < 1:
            raise Misuse(f"concurrency={concurrency}, batch_max={batch_max}: both are at least 1")
        if concurrency > 1 and settings.get("order") == "strict":
            raise Misuse(f"order='strict' is one message after the other: concurrency is 1, not {concurrency}")
        consuming = options_of(subject, group, settings)

        def register(handler: HandlerT) -> HandlerT:
            if self._client is not None:
                raise Misuse("this app runs already: register its listeners first")
            self.listeners.append(Listener(handler, consuming, concurrency, batch_max if batch else 0, idempotent))
            return handler

        return register

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Handle messages until SIGTERM or SIGINT. Then finish messages in hand, within the drain time, and leave.

        Raises the error that has ended a listener, for example because another program took its consumer's name. The
        log goes to stderr, unless the program has set up Python's logging itself.
        """
        with shown_on_stderr():
            restore = self._ending.on_signals()
            try:
                self.start()
                while not self._ending.wait(_TICK_S):
                    self._relieve(self._consumers)
            finally:
                restore()
                self.stop()
        if self._failure is not None:
            raise self._failure

    def start(self) -> None:
        """Begin to handle messages, in threads of this app. The app waits for a broker that is away."""
        if not self.listeners:
            raise Misuse("this app has no listeners: decorate a handler with @app.listener(subject, group=...)")
        if self._client is not None:
            raise Misuse("this app has been started before: make another")
        for listener in self.listeners:
            _log.info("%s", listener.description)
        self._client = Client(self.url, self._options, log=self._client_log)
        for listener in self.listeners:
            if not listener.is_async:
                self._start_threads(self._client, listener)
        if any(each.is_async for each in self.listeners):
            self._workers.start_loop("fairway-handlers", self._serve_async)

    def stop(self) -> None:
        """End. Handlers finish their messages within the drain time; unfinished messages are handed back."""
        is_first, self._is_stopping = self._client is not None and not self._is_stopping, True
        if is_first:
            _log.info("stopping: handlers have %g s to finish what they have begun", self._drain_s)
        self._ending.ask()
        for _, consumer in self._consumers:
            consumer.stop()
        unfinished = self._workers.join(self._drain_s)
        if unfinished:
            _log.warning("still busy after %g s, their messages are handed back: %s", self._drain_s, unfinished)
        for _, consumer in self._consumers:
            consumer.close()
        if self._client is not None:
            self._client.close()
        if is_first:
            _log.info("stopped")

    def _relieve(self, served: Iterable[tuple[Listener, Consumer | AioConsumer]]) -> None:
        """Give back the waiting messages of each listener whose workers have all been busy for long."""
        now_ns = self._clock.monotonic_ns()
        for listener, consumer in served:
            if now_ns - listener.taken_ns > _BUSY_NS:
                consumer.rest()

    # --- plain functions ---------------------------------------------------------------------------------------------

    def _start_threads(self, client: Client, listener: Listener) -> None:
        consumer = client.consumer(**listener.settings)
        self._consumers.append((listener, consumer))
        for index in range(listener.concurrency):
            self._workers.start(f"{listener.name}-{index}", lambda: self._work(listener, consumer))

    def _work(self, listener: Listener, consumer: Consumer) -> None:
        """Handle message after message, in one thread."""
        with self._ends_on_failure(listener.name):
            if listener.batch_max:
                while messages := consumer.take(listener.batch_max):
                    self.handle(listener, messages)
            else:
                for message in consumer:
                    self.handle(listener, (message,))

    def handle(self, listener: Listener, messages: Sequence[Message]) -> None:
        """Call a handler with its messages, one or many, and settle them by the handler's end."""
        listener.taken_ns = self._clock.monotonic_ns()
        try:
            listener.call(messages)
        except BaseException as error:
            _failed(listener, messages, error)
            if not isinstance(error, Exception):
                raise
        else:
            settle(messages, None)

    # --- coroutines --------------------------------------------------------------------------------------------------

    async def _serve_async(self) -> None:
        """Serve all listeners with `async def` handlers, on one loop."""
        with self._ends_on_failure("async listeners"):
            world = RealNet(), RealClock(), RealRng()
            client = AioClient(self.url, _FOR_EVER_S, self._options, *world, log=self._client_log)
            opening = asyncio.ensure_future(client.open())
            while not opening.done() and not self._ending.is_asked:
                await asyncio.wait([opening], timeout=_TICK_S)
            if opening.done():
                opening.result()
                await self._work_until_asked(client)
            else:
                opening.cancel()

    async def _work_until_asked(self, client: AioClient) -> None:
        served = [(each, client.consumer(**each.settings)) for each in self.listeners if each.is_async]
        tasks = [
            asyncio.create_task(self._work_async(listener, consumer))
            for listener, consumer in served
            for _ in range(listener.concurrency)
        ]
        while not self._ending.is_asked:
            await asyncio.sleep(_TICK_S)
            self._relieve(served)
        await self._end_async(client, [consumer for _, consumer in served], tasks)

    async def _end_async(
        self, client: AioClient, consumers: list[AioConsumer], tasks: list[asyncio.Task[None]]
    ) -> None:
        for consumer in consumers:
            consumer.stop()
        _, unfinished = await asyncio.wait(tasks, timeout=self._drain_s)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self.listeners:
            if listener.is_async and listener.idempotent is not None:
                await listener.idempotent.close_async()
        await client.close()

    async def _work_async(self, listener: Listener, consumer: AioConsumer) -> None:
        """Handle message after message, in one task."""
        with self._ends_on_failure(listener.name):
            if listener.batch_max:
                while messages := await consumer.take(listener.batch_max):
                    await self.handle_async(listener, messages)
            else:
                async for message in consumer:
                    await self.handle_async(listener, (message,))

    async def handle_async(self, listener: Listener, messages: Sequence[Message]) -> None:
        """`handle` for a handler that is a coroutine function."""
        listener.taken_ns = self._clock.monotonic_ns()
        try:
            await listener.call(messages)
        except BaseException as error:
            _failed(listener, messages, error)
            if not isinstance(error, Exception):
                raise
        else:
            settle(messages, None)

    # --- failures ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _ends_on_failure(self, name: str) -> Iterator[None]:
        """End the app if a listener cannot go on, for example because its consumer's name was taken over.

        A program that looks alive and handles nothing would be worse.
        """
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self._ending.is_asked:
                _log.warning("listener %s failed while the app was ending", name, exc_info=error)
            else:
                _log.exception("listener %s cannot go on: the app ends", name)
                self._failure = error
                self._ending.ask()


def _failed(listener: Listener, messages: Sequence[Message], error: BaseException) -> None:
    if is_surprise(error) and isinstance(error, Exception):
        is_last = all(is_last_attempt(message) for message in messages)
        fate = "that was its last attempt" if is_last else "the message will be retried"
        _log.warning("handler of %s failed, %s", listener.name, fate, exc_info=error)
    settle(messages, error)
