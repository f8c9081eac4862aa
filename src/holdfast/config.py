"""Options of a run, validated once at construction. Durations are text (`500ms`, `10s`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from holdfast.errors import InputError
from holdfast.spark_settings import check_settings

_UNITS_US = {"us": 1, "ms": 1_000, "s": 1_000_000, "min": 60_000_000, "m": 60_000_000,
             "h": 3_600_000_000, "d": 86_400_000_000}  # fmt: skip
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min|m|h|d)\s*")

FsyncPolicy = Literal["always", "never"]
RecoveryPolicy = Literal["replay", "checkpoint", "cec"]


def duration_us(text: str, *, of: str = "duration") -> int:
    """Parse `"1.5s"` into 1_500_000. `of` names the option in the error message."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(
            f"{of}: {text!r} is not a duration; write a number and a unit, such as '500ms', '10s', "
            "'5min', '1h' (units: us, ms, s, min, h, d)"
        )
    value = float(match[1]) * _UNITS_US[match[2]]
    if value > 1 << 60 or value != int(value) or value <= 0:
        raise InputError(f"{of}: {text!r} must be a positive whole number of microseconds")
    return int(value)


def duration_text(us: int) -> str:
    for unit in ("d", "h", "min", "s", "ms"):
        if us % _UNITS_US[unit] == 0:
            return f"{us // _UNITS_US[unit]}{unit}"
    return f"{us}us"


