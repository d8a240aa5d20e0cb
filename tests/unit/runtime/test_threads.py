"""Where threads wait for news that several links bring."""

from __future__ import annotations

import threading

import pytest

from fairway.errors import Misuse
from fairway.runtime.clock import RealClock
from fairway.runtime.threads import Hub

WAIT_S = 30.0


def fine() -> None:
    """Nothing has failed."""


def test_news_end_a_wait() -> None:
    hub, news = Hub(RealClock()), list[str]()

    def tell() -> None:
        with hub.lock:
            news.append("something")
            hub.announce()

    threading.Thread(target=tell).start()
    assert hub.wait(lambda: bool(news), fine, WAIT_S)
    assert hub.wait(lambda: bool(news), fine, 0), "what is so already is not waited for"


def test_a_wait_ends_without_news() -> None:
    assert not Hub(RealClock()).wait(lambda: False, fine, 0.01)


def test_who_waits_hears_that_a_link_has_failed() -> None:
    def failed() -> None:
        raise Misuse("it will never come")

    with pytest.raises(Misuse, match="never"):
        Hub(RealClock()).wait(lambda: False, failed, None)
