"""Consumers that share the secret of one session, as one consumer does that lives on two connections."""

from __future__ import annotations

import pytest

from fairway.batch.identity import SECRET_BYTES
from fairway.protocol import consumer_session

SECRET = bytes(range(SECRET_BYTES))


def share_one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """All consumers of the test that have one id are one session: the one that joins last takes the place of the others
    at once."""
    monkeypatch.setattr(consumer_session, "new_secret", lambda _rng: SECRET)
