"""Whatever is wrong with an option is said with its name and a remedy."""

from __future__ import annotations

import pytest
from pyspark.sql.types import StructType

from fairway.errors import Misuse
from fairway.protocol.messages import Whence
from fairway.spark import frames
from fairway.spark.options import Where, read_options, write_options
from fairway.spark.server_groups import SubjectPart
from fairway.spark.sink import BatchWriter, StreamWriter
from fairway.spark.stream import StreamReader

COLUMNS = {
    "key string": StructType().add("key", "string"),
    "payload string": StructType().add("payload", "string"),
    "payload int": StructType().add("payload", "integer"),
    "payload string, due_at timestamp": StructType().add("payload", "string").add("due_at", "timestamp"),
    "payload string, colour string": StructType().add("payload", "string").add("colour", "string"),
}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, 'option("subject", "orders")'),
        ({"subject": "orders", "startng": "latest"}, "did you mean starting?"),
        ({"subject": "orders", "xyz": "1"}, "there are ending"),
        ({"subject": "no spaces"}, "option subject: bad subject name"),
        ({"subject": "orders", "starting": "tomorrow"}, "2026-01-31T08:00:00Z"),
        ({"subject": "orders", "starting": "2026-01-31T08:00:00"}, "says no time zone"),
        ({"subject": "orders", "starting": "{orders: 1}"}, "is not JSON"),
        ({"subject": "orders", "starting": '{"order": 1}'}, "names 'order', which is not among the subjects orders"),
        ({"subject": "orders", "minPartitions": "0"}, "minPartitions='0'"),
        ({"subject": "orders", "maxBytesPerTrigger": "lots"}, "such as 67108864 or 64m"),
        ({"subject": "orders", "failOnDataLoss": "perhaps"}, "it is true or false"),
        ({"subject": "orders", "from": "replica"}, "is one broker. Name both copies"),
        ({"subject": "orders", "from": "slave"}, "it is master or replica"),
        ({"subject": "orders", "keys": '["c-1'}, "option keys is not JSON"),
        ({"subject": "orders", "keys": "[1]"}, "name a key or more"),
        ({"subject": "orders", "keys": " , "}, "name a key or more"),
        ({"subject": "orders", "url": "http://here"}, "fairway://HOST:PORT"),
    ],
)
def test_wrong_option_is_named_with_a_remedy(options: dict[str, str], words: str) -> None:
    with pytest.raises(Misuse) as caught:
        read_options(options)
    assert words in str(caught.value)


def test_places_of_one_or_of_each_subject() -> None:
    told = read_options({"subject": "a, b", "starting": '{"a": 17}', "ending": "2026-01-31T08:00:00Z"})
    assert told.starting.place(SubjectPart("a")) == Where(Whence.SEQUENCE, 17)
    assert told.starting.place(SubjectPart("b")) == Where(Whence.EARLIEST)
    assert told.ending.place(SubjectPart("b")) == Where(Whence.TIME, 1_769_846_400_000)


def test_sequences_are_of_one_broker_group() -> None:
    parts = [SubjectPart("a", "g1"), SubjectPart("a", "g2")]
    told = read_options({"subject": "a", "starting": '{"a": {"g1": 17}}', "ending": '{"a": {"g2": "latest"}}'})
    told.starting.check("starting", parts)
    assert [told.starting.place(part) for part in parts] == [Where(Whence.SEQUENCE, 17), Where(Whence.EARLIEST)]
    assert [told.ending.place(part) for part in parts] == [Where(Whence.EARLIEST), Where(Whence.LATEST)]
    with pytest.raises(Misuse, match=r'say one for each, {"a": {"g1": 17}}'):
        read_options({"subject": "a", "starting": "17"}).starting.check("starting", parts)


def test_sizes_may_have_units() -> None:
    assert read_options({"subject": "a", "maxBytesPerTrigger": "64m"}).bytes_per_trigger == 64 << 20


def test_stream_has_no_ending() -> None:
    with pytest.raises(Misuse, match="a stream has no ending"):
        StreamReader(read_options({"subject": "a", "ending": "latest"}), frames.MESSAGES)


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ("key string", {"subject": "a"}, "there is no column payload"),
        ("payload string", {}, "to which subject?"),
        ("payload int", {"subject": "a"}, "column payload is int: it must be string or binary"),
        ("payload string, colour string", {"subject": "a"}, "does not write a column 'colour'"),
        ("payload string", {"subject": "a", "keepIds": "true"}, "needs a column id"),
        ("payload string", {"subject": "a", "group": "no spaces"}, "option group"),
        ("payload string, due_at timestamp", {"subject": "a", "group": "g"}, "for one group alone"),
    ],
)
def test_rows_that_are_no_messages_are_refused(columns: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(Misuse) as caught:
        StreamWriter(write_options(options), COLUMNS[columns])
    assert words in str(caught.value)


def test_log_is_not_overwritten() -> None:
    with pytest.raises(Misuse, match="never overwritten"):
        BatchWriter(write_options({"subject": "a"}), COLUMNS["payload string"], overwrite=True)
