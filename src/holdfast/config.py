"""Options, validated once and handed down. Durations are written as text (`500ms`, `10s`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from holdfast.errors import InputError

_UNITS_US = {"us": 1, "ms": 1_000, "s": 1_000_000, "min": 60_000_000, "m": 60_000_000,
             "h": 3_600_000_000, "d": 86_400_000_000}  # fmt: skip
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min|m|h|d)\s*")

FsyncPolicy = Literal["always", "never"]
RecoveryPolicy = Literal["replay", "checkpoint"]


def duration_us(text: str, *, of: str = "duration") -> int:
    """`"1.5s"` to 1_500_000. `of` names the option in the message."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(
            f"{of}: {text!r} is not a duration; write a number and a unit, such as '500ms', '10s', "
            "'5min', '1h' (units: us, ms, s, min, h, d)"
        )
    value = float(match[1]) * _UNITS_US[match[2]]
    if value != int(value) or value <= 0:
        raise InputError(f"{of}: {text!r} must be a positive whole number of microseconds")
    return int(value)


def duration_text(us: int) -> str:
    for unit in ("d", "h", "min", "s", "ms"):
        if us % _UNITS_US[unit] == 0:
            return f"{us // _UNITS_US[unit]}{unit}"
    return f"{us}us"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a network is run. What it computes never depends on any of these."""

    #: Spark master URL of every node.
    master: str = "local[2]"
    #: Processes that share the nodes, in `processes`; None: every node has one of its own.
    hosts: int | None = None
    #: So many more that take the place of one that is lost; only those of pairs are moved.
    standby: int = 0
    #: Heap of each node's JVM (`-Xms` = `-Xmx`).
    memory: str = "2g"
    #: More options for each JVM, such as `-XX:TieredStopAtLevel=1` for one that lives shortly.
    java_options: str = ""
    #: Heap of each executor, where the master is a cluster.
    executor_memory: str = "1g"
    #: `always`: a record is on the disk before anybody is told of it.
    fsync: FsyncPolicy = "always"
    #: Whole-state checkpoint every so many buckets; 0 for never.
    checkpoint_buckets: int = 100
    #: `replay`: upstream logs retain what an empty node needs to rebuild its state, so that even
    #: the loss of a node's storage is survived. `checkpoint`: they retain what its newest
    #: checkpoint needs. `Network.protect(recovery=...)` overrides it for a fragment.
    recovery: RecoveryPolicy = "replay"
    #: Keep source logs and what clients received, so that everything can be audited.
    archive: bool = True
    #: At most this many waiting buckets run as one job.
    group_buckets_max: int = 256
    #: At most this many rows are taken into one job when several buckets wait.
    group_rows_max: int = 2_000_000
    #: At most so many buckets of a stream wait for a reader that has not had them as stable, since
    #: it is away or something else it needs is; then the maker stops, and in the end the sources
    #: take no more rows. None: as much as the disk holds.
    buffer_buckets: int | None = None
    #: Address of the Flight server; port 0 picks a free one.
    host: str = "127.0.0.1"
    port: int = 0
    #: Port on `host` for Prometheus to ask; 0 picks a free one, None serves nothing.
    metrics_port: int | None = None
    #: A stream without anything new says so this often ...
    heartbeat: str = "100ms"
    #: ... and a peer that has said nothing for so long is taken for gone by its readers.
    silence: str = "2s"
    #: Of a pair: upstream keeps for so long what the disk of a dead copy needs, so that the pair
    #: survives the loss of the other disk. After that the dead copy costs nothing any more.
    rejoin: str = "1min"
    #: Of a pair: a copy that is alive but has made no progress for so long, while the other one is
    #: ahead, is declared dead and rebuilt.
    stall: str = "8s"
    #: Readers on the same machine are given the paths of segments instead of their rows.
    by_reference: bool = True

    @property
    def heartbeat_s(self) -> float:
        return duration_us(self.heartbeat, of="heartbeat") / 1e6

    @property
    def silence_s(self) -> float:
        return duration_us(self.silence, of="silence") / 1e6

    @property
    def rejoin_us(self) -> int:
        """Without checkpoints the disk of a dead copy is worth nothing."""
        return duration_us(self.rejoin, of="rejoin") if self.checkpoint_buckets else 0

    @property
    def stall_us(self) -> int:
        return duration_us(self.stall, of="stall")

    @classmethod
    def of(cls, plain: Any) -> Options:
        """From what another process gives, which may be of another version."""
        known = {it.name for it in fields(cls)}
        given = set(plain) if isinstance(plain, dict) else set()
        if given != known:
            raise InputError(
                "expected the options of this version of Holdfast, found those of another "
                f"(unknown: {', '.join(sorted(given - known)) or 'none'}; "
                f"missing: {', '.join(sorted(known - given)) or 'none'}); stop the run and start "
                "it again, so that all its processes are of one version"
            )
        return cls(**plain)

    def __post_init__(self) -> None:
        if self.fsync not in ("always", "never"):
            raise InputError(f"fsync: {self.fsync!r} is not one of 'always', 'never'")
        if self.recovery not in ("replay", "checkpoint"):
            raise InputError(f"recovery: {self.recovery!r} is not one of 'replay', 'checkpoint'")
        if self.checkpoint_buckets < 0 or self.group_buckets_max < 1 or self.group_rows_max < 1:
            raise InputError("checkpoint_buckets must be >= 0, group maxima must be >= 1")
        if self.buffer_buckets is not None and self.buffer_buckets < 1:
            raise InputError(f"buffer_buckets: {self.buffer_buckets} must be at least 1")
        if self.hosts is not None and self.hosts < 2:
            raise InputError(f"hosts: {self.hosts} must be at least 2, or left out")
        if self.standby < 0 or (self.standby and self.hosts is None):
            raise InputError("standby: at least 0, and only together with hosts")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65_535:
            raise InputError(f"metrics_port: {self.metrics_port} is not a port (0 to 65535)")
        heartbeat_us = duration_us(self.heartbeat, of="heartbeat")
        duration_us(self.rejoin, of="rejoin")
        if self.stall_us < duration_us(self.silence, of="silence"):
            raise InputError(
                f"stall: {self.stall!r} must be at least silence, {self.silence!r}: one that is "
                "not heard of is not known to stand still"
            )
        if duration_us(self.silence, of="silence") < 3 * heartbeat_us:
            raise InputError(
                f"silence: {self.silence!r} must be at least three times heartbeat, "
                f"{self.heartbeat!r}: one that is lost or late is no sign of death"
            )
