"""Nexmark, a benchmark for stream processors: an auction house as three streams (persons, auctions,
bids), and queries on these streams.

`generator` generates the streams, `queries` has one network per query, `keyed_queries` has the
state functions of two queries. Run a query with live feeds:

    holdfast run holdfast.examples.nexmark.queries:q5
"""
