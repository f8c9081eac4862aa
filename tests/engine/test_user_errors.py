"""Errors are located at the user's own line. The texts are those of Spark 4; no JVM."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.engine.user_errors import (
    is_users,
    location_in,
    location_of,
    location_of_functions,
    raised_in,
)

LIB = "/usr/lib/python3.11"
WORKER = f"""An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/opt/venv{LIB}/site-packages/holdfast/engine/keyed.py", line 185, in _call
    result = self.fn(state, rows, info)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/srv/my app/app.py", line 26, in sessions
    json.loads(row)
  File "{LIB}/json/decoder.py", line 354, in raw_decode
    except StopIteration as err:
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"""
CHAINED = f"""An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/srv/app.py", line 3, in inner
    return {{}}["a"]
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/srv/app.py", line 5, in outer
    raise ValueError("first: line\\nsecond: line")
ValueError: first: line
second: line

JVM stacktrace:
org.apache.spark.SparkException: Job aborted
\tat {LIB}"""
EXPRESSION = """[CAST_INVALID_INPUT] The value 'seven' cannot be cast. SQLSTATE: 22018
== DataFrame ==
"cast" was called from
/srv/app.py:36
"""
OURS = f"""An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/opt/venv{LIB}/site-packages/holdfast/engine/keyed.py", line 187, in _call
    raise InputError(
holdfast.errors.InputError: stateful-1: the function must return (out, state), two Arrow tables"""


@pytest.mark.parametrize(
    ("text", "location", "exception"),
    [
        (
            WORKER, "/srv/my app/app.py:26 in sessions",
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        ),
        (CHAINED, "/srv/app.py:5 in outer", "ValueError: first: line second: line"),
        (EXPRESSION, "/srv/app.py:36", None),
        (OURS, None, "stateful-1: the function must return (out, state), two Arrow tables"),
        ("path 'out', buckets 1 to 2: KeyError: 'a', at /srv/my app/app.py:5 in <lambda>. Correct "
         "the function", "/srv/my app/app.py:5 in <lambda>", None),
        ("disk full, at least 3:1", None, None),
    ],
    ids=["worker", "chained", "expression", "ours", "message", "nothing"],
)  # fmt: skip
def test_the_location_and_the_exception_are_extracted_from_an_error_text(
    text: str, location: str | None, exception: str | None
) -> None:
    assert location_in(text) == location
    assert raised_in(text) == exception


def test_an_exception_in_this_process_is_located_at_the_users_line() -> None:
    def users(text: str) -> Any:
        return json.loads(text)  # the library frame below is skipped

    line = users.__code__.co_firstlineno + 1
    with pytest.raises(ValueError) as raised:
        users("{")
    assert location_of(raised.value) == f"{__file__}:{line} in users"
    wrapper = RuntimeError("raised by code that is not the user's")
    wrapper.__cause__ = raised.value
    assert location_of(wrapper) == f"{__file__}:{line} in users"


def test_a_function_is_located_only_if_it_is_the_only_one() -> None:
    def one(df: Any) -> Any: ...

    def two(df: Any) -> Any: ...

    ours: Callable[..., Any] = location_of  # like the functions of `filter` and `map`
    location = f"{__file__}:{one.__code__.co_firstlineno} in one"
    assert location_of_functions([one, ours, one]) == location
    assert location_of_functions([one, two]) is None
    assert location_of_functions([ours]) is None


def test_notebooks_and_examples_are_user_code_and_libraries_are_not() -> None:
    example = sys.modules["holdfast"].__file__ or ""
    assert is_users("<ipython-input-3>")
    assert is_users(example.replace("__init__.py", "examples/netmon.py"))
    assert not is_users(example)
    assert not is_users("/spark/python/lib/pyspark.zip/pyspark/worker.py")
    assert not is_users(json.__file__)
