"""Every way Holdfast fails, as two families.

    HoldfastError                 the world's fault: says what happened and what to do next
    ├── NetworkError              the network is not well formed (all violations at once)
    ├── InputError                data or arguments that do not fit what was declared
    │   └── UserFunctionError     a function of the application raised, with its file and line
    ├── NodeFailed                no replica is left of a node whose results are waited for
    ├── NotDeterministic          user code that would not give the same bits on every replica
    ├── LogError                  storage
    │   ├── LogCorrupted          bytes on disk are not what was written
    │   ├── StorageLost           a folder or file that was there is gone
    │   ├── StorageFull           no space left: nothing acknowledged is lost
    │   ├── RowsNotDurable        rows that were pushed could not be written before a run stopped
    │   └── StorageDenied         no permission, read-only, not a folder
    │       └── StorageInUse      by another process, which may be about to end
    ├── Trimmed                   a reader asked for buckets that were acknowledged and deleted
    ├── InputsLost                files of a peer's log that a node was reading are gone
    ├── StateLost                 both copies of a pair have lost what they knew
    ├── Refuted                   a replica has made other results than the rest, and is wrong
    ├── StaleEpoch                an instance that was replaced spoke up
    ├── TransportError            a peer is away, or refused
    │   ├── SegmentLost           a peer no longer has rows that its log holds
    │   └── NotOffered            a file is not offered to be fetched, or not any more
    └── SetupError                Java, ports, applications that cannot be loaded
        └── IdentityMismatch      query, code or libraries are not those of the run or the storage
    ProtocolViolation             our bug: the node stops rather than give a wrong answer

Command-line users see the message alone; `--debug` adds the stack trace.
"""

from __future__ import annotations

from collections.abc import Sequence


class HoldfastError(Exception):
    """The world's fault. The message names the thing, what is wrong and the remedy."""


class NetworkError(HoldfastError):
    """The network is not well formed; `violations` lists every one found, not just the first."""

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        head = "the network is not well formed" if count == 1 else f"{count} violations"
        super().__init__(head + ":\n" + "\n".join(f"  - {text}" for text in self.violations))


class InputError(HoldfastError):
    """Data or arguments that do not fit what was declared."""


class UserFunctionError(InputError):
    """A function of the application raised. `location` is where: `FILE:LINE in FUNCTION`."""

    def __init__(self, message: str, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location


class NodeFailed(HoldfastError):
    """A node, or a feed, has failed for good and has no replica left. Raised where its results are
    read and where rows for it are pushed; `location` is the user's line, if it was a function."""

    def __init__(self, message: str, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location


class NotDeterministic(HoldfastError):
    """User code whose result could differ between replicas or between two runs."""


class LogError(HoldfastError):
    """Storage did not do what was asked."""


class LogCorrupted(LogError):
    """Bytes on disk are not the bytes that were written, in a place a crash cannot explain."""


class StorageLost(LogError):
    """A folder or file of the storage that was there is gone: somebody deleted it."""


class StorageFull(LogError):
    """No space left on the device. Nothing that was acknowledged is lost."""


class RowsNotDurable(LogError):
    """Rows that were pushed and not flushed could not be written when their run was stopped: push
    them again. The message names the sources and how many rows."""


class StorageDenied(LogError):
    """The storage cannot be written or read: permission, read-only, or not a folder."""


class StorageInUse(StorageDenied):
    """Another process has the folder; it may be about to end."""


class Trimmed(HoldfastError):
    """A reader asked for buckets that all readers had declared no longer needed."""


class InputsLost(HoldfastError):
    """The storage of a peer, which a node reads by reference, is gone. Following it anew helps."""


class StateLost(HoldfastError):
    """No copy of a pair can be rebuilt: nothing but their storage, or a new beginning, helps."""


class Refuted(HoldfastError):
    """What this replica has logged is wrong: its storage must not be used. It is rebuilt."""


class StaleEpoch(HoldfastError):
    """A message from an instance whose successor is already known."""


class TransportError(HoldfastError):
    """A peer cannot be reached, or refused."""


class SegmentLost(TransportError):
    """A segment that the log of a peer holds is missing or damaged. Another replica may have it."""


class NotOffered(TransportError):
    """The peer does not offer that file, or not any more; it has to be asked what it offers."""


class SetupError(HoldfastError):
    """The machine or the application is not ready to run."""


class IdentityMismatch(SetupError):
    """Query, code or library versions differ from those that a run or a storage was started with:
    results would not be the same to the bit."""


class ProtocolViolation(Exception):
    """Our bug. Carries the recent story of the state machine that noticed."""
