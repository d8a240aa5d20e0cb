"""No sentence, table or repr shows the password of an address."""

from __future__ import annotations

import pytest

from fairway.client.url import parse_any
from fairway.errors import FairwayError, Misuse
from fairway.lookup.registries import parse_meta, parse_sqlite, parse_zookeeper
from fairway.redaction import without_password
from fairway.sql.database import engine_at
from tests.unit.cli.running import Cli

SECRET = "hunter2"
NOBODY = Cli("fairway://127.0.0.1:1")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql+psycopg://me:hunter2@db:5432/shop", "postgresql+psycopg://me:***@db:5432/shop"),
        ("postgresql://me:hun/ter@2:x@db/shop", "postgresql://me:***@db/shop"),
        ("postgresql://me@corp:hunter2@db/shop", "postgresql://me@corp:***@db/shop"),
        ("mysql://:hunter2@db", "mysql://:***@db"),
        ("postgresql://db/shop?user=me&password=hunter2&x=1", "postgresql://db/shop?user=me&password=***&x=1"),
        ("mysql://db/shop?PASSWD=hunter2", "mysql://db/shop?PASSWD=***"),
        ("me:hunter2@db", "me:***@db"),
        ("postgresql://me@db:5432/shop", "postgresql://me@db:5432/shop"),
        ("fairway://127.0.0.1:20880?delay=h:1", "fairway://127.0.0.1:20880?delay=h:1"),
        ("sqlite:///shop.db", "sqlite:///shop.db"),
        ("meta://[::1]:20882,b:1", "meta://[::1]:20882,b:1"),
        ("sqlite:data/meta", "sqlite:data/meta"),
        ("", ""),
    ],
)
def test_a_password_is_hidden_and_nothing_else(address: str, shown: str) -> None:
    assert without_password(address) == shown


@pytest.mark.parametrize(
    "address",
    [
        "postgresql+nothing://me:hunter2@db/shop",
        "postgresql+psycopg://me:hunter2",
        "postgresql+psycopg://me:hunter2@db:port/shop",
        "postgresql+psycopg://me:x@hunter2@db/shop",
        "sqlite://me:hunter2@db/shop",
        "sqlite://me:x@hunter2@db/shop",
        "me:hunter2@db",
        "hunter2@db",
    ],
)
def test_an_address_of_a_database_that_cannot_be_used(address: str) -> None:
    with pytest.raises(Misuse, match="DIALECT") as caught, engine_at(address, "--database"):
        pass
    assert SECRET not in str(caught.value)
    said = NOBODY.fails("outbox", "status", "--database", address, status=2)
    assert SECRET not in said
    assert said.count("\n") == 1


def test_a_database_that_does_not_answer() -> None:
    for address in (
        "postgresql+psycopg://me:hunter2@127.0.0.1:1/shop",
        "postgresql+psycopg://127.0.0.1:1/shop?password=hunter2",
        "mysql+pymysql://me:hunter2@127.0.0.1:1/shop",
    ):
        said = NOBODY.fails("outbox", "status", "--database", address, status=1)
        assert SECRET not in said
        assert "127.0.0.1" in said


@pytest.mark.parametrize("scheme", ["fairway://", "meta://"])
@pytest.mark.parametrize(
    "rest", ["me:hunter2@h", "me:hunter2@h:1", "me:hunter2@[::1]:1", "me:x@hunter2@h", "h?password=hunter2"]
)
def test_an_address_of_a_server_has_no_password(scheme: str, rest: str) -> None:
    with pytest.raises(FairwayError) as caught:
        parse_any(f"{scheme}{rest}")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("parse", [parse_meta, parse_sqlite, parse_zookeeper])
def test_an_address_of_a_registry_has_no_password(parse: object) -> None:
    with pytest.raises(Misuse) as caught:
        parse("zookeeper://me:hunter2@h:1,h:2")  # type: ignore[operator]
    assert SECRET not in str(caught.value)


def test_settings_are_shown_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRWAY_REGISTRY", "zookeeper://me:hunter2@h:1")
    cli = Cli("fairway://me:hunter2@h:1")
    assert SECRET not in cli.run("config", "show")
    found = cli.json("config", "show")
    assert found["settings"]["registry"]["value"] == "zookeeper://me:***@h:1"


def test_options_of_a_job_are_shown_without_it() -> None:
    from fairway.spark.jobs.reconcile_options import ReconcileOptions

    assert SECRET not in repr(ReconcileOptions(("s",), outboxes=("postgresql://me:hunter2@db/shop",)))
