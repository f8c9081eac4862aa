"""Spark settings of a user: passed on, or refused with the option to use instead."""

from __future__ import annotations

import pytest

from holdfast.config import Options
from holdfast.errors import InputError
from holdfast.spark_settings import parse_settings


def test_settings_are_passed_on() -> None:
    settings = parse_settings(["spark.executor.cores=4", "spark.jars = a=b.jar"])
    assert settings == {"spark.executor.cores": "4", "spark.jars": "a=b.jar"}
    assert Options(spark=settings).spark == settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spark.driver.memory": "4g"}, r"option memory \(--memory\)"),
        ({"spark.master": "yarn"}, r"option master \(--master\)"),
        ({"spark.sql.ansi.enabled": "false"}, "cannot be changed"),
        ({"spark.scheduler.mode": "FIFO"}, "cannot be changed"),
        ({"executor.cores": "4"}, "expected settings of Spark as text"),
        ({"spark.executor.cores": 4}, "expected settings of Spark as text"),
    ],
)
def test_settings_that_holdfast_needs_are_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Options(spark=settings)


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(InputError, match=r"--conf spark\.x: expected KEY=VALUE"):
        parse_settings(["spark.x"])
