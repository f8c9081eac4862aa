"""How many waiting buckets run as one job.

A job is limited by the buckets with rows, the rows and the bytes that it reads. The size of its
results is not known in advance: a job whose results do not fit is not repeated as it was, but
split. From then on jobs stay below the size that did not fit; after some jobs that fit, larger ones
are tried again. A node that starts begins with small jobs, which double: if a job is so large that
the process dies, the next instance makes progress before it tries that size again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobLimits:
    buckets: int = 256
    rows: int = 2_000_000
    #: Bytes of the input files.
    bytes: int = 256 * 1024 * 1024


DEFAULT_LIMITS = JobLimits()


#: Most buckets with rows of the first job of a node.
FIRST_BUCKETS = 16
#: Jobs of the largest allowed size that must fit before larger ones are tried.
STEADY_JOBS = 32
#: Above this number of buckets, jobs are no longer limited after one that did not fit.
RECOVERED_BUCKETS = 4_096


class JobSize:
    """The size of the jobs of one path."""

    def __init__(self, limits: JobLimits) -> None:
        self._limits = limits
        #: Most buckets with rows of a job; doubles with every job until `limits.buckets`.
        self._with_rows = min(FIRST_BUCKETS, limits.buckets)
        #: Most buckets of a job, with or without rows; None: no job was too large.
        self._most: int | None = None
        #: The smallest number of buckets that did not fit.
        self._too_many = 0
        #: Jobs of the largest size that have fitted since.
        self._steady = 0

    @property
    def most(self) -> int:
        """Most buckets of a job, whatever they contain."""
        return self._limits.buckets if self._most is None else min(self._most, self._limits.buckets)

    def last(self, waiting: Iterable[tuple[int, int, int]], position: int, upto: int) -> int:
        """The last bucket of a job that starts after `position`. `waiting`: bucket, rows and bytes
        of each file, oldest first. A job has at least one bucket with rows, however large."""
        if self._most is not None:  # buckets without rows can have results, too
            upto = min(upto, position + self._most)
        rows = size = buckets = 0
        previous: int | None = None
        for bucket, count, bytes_of_file in waiting:
            if bucket > upto:
                break
            rows, size = rows + count, size + bytes_of_file
            buckets += bucket != previous
            previous = bucket
            too_large = (
                buckets > self._with_rows or rows > self._limits.rows or size > self._limits.bytes
            )
            if too_large and bucket > position + 1 and buckets > 1:
                return bucket - 1
        return upto

    def too_large(self, buckets: int) -> bool:
        """The results of a job of this many buckets did not fit. True if a smaller job can be
        tried."""
        half = max(1, buckets // 2)
        self._too_many = buckets if self._most is None else min(self._too_many, buckets)
        self._most = half if self._most is None else min(self._most, half)
        self._steady = 0
        return buckets > 1

    def fitted(self, buckets: int) -> None:
        """The results of a job of this many buckets did fit. After one that did not, smaller jobs
        than allowed say nothing about larger ones."""
        self._with_rows = min(2 * self._with_rows, self._limits.buckets)
        if self._most is None or buckets < self._most:
            return
        if self._most + 1 < self._too_many:
            self._most += 1
            return
        self._steady += 1
        if self._steady >= STEADY_JOBS:
            self._too_many, self._steady = 2 * self._too_many, 0
        if self._too_many > RECOVERED_BUCKETS:
            self._most = None
