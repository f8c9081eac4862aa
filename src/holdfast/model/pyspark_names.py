"""Error messages for DataFrame methods called on a stream; each names the operator to use."""

from __future__ import annotations

_WINDOW = '.window("10s").group_by("key").agg(n=hf.count())'
_ROWS = "any DataFrame code that works row by row: .apply(lambda df: df.{name}(...))"
_INSTEAD = {
    **dict.fromkeys(
        ("groupBy", "groupby", "agg", "count", "distinct", "dropDuplicates", "drop_duplicates",
         "rollup", "cube"),
        f"results need a window: {_WINDOW}",
    ),
    **dict.fromkeys(
        ("select", "selectExpr", "withColumn", "withColumns", "withColumnRenamed", "drop", "alias",
         "fillna", "dropna", "na", "replace", "transform", "toDF", "mapInPandas", "mapInArrow"),
        _ROWS,
    ),
    "where": ".filter(condition)",
    **dict.fromkeys(("unionAll", "unionByName"), ".union(other)"),
    **dict.fromkeys(("crossJoin", "joinWith"), '.join(other, on="key", within="10s")'),
    **dict.fromkeys(
        ("orderBy", "sort", "limit", "head", "first", "take", "tail"),
        'order exists within a window: .window("10s").apply(lambda df: ...), or hf.top_k',
    ),
    "withWatermark": "net.source(..., grace=...) sets how long a bucket waits for late rows",
    **dict.fromkeys(
        ("writeStream", "write", "foreachBatch", "foreach"),
        "net.output(name, stream, sink=...), or run.client(name).foreach_bucket(fn)",
    ),
    **dict.fromkeys(
        ("show", "collect", "toPandas", "toArrow", "toLocalIterator"),
        "net.output(name, stream), then `for table, info in run.client(name)` in a run",
    ),
    **dict.fromkeys(
        ("cache", "persist", "repartition", "coalesce", "checkpoint"),
        "nothing: Holdfast plans the execution; .on(name, by=[...], partitions=4) splits a query",
    ),
}  # fmt: skip


def missing(what: str, name: str, of: type) -> str:
    """The error message for attribute `name`, which class `of` (shown as `what`) does not have."""
    methods = [method for method in vars(of) if not method.startswith("_")]
    text = f"a {what} has no {name!r}"
    for method in methods:
        if method.replace("_", "") == name.lower():
            return f"{text}; write instead: .{method}(...)"
    if name not in _INSTEAD:
        return f"{text} (methods: {', '.join(methods)})"
    return (
        f"{text}, because it is not a DataFrame; write instead: {_INSTEAD[name].format(name=name)}"
    )
