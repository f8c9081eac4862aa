"""From which bucket a producer serves a consumer, and when one refuses the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.connection import check_source, first_bucket
from holdfast.errors import RolledBack, Trimmed
from holdfast.types import StreamInfo

INFO = StreamInfo("s", "ts timestamp", "ts", starts_at=0, complete_upto=9, trimmed_upto=3, epoch=1)


def test_a_consumer_is_served_from_the_bucket_that_it_asks_for() -> None:
    for bucket in (4, 10):
        assert first_bucket(INFO, bucket, is_source=True) == bucket
    assert first_bucket(INFO, None, is_source=True) == 4


def test_deleted_buckets_are_refused() -> None:
    with pytest.raises(Trimmed, match=r"before 4 .* deleted; read from bucket 4"):
        first_bucket(INFO, 3, is_source=True)
    whole = replace(INFO, trimmed_upto=-1)
    assert first_bucket(whole, -5, is_source=True) == -5, "these are empty by definition"


def test_a_source_refuses_a_consumer_that_is_ahead_of_it() -> None:
    with pytest.raises(RolledBack, match="ends at bucket 9, but a consumer has received bucket 10"):
        first_bucket(INFO, 11, is_source=True)


def test_a_node_may_be_behind_its_consumers() -> None:
    assert first_bucket(INFO, 11, is_source=False) == 11


def test_a_node_refuses_a_source_that_is_behind_its_results() -> None:
    check_source(INFO, None)
    check_source(INFO, 9)
    with pytest.raises(RolledBack, match="ends at bucket 9, but a consumer has received bucket 10"):
        check_source(INFO, 10)


def test_the_results_of_an_ended_source_may_reach_further() -> None:
    check_source(replace(INFO, ended=True), 12)