_MEMORY = re.compile(r"[1-9]\d*[kmgt]", re.IGNORECASE)
#: Interval between two heartbeats of a host to the controller.
HOST_HEARTBEAT_US = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a network is run. The computed results do not depend on any option."""

    #: Spark master URL of every node.
    master: str = "local[2]"
    #: With deployment `processes`: number of hosts that share the nodes. None: one host per node.
    hosts: int | None = None
    #: Number of additional standby hosts. A standby takes over the nodes of a lost host; only
    #: replicas of pairs are moved.
    standby: int = 0
    #: Heap of each node's JVM (`-Xms` = `-Xmx`).
    memory: str = "2g"
    #: Additional JVM options, such as `-XX:TieredStopAtLevel=1` for a short-lived JVM.
    java_options: str = ""
    #: Heap of each executor, if the master is a cluster.
    executor_memory: str = "1g"
    #: Further Spark settings, such as {"spark.executor.cores": "4"}.
    spark: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: `always`: a record is on disk before any other process is notified of it.
    fsync: FsyncPolicy = "always"
    #: Most buckets between two checkpoints; 0: no regular checkpoints.
    checkpoint_buckets: int = 100
    #: `replay`: upstream logs retain the rows from which an empty node rebuilds its state, so a
    #: node survives the loss of its storage. `checkpoint`: upstream logs retain only the rows
    #: after the node's newest checkpoint. `Network.protect(recovery=...)` overrides this option
    #: for a fragment.
    recovery: RecoveryPolicy = "replay"
    #: Retain source logs and the rows that clients received, so that the run can be audited.
    archive: bool = True
    #: Maximum number of waiting buckets that run as one job.
    group_buckets_max: int = 256
    #: Maximum number of rows in one job when several buckets wait.
    group_rows_max: int = 2_000_000
    #: Maximum size of the input files that one job reads when several buckets wait, in bytes.
    group_bytes_max: int = 256 * 1024 * 1024
    #: Maximum number of buckets of a stream that wait for a consumer to receive them as stable,
    #: because the consumer is down or misses another input. At the limit the producer stops, and
    #: finally the sources refuse rows. None: limited only by the disk.
    buffer_buckets: int | None = None
    #: Address of the Flight server; port 0 picks a free port.
    host: str = "127.0.0.1"
    port: int = 0
    #: Port on `host` that serves Prometheus metrics; 0 picks a free port, None disables metrics.
    metrics_port: int | None = None
    #: Interval at which an idle stream sends a heartbeat to its consumers.
    heartbeat: str = "100ms"
    #: A process without a heartbeat for this long is considered dead.
    silence: str = "2s"
    #: Pairs: after the death of a replica, upstream retains for this long the rows that the
    #: replica needs to continue from its own disk, so that the pair survives the loss of the
    #: peer's disk. Afterwards upstream retains nothing for the dead replica.
    rejoin: str = "1min"
    #: Pairs: a replica that is alive but makes no progress for this long, while its peer is ahead,
    #: is declared dead and rebuilt.
    stall: str = "8s"
    #: Consumers that see the storage of a producer, on the same machine or shared, receive the
    #: paths of segments instead of their rows.
    by_reference: bool = True

    @property
    def memory_bytes(self) -> int:
        return (
            int(self.memory[:-1]) << {"k": 10, "m": 20, "g": 30, "t": 40}[self.memory[-1].lower()]
        )

    @property
    def heartbeat_s(self) -> float:
        return duration_us(self.heartbeat, of="heartbeat") / 1e6

    @property
    def silence_s(self) -> float:
        return duration_us(self.silence, of="silence") / 1e6

    @property
    def rejoin_us(self) -> int:
        """Zero without checkpoints: then a dead replica cannot continue from its own disk."""
        return duration_us(self.rejoin, of="rejoin") if self.checkpoint_buckets else 0

    @property
    def stall_us(self) -> int:
        return duration_us(self.stall, of="stall")

    @classmethod
    def of(cls, plain: Any) -> Options:
        """Build the options from the dict of another process, which may run another version."""
        expected = {field.name for field in fields(cls)}
        received = set(plain) if isinstance(plain, dict) else set()
        if received != expected:
            raise InputError(
                "expected the options of this version of Holdfast, found those of another "
                f"(unknown: {', '.join(sorted(received - expected)) or 'none'}; "
                f"missing: {', '.join(sorted(expected - received)) or 'none'}); stop the run and "
                "start it again, so that all its processes use the same version"
            )
        return cls(**plain)

    def __post_init__(self) -> None:
        check_settings(self.spark)
        if self.fsync not in ("always", "never"):
            raise InputError(f"fsync: {self.fsync!r} is not one of 'always', 'never'")
        if self.recovery not in ("replay", "checkpoint"):
            raise InputError(
                f"recovery: {self.recovery!r} is not one of 'replay', 'checkpoint'; choose 'cec' "
                "for a fragment, with net.protect('main', recovery='cec')"
            )
        for name, least, otherwise in (
            ("checkpoint_buckets", 0, "0: no regular checkpoints"),
            ("group_buckets_max", 1, ""),
            ("group_rows_max", 1, ""),
            ("group_bytes_max", 1, ""),
            ("buffer_buckets", 1, "without it there is no limit"),
            ("hosts", 2, "without it each node has its own host"),
            ("standby", 0, ""),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                note = f"; {otherwise}" if otherwise else ""
                raise InputError(f"{name}: {value} must be at least {least}{note}")
        for name in ("memory", "executor_memory"):
            if not _MEMORY.fullmatch(getattr(self, name)):
                raise InputError(
                    f"{name}: {getattr(self, name)!r} is not an amount of memory; write a number "
                    "and a unit, such as '512m' or '2g'"
                )
        if self.standby and self.hosts is None:
            raise InputError(
                f"standby: {self.standby} needs hosts, the number of hosts that share the nodes "
                "(hosts=, --hosts); set it, or remove standby"
            )
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65_535:
            raise InputError(f"metrics_port: {self.metrics_port} is not a port (0 to 65535)")
        heartbeat_us = duration_us(self.heartbeat, of="heartbeat")
        duration_us(self.rejoin, of="rejoin")
        if self.stall_us < duration_us(self.silence, of="silence"):
            raise InputError(
                f"stall: {self.stall!r} must be at least silence, {self.silence!r}: progress is "
                "judged only while heartbeats arrive"
            )
        if duration_us(self.silence, of="silence") < 3 * heartbeat_us:
            raise InputError(
                f"silence: {self.silence!r} must be at least three times heartbeat, "
                f"{self.heartbeat!r}: one lost or late heartbeat does not mean death"
            )
