"""`doctor` names problems and remedies; `bench` measures a running broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairway.cli.doctor import CheckStatus, _disk
from tests.unit.cli.running import Cli, up


def _checks(cli: Cli, *arguments: str, status: int = 0) -> dict[str, Any]:
    return {each["name"]: each for each in cli.json("doctor", *arguments, status=status)["checks"]}


def test_a_sound_broker(cli: Cli, tmp_path: Path) -> None:
    checks = _checks(cli, "--data", str(tmp_path / "data"))
    wanted = {"python", "numpy", "uvloop", "settings", "data directory", "disk room", "broker", "version", "clock"}
    assert wanted | {"broker's disk", "durability", "connections", "groups"} <= checks.keys()
    assert all(checks[name]["state"] == "ok" for name in ("broker", "version", "clock", "durability", "data directory"))
    assert all(each["remedy"] for each in checks.values() if each["state"] != "ok")
    assert "ok       durability: sync" in cli.run("doctor")


def test_a_disk_without_a_byte_left_is_shown() -> None:
    """0 bytes passed for a broker that does not say how many."""
    [full] = _disk(0, is_read_only=True)
    assert (full.name, full.state) == ("broker's disk", CheckStatus.FAILED)
    assert not list(_disk(0, is_read_only=False))
    assert [each.state for each in _disk(1 << 40, is_read_only=False)] == [CheckStatus.OK]


def test_nobody_there_is_status_3_and_says_how_to_start_one() -> None:
    checks = _checks(Cli("fairway://127.0.0.1:1"), status=3)
    assert checks["broker"]["state"] == "failed"
    assert "fairway up --data DIR" in checks["broker"]["remedy"]
    assert "version" not in checks


def test_what_is_unwise_is_a_warning(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--durability", "memory") as (_, url):
        cli = Cli(url)
        cli.run("produce", "s", "x")
        cli.run("consume", "s", "-g", "g", "-n", "1")
        cli.run("produce", "s", "y")
        checks = _checks(cli)
        assert (checks["durability"]["state"], checks["durability"]["found"]) == ("warning", "memory")
        assert "g on s" in checks["groups"]["found"]
        assert "fairway seek" in checks["groups"]["remedy"]
        assert checks["lost messages"]["state"] == "ok"


def test_what_a_group_has_lost_is_shown(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data) as (_, url):
        cli = Cli(url)
        for payload in ("first", "second", "third"):
            cli.run("produce", "s", payload * 20)
    [segment] = [path for path in (data / "messages").iterdir() if b"secondsecond" in path.read_bytes()]
    spoiled = bytearray(segment.read_bytes())
    spoiled[spoiled.index(b"secondsecond")] ^= 1
    segment.write_bytes(spoiled)
    with up(data) as (_, url):
        cli = Cli(url)
        cli.run("consume", "s", "-g", "g", "-n", "2")
        check = _checks(cli)["lost messages"]
        assert (check["state"], check["found"]) == ("warning", "messages that groups never had: g on s 1")
        assert "fairway verify" in check["remedy"]
        assert cli.json("lag", "s")["groups"][0]["lost"] == 1
        assert "1 lost" in cli.run("lag", "s")


def test_a_data_directory_that_cannot_be_one(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checks = _checks(cli, "--data", str(tmp_path / "file"), status=1)
    assert checks["data directory"]["state"] == "failed"


def test_bench_measures_and_leaves_no_backlog(cli: Cli) -> None:
    for _ in range(2):
        told = cli.json("bench", "--messages", "500", "--size", "10")
        assert (told["messages"], told["size_bytes"], told["durability"]) == (500, 10, "sync")
        assert all(value > 0 for value in told.values() if isinstance(value, float))
    [group] = cli.json("groups", "fairway.bench")["groups"]
    assert (group["lag"], group["in_flight"], group["returned"]) == (0, 0, 0)
    assert "messages/s" in cli.run("bench", "-n", "100")
