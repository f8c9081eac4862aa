"""Plans as one SQL text over views: one call into the JVM where DataFrame methods need dozens.

A step of 50 ms spent a third of its time building its plan call by call; text is parsed in a few.
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


def query(text: str, **frames: DataFrame) -> DataFrame:
    """`text` with `{name}` for each frame. Views are resolved at once, so a thread reuses names."""
    spark = next(iter(frames.values())).sparkSession
    views = {name: f"hf_{threading.get_ident()}_{name}" for name in frames}
    for name, df in frames.items():
        df._jdf.createOrReplaceTempView(views[name])
        text = text.replace("{" + name + "}", views[name])
    session: Any = spark._jsparkSession
    return DataFrame(session.sql(text), spark)


def read_parquet(spark: SparkSession, reader: Any, files: Sequence[str]) -> DataFrame:
    """`reader.parquet(*files)` with one call for all the names."""
    jvm: Any = spark.sparkContext._jvm
    names = jvm.org.apache.commons.lang3.StringUtils.split("\n".join(files), "\n")
    return DataFrame(reader._jreader.parquet(names), spark)
