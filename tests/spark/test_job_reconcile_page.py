"""The page of a reconcile run is for people: ids stay whole, a remedy is said once, and words are explained."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from xml.etree import ElementTree as ET

from fairway.spark.jobs import findings, reconcile
from fairway.spark.jobs.reconcile_options import Discrepancy, GroupBalance, ReconcileOptions, ReconcileResult

AT = datetime(2026, 11, 18, 4, 40, 15, tzinfo=UTC)
COUNTS = {"missing": 1, "duplicate": 0, "late": 2, "stuck": 0, "stranger": 0, "differing": 0}
BOOK = GroupBalance(
    "order.paid", "billing", None, 3, 2, 0, 0, 1, 0, 2, 2, 0, 0, 0, 0, 0, 2, 0, 250, 250, 250, 260, 260, 260
)


def finding(reason: str, identity: str, group: str | None = None) -> Discrepancy:
    kind, remedy = findings.REASONS[reason]
    return Discrepancy(kind, reason, "order.paid", group, identity, None, None, 1, None, None, None, remedy)


def shown(result: ReconcileResult) -> ET.Element:
    options = ReconcileOptions(("order.*",), late_after_s=90, stuck_after_s=300)
    return ET.fromstring(reconcile.page(result, options).html().partition("\n")[2])


def texts(root: ET.Element, name: str) -> list[str]:
    return ["".join(each.itertext()) for each in root.iter(name)]


def tables(root: ET.Element) -> list[list[list[str]]]:
    return [[["".join(cell.itertext()) for cell in row] for row in table.iter("tr")] for table in root.iter("table")]


def test_findings_stand_by_their_reasons() -> None:
    late = [finding(findings.DELIVERED_LATE, f"07ZZZZZZZZZZZZZZZZZZZZZZZ{at}", group="billing") for at in range(2)]
    late[1] = replace(late[1], since=AT, sequence=1_234_567)
    result = ReconcileResult(
        False, AT, 60, COUNTS, books=[BOOK], findings=[finding(findings.NEVER_STORED, "lost"), *late]
    )
    root = shown(result)
    assert texts(root, "h3") == ["Missing: never stored", "Late: delivered late"]
    (_, _, missing, lateness) = tables(root)
    assert missing == [["subject", "id"], ["order.paid", "lost"]], "columns without a value are left out"
    assert lateness == [
        ["subject", "group", "id", "sequence", "since"],
        ["order.paid", "billing", late[0].id, "–", "–"],
        ["order.paid", "billing", late[1].id, "1234567", "2026-11-18 04:40:15 UTC"],
    ]
    said = texts(root, "p")
    assert said.count(f"What to do: {late[0].remedy}.") == 1
    whole = [each for each in root.iter("td") if each.get("class") == "whole id"]
    assert [each.text for each in whole] == ["lost", late[0].id, late[1].id, "1234567"]


def test_figures_and_columns_say_what_they_count() -> None:
    root = shown(ReconcileResult(False, AT, 60, COUNTS, books=[BOOK]))
    assert "delivered or acked more than 1.5 min after it was stored" in texts(root, "dd")
    assert "in hand, or waiting, for more than 5 min" in texts(root, "dd")
    (counts, latencies) = tables(root)
    assert counts == [
        ["subject", "group", "sent", "stored", "missing", "delivered", "acked", "outstanding", "late"],
        ["order.paid", "billing", "3", "2", "1", "2", "2", "0", "2"],
    ]
    (caption, _) = texts(root, "caption")
    assert caption.endswith("left out: scheduled, unsent, duplicates, retried, dead, skipped, lost, stuck.")
    assert latencies[1] == ["order.paid", "billing", *["250 ms"] * 3, *["260 ms"] * 3]
    (terms,) = (each for each in root.iter("dl") if each.get("class") == "terms")
    assert {"sent", "outstanding", "skipped"} <= set(texts(terms, "dt"))


def test_books_that_balance_say_so() -> None:
    root = shown(ReconcileResult(True, AT, 60, dict.fromkeys(COUNTS, 0), books=[replace(BOOK, missing=0, late=0)]))
    assert "balance" in texts(root, "dd")
    assert "There are none." in texts(root, "p")
    assert not texts(root, "h3")
