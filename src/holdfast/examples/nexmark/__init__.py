"""Nexmark: an auction house as three streams (persons, auctions, bids) and the queries people
compare stream processors with.

`generator` makes the streams, `queries` holds one network for each query, `keyed` the two state
functions they need. Run one live:

    holdfast run holdfast.examples.nexmark.queries:q5
"""
