"""All exceptions of Holdfast, in two families.

    HoldfastError                 an external cause; the message states the problem and the remedy
    ├── NetworkError              the network is not well formed (lists all violations)
    ├── InputError                data or arguments do not match their declaration
    │   └── UserFunctionError     a function of the application raised, with its file and line
    ├── TooLarge                  the results of a step do not fit the memory of the driver
    ├── NodeFailed                a node has failed and has no replica left
    ├── NotDeterministic          user code would not give the same bits on every replica
    ├── LogError                  storage
    │   ├── LogCorrupted          bytes on disk are not the bytes that were written
    │   ├── LogUnusable           a failed append was not rolled back; the node must be restarted
    │   ├── StorageLost           a folder or file of the storage is gone
    │   ├── StorageFull           no space left; no acknowledged data is lost
    │   │   └── BufferFull        a consumer is further behind than `buffer_buckets`
    │   ├── RowsNotDurable        pushed rows could not be written before the run stopped
    │   └── StorageDenied         no permission, read-only, not a folder
    │       └── StorageInUse      another process uses the storage, and may be about to terminate
    ├── Trimmed                   a consumer asked for buckets that were released and deleted
    ├── InputsLost                files of a producer's log that a node reads are missing or damaged
    ├── StateLost                 both replicas of a pair have lost their state
    ├── Refuted                   the results of a replica are wrong, as other replicas show
    ├── StaleEpoch                a message came from an instance that was replaced
    ├── TransportError            a server cannot be reached, or refused
    │   ├── SegmentLost           a server no longer has the rows of a segment in its log
    │   └── NotOffered            the server does not offer the requested file (any more)
    └── SetupError                Java, ports, applications that cannot be loaded
        └── IdentityMismatch      query, code or libraries are not those of the run or the storage
    ProtocolViolation             a bug in Holdfast; the node stops to prevent a wrong result

Command-line users see only the message; `--debug` adds the stack trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class HoldfastError(Exception):
    """An error with an external cause. The message names subject, problem and remedy."""


class NetworkError(HoldfastError):
    """The network is not well formed; `violations` lists all violations, not just the first."""

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        head = "the network is not well formed" if count == 1 else f"{count} violations"
        super().__init__(head + ":\n" + "\n".join(f"  - {text}" for text in self.violations))


class InputError(HoldfastError):
    """Data or arguments do not match their declaration."""


class TooLarge(HoldfastError):
    """The results of a step do not fit the memory of the driver. The step is split, if it computes
    more than one bucket."""


class UserFunctionError(InputError):
    """A function of the application raised. `location` has the form `FILE:LINE in FUNCTION`."""

    def __init__(self, message: str, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location


class NodeFailed(HoldfastError):
    """A node or feed has failed permanently and has no replica left. Raised to clients of its
    results and to pushes of rows for it. `location` is the user's line, if a user function failed.
    """

    def __init__(self, message: str, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location


class NotDeterministic(HoldfastError):
    """User code whose result could differ between replicas or between two runs."""


class LogError(HoldfastError):
    """A storage operation failed."""


class LogCorrupted(LogError):
    """Bytes on disk are not the bytes that were written, and a crash cannot be the cause."""


class LogUnusable(LogError):
    """An append failed and could not be rolled back. Nothing can be appended until the log is
    opened again."""


class StorageLost(LogError):
    """A folder or file of the storage is gone, for example deleted or unmounted."""


class StorageFull(LogError):
    """No space left on the device. No acknowledged data is lost."""

    #: Pause before a retry, in microseconds.
    retry_us: ClassVar[int] = 1_000_000


class BufferFull(StorageFull):
    """A consumer is further behind than `buffer_buckets`. A retry succeeds when it has received
    more buckets, so the pause before a retry is short."""

    retry_us = 50_000


class RowsNotDurable(LogError):
    """Rows that were pushed but not flushed could not be written when the run was stopped. The
    application must push them again. The message names the sources and the number of rows."""


class StorageDenied(LogError):
    """The storage cannot be written or read: permission, read-only, or not a folder."""

    #: Pause before a retry, in microseconds.
    retry_us: ClassVar[int] = 1_000_000


class StorageInUse(StorageDenied):
    """Another process uses the folder, and may be about to terminate."""


class Trimmed(HoldfastError):
    """A consumer asked for buckets that all consumers had released."""

    @classmethod
    def before(cls, oldest: int, stream: str, from_bucket: int) -> Trimmed:
        return cls(
            f"stream {stream!r} cannot be read from bucket {from_bucket}: the buckets before "
            f"{oldest} were released by all consumers and deleted; read from bucket {oldest} on"
        )


class RolledBack(HoldfastError):
    """The log of a source is an older copy: a consumer has received more than it holds."""

    @classmethod
    def to(cls, upto: int, source: str, received: int) -> RolledBack:
        return cls(
            f"source {source!r}: its log ends at bucket {upto}, but a consumer has received bucket "
            f"{received}: the log is an older copy. Restore its newest copy, or start the run with "
            "another storage"
        )


class InputsLost(HoldfastError):
    """Files of a producer that a node reads by reference are gone. A new subscription recovers."""


class StateLost(HoldfastError):
    """No replica of a pair can be rebuilt. Restore the storage of a replica, or start over."""


class Refuted(HoldfastError):
    """The logged results of this replica are wrong: its storage is discarded and rebuilt."""


class StaleEpoch(HoldfastError):
    """A message came from an instance that a newer instance has replaced."""


class TransportError(HoldfastError):
    """A peer cannot be reached, or refused."""


class SegmentLost(TransportError):
    """A segment in the log of a peer is missing or damaged. Another replica may still have it."""


class NotOffered(TransportError):
    """The peer does not offer the file (any more). Ask the peer again which files it offers."""


class SetupError(HoldfastError):
    """The machine or the application is not ready to run."""


class IdentityMismatch(SetupError):
    """Query, code or library versions differ from those of the run or the storage, so results would
    not be the same to the bit."""


class ProtocolViolation(Exception):
    """A bug in Holdfast. From a node, the message lists the recent events of its state machine."""
