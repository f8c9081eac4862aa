"""Whether a producer can serve a consumer, and from which bucket on. Pure.

A source makes a bucket durable before any consumer receives it. If the log of a source ends before
a bucket that a consumer has received, the log is an older copy. The source then refuses the request
of the consumer for later buckets, and a node refuses the source if the results of the node reach
further. A node may be behind its consumers, because it may have been rebuilt by replay.
"""

from __future__ import annotations

from holdfast.errors import RolledBack, Trimmed
from holdfast.types import StreamInfo


def first_bucket(info: StreamInfo, from_bucket: int | None, *, is_source: bool) -> int:
    """First bucket to serve when a consumer asks for buckets from `from_bucket` on. None: from the
    oldest bucket in the log on."""
    oldest = info.trimmed_upto + 1
    if from_bucket is None:
        return oldest
    if is_source and from_bucket - 1 > info.complete_upto:
        raise RolledBack.to(info.complete_upto, info.name, from_bucket - 1)
    if from_bucket < oldest and info.trimmed_upto >= info.starts_at:
        raise Trimmed.before(oldest, info.name, from_bucket)
    return from_bucket


def check_source(info: StreamInfo, computed_upto: int | None) -> None:
    """Refuse a source that has less than the results of a node cover. `computed_upto`: last bucket
    of the outputs that the node has computed from the source. The outputs of an ended source may
    reach further than the source."""
    if not info.ended and computed_upto is not None and computed_upto > info.complete_upto:
        raise RolledBack.to(info.complete_upto, info.name, computed_upto)
