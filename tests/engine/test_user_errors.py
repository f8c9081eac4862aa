"""Of an error only the user's own line helps the user. Texts as Spark 4 gives them; no JVM."""

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
    ("text", "where", "raised"),
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
def test_the_line_and_the_words_are_found(text: str, where: str | None, raised: str | None) -> None:
    assert location_in(text) == where
    assert raised_in(text) == raised


def test_an_exception_of_this_process_is_followed_to_the_users_line() -> None:
    def users(text: str) -> Any:
        return json.loads(text)  # the library below it is not to blame

    line = users.__code__.co_firstlineno + 1
    with pytest.raises(ValueError) as told:
        users("{")
    assert location_of(told.value) == f"{__file__}:{line} in users"
    above = RuntimeError("raised by code that is not the user's")
    above.__cause__ = told.value
    assert location_of(above) == f"{__file__}:{line} in users"


def test_a_function_is_named_only_if_there_is_no_other() -> None:
    def one(df: Any) -> Any: ...

    def two(df: Any) -> Any: ...

    ours: Callable[..., Any] = location_of  # `filter` and `map` are made by us
    where = f"{__file__}:{one.__code__.co_firstlineno} in one"
    assert location_of_functions([one, ours, one]) == where
    assert location_of_functions([one, two]) is None
    assert location_of_functions([ours]) is None


def test_notebooks_and_examples_are_the_users_and_libraries_are_not() -> None:
    example = sys.modules["holdfast"].__file__ or ""
    assert is_users("<ipython-input-3>")
    assert is_users(example.replace("__init__.py", "examples/netmon.py"))
    assert not is_users(example)
    assert not is_users("/spark/python/lib/pyspark.zip/pyspark/worker.py")
    assert not is_users(json.__file__)
