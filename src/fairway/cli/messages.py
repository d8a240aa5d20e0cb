"""How `consume`, `tail` and `dead` show a message: its payload for people, everything as one line of JSON."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from fairway.world import terminal

if TYPE_CHECKING:
    from fairway import Message
    from fairway.protocol.page import LazyBatch


class ShownMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `--json` prints for a message. A payload that is not UTF-8 is in `payload_base64` instead."""

    subject: str
    sequence: int
    id: str
    created_at: datetime
    appended_at: datetime
    key: str | None = None
    tags: list[str] = []
    headers: dict[str, str] = {}
    group: str | None = None
    attempt: int | None = None
    payload: str | None = None
    payload_base64: str | None = None


def of_message(message: Message) -> ShownMessage:
    """A message that was handed out."""
    text, coded = of_payload(message.payload)
    return ShownMessage(
        subject=message.subject,
        sequence=message.sequence,
        id=str(message.id),
        created_at=message.created_at,
        appended_at=message.appended_at,
        key=message.key,
        tags=list(message.tags),
        headers=message.headers,
        group=message.group,
        attempt=message.attempt,
        payload=text,
        payload_base64=coded,
    )


def of_page(subject: str, page: LazyBatch, sequence: int) -> ShownMessage:
    """A message of a stored batch."""
    batch, index = page.batch, sequence - page.first_sequence
    text, coded = of_payload(batch.payloads[index])
    return ShownMessage(
        subject=subject,
        sequence=sequence,
        id=str(batch.id(index)),
        created_at=_time(batch.created_ms(index)),
        appended_at=_time(page.appended_ms),
        key=batch.key(index),
        tags=batch.tags(index),
        headers=batch.headers(index),
        payload=text,
        payload_base64=coded,
    )


def write_line(shown: ShownMessage) -> None:
    """One line of JSON on stdout."""
    terminal.write_payload(msgspec.json.encode(shown))


def of_payload(payload: bytes) -> tuple[str | None, str | None]:
    """As text, or else in base 64."""
    try:
        return payload.decode("utf-8"), None
    except UnicodeDecodeError:
        return None, base64.b64encode(payload).decode("ascii")


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms // 1_000, UTC) + timedelta(milliseconds=ms % 1_000)
