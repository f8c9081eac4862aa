"""Checks that user code is deterministic: same bits on every replica (ARCHITECTURE.md).

A function is called once on a streaming stub, on which a hidden `collect()` fails. Its analyzed
plan may contain only allowed plan nodes, and no expression that depends on the clock, on random
numbers or on partitioning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from holdfast.engine.user_errors import location_of
from holdfast.errors import HoldfastError, InputError, NotDeterministic, UserFunctionError

#: Plan nodes that process each row independently.
_ROW_BY_ROW = {
    "Project", "Filter", "Generate", "SubqueryAlias", "Union", "StreamingRelation",
    "StreamingRelationV2", "Expand", "ResolvedHint",
}  # fmt: skip
#: Plan nodes allowed in window functions, which get all rows of a window.
_WHOLE_WINDOW = _ROW_BY_ROW | {
    "LocalRelation", "LogicalRDD", "OneRowRelation", "View", "Range", "Aggregate", "Join",
    "Distinct", "Deduplicate", "Sort", "Window", "Intersect", "Except",
    "Pivot", "Unpivot", "Repartition", "RepartitionByExpression", "WithCTE", "CTERelationDef",
    "CTERelationRef", "GlobalLimit", "LocalLimit", "LogicalRelation",
}  # fmt: skip
_CHANCE = {
    "Rand": "rand()", "Randn": "randn()", "RandStr": "randstr()", "Uniform": "uniform()",
    "Shuffle": "shuffle()", "Uuid": "uuid()", "MonotonicallyIncreasingID":
    "monotonically_increasing_id()", "SparkPartitionID": "spark_partition_id()",
    "CurrentTimestamp": "current_timestamp()", "CurrentTimestampLike": "current_timestamp()",
    "Now": "now()", "LocalTimestamp": "localtimestamp()", "CurrentDate": "current_date()",
    "CurDateExpressionBuilder": "curdate()", "CurrentTime": "current_time()",
    "UnixTimestamp": "", "InputFileName": "input_file_name()",
    "InputFileBlockStart": "input_file_block_start()",
    "InputFileBlockLength": "input_file_block_length()", "CurrentUser": "current_user()",
    "CurrentBatchTimestamp": "current_timestamp()", "Sample": "sample()",
    "CallMethodViaReflection": "reflect()", "TryReflect": "try_reflect()",
}  # fmt: skip
#: Aggregates that depend on the order of rows or are randomized.
_ORDER = {
    "First": "first()", "Last": "last()", "CollectList": "collect_list()", "AnyValue":
    "any_value()", "ApproximatePercentile": "approx_percentile()",
    "KllSketchAggBigint": "kll_sketch_agg()", "KllSketchAggDouble": "kll_sketch_agg()",
    "KllSketchAggFloat": "kll_sketch_agg()", "ListAgg": "listagg()",
}  # fmt: skip


#: Plan nodes that read tables outside any bucket. Results would depend on the number of buckets in
#: a job, because the table would be added once per job.
_OUTSIDE = {"LocalRelation", "LogicalRDD", "OneRowRelation", "View", "Range", "LogicalRelation"}
_SUBQUERIES = {"ScalarSubquery", "InSubquery", "ListQuery", "Exists", "LateralSubquery"}


def call(fn: Callable[[DataFrame], Any], stub: DataFrame, of: str) -> DataFrame:
    """Call user code on the stub and translate its errors into a HoldfastError."""
    try:
        result = fn(stub)
    except PySparkException as err:
        raise explain(err, of, stub.columns) from None
    except HoldfastError:
        raise
    except Exception as err:
        raise raised(err, of) from err
    if not isinstance(result, DataFrame):
        raise InputError(
            f"{of}: the function must return a DataFrame, found {type(result).__name__}"
        )
    return result


def apply(fn: Callable[[DataFrame], Any], rows: DataFrame, of: str) -> DataFrame:
    """Call user code in a step. Spark's errors pass through: `Engine.run` translates them."""
    try:
        result: DataFrame = fn(rows)
        return result
    except (HoldfastError, PySparkException, Py4JError, OSError):
        raise
    except Exception as err:
        raise raised(err, of) from err


def raised(err: Exception, of: str) -> UserFunctionError:
    location = location_of(err)
    suffix = "" if location is None else f", at {location}"
    text = " ".join(f"{type(err).__name__}: {err}".split())
    return UserFunctionError(f"{of}: the function raised {text}{suffix}", location)


def explain(err: PySparkException, of: str, columns: list[str]) -> HoldfastError:
    condition = err.getCondition() or ""
    first = brief(err)
    if "UNRESOLVED_COLUMN" in condition or "FIELD_NOT_FOUND" in condition:
        return InputError(f"{of}: {first} The columns are: {', '.join(columns)}.")
    if "writeStream.start" in str(err) or "STREAMING" in condition:
        return NotDeterministic(
            f"{of}: the function runs an action (collect, count, toPandas, …) or something Spark "
            f"cannot do on a stream; it may only describe transformations ({first})"
        )
    if "NON_DETERMINISTIC" in condition:
        return NotDeterministic(f"{of}: {first}")
    return InputError(f"{of}: {first}")


