"""Builds plans as SQL text over views: one call into the JVM instead of dozens of DataFrame calls.

With DataFrame calls, a step of 50 ms spent a third of its time building the plan. SQL text needs
one call per view and one call for the text.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession


def quoted(*names: str) -> str:
    return ", ".join(f"`{name.replace('`', '``')}`" for name in names)


def listed(*columns: str) -> str:
    return ", ".join(column for column in columns if column)


def _placeholder(frame: str) -> str:
    return f"\x00{frame}\x00"  # does not occur in the text of users


def select_from(frame: str, *more: str) -> str:
    """SQL that selects all columns of a frame of `query`, and more."""
    return f"SELECT {listed('*', *more)} FROM {_placeholder(frame)}"


def query(text: str, **frames: DataFrame) -> DataFrame:
    """The DataFrame of an SQL text that selects from frames (`select_from`). Spark resolves views
    immediately, so their names only need to be unique per thread."""
    spark = next(iter(frames.values())).sparkSession
    views = {name: f"hf_{threading.get_ident()}_{name}" for name in frames}
    for name, df in frames.items():
        df._jdf.createOrReplaceTempView(views[name])
        text = text.replace(_placeholder(name), views[name])
    session: Any = spark._jsparkSession
    return DataFrame(session.sql(text), spark)


def read_parquet(spark: SparkSession, reader: Any, files: Sequence[str]) -> DataFrame:
    """`reader.parquet(*files)`, with a single call into the JVM for all file names."""
    jvm: Any = spark.sparkContext._jvm
    names = jvm.org.apache.commons.lang3.StringUtils.split("\n".join(files), "\n")
    return DataFrame(reader._jreader.parquet(names), spark)


def contains(frame: DataFrame, function: str) -> bool:
    """Whether a Python function of `mapInArrow` is left in the optimized plan of a frame."""

    def found(plan: Any) -> bool:
        if plan.nodeName() == "MapInArrow" and plan.functionExpr().name() == function:
            return True
        children = plan.children()
        return any(found(children.apply(index)) for index in range(children.size()))

    return found(frame._jdf.queryExecution().optimizedPlan())
