"""Random networks, computed by the engine and by an independent oracle.

`draw` makes a `Case` from a seed: sources with rows, and operators over them. `program` writes the
case as a Python program with the public API, in any layout of fragments, partitions and shards.
`row_oracle` computes the outputs row by row in plain Python, with exact arithmetic. `engine_run`
runs the engine over the same rows in any grouping of buckets. `tester` compares all of them, and
`shrink` makes a failing case small.
"""