def brief(err: Exception) -> str:
    """The first line of a Spark error, without error condition and SQLSTATE."""
    line = str(err).strip().split("\n", 1)[0].split(" SQLSTATE", 1)[0]
    return re.sub(r"^\[[A-Z0-9_.]+\] ", "", line)[:400]


def check_plan(df: DataFrame, of: str, *, whole_window: bool, python_udfs: bool) -> None:
    """Raise NotDeterministic if results of the plan could differ between replicas."""
    allowed = _WHOLE_WINDOW if whole_window else _ROW_BY_ROW
    plan = df._jdf.queryExecution().analyzed()
    names = [cls.rsplit(".", 1)[-1].rstrip("$") for cls in _classes(json.loads(plan.toJSON()))]
    if "Sample" in names:
        raise NotDeterministic(f"{of}: sample() picks rows at random; filter on a column instead")
    for name in names:
        text = _CHANCE.get(name)
        if text:
            raise NotDeterministic(
                f"{of}: {text} differs between replicas and between runs; use a column of the "
                "input (its time column for the time) instead"
            )
        if whole_window and name in _ORDER:
            raise NotDeterministic(
                f"{of}: {_ORDER[name]} depends on the order of rows; use min_by, max_by, or "
                "array_sort(collect_set(...))"
            )
        if name in ("PythonUDF", "PythonUDAF", "PythonUDTF", "ScalaUDF") and not python_udfs:
            raise NotDeterministic(
                f"{of}: it contains a user-defined function, which cannot be inspected; if it is "
                "deterministic and works row by row, declare it with apply(fn, python_udfs=True)"
            )
        if name in _SUBQUERIES and not whole_window:
            raise NotDeterministic(
                f"{of}: a subquery reads more than one row; use .join(...) or .window(...)"
            )
    for name in _nodes(plan):
        if name in _OUTSIDE and not whole_window:
            raise NotDeterministic(
                f"{of}: it reads rows from outside the network ({name}), which belong to no "
                "bucket; make them a source and use .union(...) or .join(...)"
            )
        if name in ("GlobalLimit", "LocalLimit") and "Sort" not in names:
            raise NotDeterministic(
                f"{of}: limit() without an order selects arbitrary rows; "
                + (
                    "use orderBy() first"
                    if whole_window
                    else "use orderBy() and limit() in .window(...).apply(fn)"
                )
            )
        if name not in allowed:
            raise NotDeterministic(
                f"{of}: {name} does not work row by row; "
                + (
                    "it cannot be used in a window"
                    if whole_window
                    else "aggregate with .window(...).agg(...), combine with .join(...), keep "
                    "state with .stateful(...), or use window(...).apply(fn)"
                )
            )


def check_time_kept(after: DataFrame, time: str, of: str) -> None:
    """Raise InputError if the function changes the time column, which determines the bucket."""
    if time not in after.columns:
        raise InputError(
            f"{of}: the result has no time column {time!r} (it has {', '.join(after.columns)}); "
            "keep the column in the result"
        )
    if after.columns.count(time) > 1:
        raise InputError(f"{of}: the result has the column {time!r} twice; rename one")
    if not _keeps(after, time):
        raise InputError(
            f"{of}: it changes the time column {time!r}, which assigns rows to buckets; put the "
            "computed time into a column of another name"
        )


def check_key_kept(after: DataFrame, key: str, fragment: str, of: str) -> None:
    """Raise InputError if the function changes a column by which the rows were routed."""
    if key in after.columns and not _keeps(after, key):
        raise InputError(
            f"{of}: it changes the column {key!r}, by which fragment {fragment!r} is split, so "
            "rows that belong together would be in different partitions; put the computed value "
            f"into a column of another name, or use .map(...) before .on({fragment!r}, ...)"
        )


def _keeps(after: DataFrame, name: str) -> bool:
    plan = after._jdf.queryExecution().analyzed()
    return _passed_on(plan, after.columns.index(name), name)


def _passed_on(plan: Any, place: int, name: str) -> bool:
    """Whether output column `place` is the unchanged column `name` of the input."""
    column = plan.output().apply(place)
    children = plan.children()
    kind = plan.getClass().getSimpleName()
    if children.size() == 0:
        return bool(column.name() == name)
    if kind == "Union":
        return all(_passed_on(children.apply(n), place, name) for n in range(children.size()))
    if kind == "Project":
        column = plan.projectList().apply(place)
        while column.getClass().getSimpleName() == "Alias":
            column = column.child()
        if column.getClass().getSimpleName() != "AttributeReference":
            return False
    inputs = children.apply(0).output()
    for index in range(inputs.size()):
        if inputs.apply(index).exprId().equals(column.exprId()):
            return _passed_on(children.apply(0), index, name)
    return False


def _nodes(plan: Any) -> Iterator[str]:
    yield str(plan.nodeName()).replace(" ", "")
    children = plan.children()
    for index in range(children.size()):
        yield from _nodes(children.apply(index))


def _classes(value: Any) -> Iterator[str]:
    """All class names in the JSON form of a plan, including expressions."""
    if isinstance(value, dict):
        if "class" in value:
            yield str(value["class"])
        for inner in value.values():
            yield from _classes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _classes(inner)
