"""Replication and failure policy of a fragment (Borealis sections 2.3, 3.3 and 3.4; Flux)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.config import RecoveryPolicy, duration_text, duration_us
from holdfast.errors import InputError

Replication = Literal["switch", "pairs", "clusters"]
FailurePolicy = Literal["block", "delay", "process"]
CorrectionPolicy = Literal["suspend", "delay", "process"]
Reconcile = Literal["checkpoint", "undo"]

#: The shortest recovery time that can be stated.
RECOVERY_US_MIN = 100_000

_CHOICES = {
    "replication": get_args(Replication),
    "on_failure": get_args(FailurePolicy),
    "while_correcting": get_args(CorrectionPolicy),
    "reconcile": get_args(Reconcile),
    "recovery": (*get_args(RecoveryPolicy), None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The options of `Network.protect`, validated."""

    #: Number of replicas of the fragment, each on its own node; all but one may fail.
    replicas: int = 1
    #: How the replicas work together. `switch`: each replica recovers on its own, from its storage
    #: or from upstream; consumers switch between replicas. `pairs` (Flux): two replicas; a lost
    #: replica is rebuilt from its peer, which continues to run. `clusters`: two independent
    #: dataflows; the loss of a node makes its whole dataflow unusable; for comparison.
    replication: Replication = "switch"
    #: While an input is missing (UP_FAILURE). `block`: no tentative results; `delay`: every bucket
    #: waits `max_delay`; `process`: only the first bucket of a failure waits.
    on_failure: FailurePolicy = "block"
    #: New buckets while results are corrected (STABILIZATION). `suspend`: no results until the
    #: correction is complete; `delay` and `process`: tentative results, as in `on_failure`.
    while_correcting: CorrectionPolicy = "process"
    #: Longest delay that the fragment may add (X in Borealis); None: its share of the `within` of
    #: the outputs downstream.
    max_delay: str | None = None
    #: Share of `max_delay` spent waiting for inputs, above 0 and up to 1; the rest is for
    #: processing. Borealis (section 5) uses 0.9.
    wait_share: float = 0.9
    #: State from which results are corrected. `checkpoint`: the state before the failure; `undo`: a
    #: state rebuilt from the inputs that still matter.
    reconcile: Reconcile = "checkpoint"
    #: What upstream logs retain for a replica. `replay`: everything that a replica without state
    #: needs, so that a replica survives the loss of its storage. `checkpoint`: what the newest
    #: checkpoint needs. `cec`: the same, with checkpoints as frequent as a short recovery needs
    #: (docs/design/0017-eventual-checkpoints.md). None: `Options.recovery`. For a pair: everything
    #: after a checkpoint.
    recovery: RecoveryPolicy | None = None
    #: With `cec`, a checkpoint is due if recovery would have to read more entries of keyed state
    #: and rows of other files, or replay more input rows (Q and U of the paper, section III.A).
    #: None: no limit of entries, and 1,000,000 rows unless `recovery_time` is stated.
    recovery_entries: int | None = None
    recovery_rows: int | None = None
    #: With `cec`, how long recovery may take after the process has started: checkpoints are as
    #: frequent as this needs, from costs that the node measures. Instead of the other limits.
    recovery_time: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.replicas, int) or self.replicas < 1:
            raise InputError(f"protect: replicas={self.replicas!r}: expected an integer >= 1")
        for option, choices in _CHOICES.items():
            if (value := getattr(self, option)) not in choices:
                listed = ", ".join(map(repr, choices))
                raise InputError(f"protect: {option}={value!r}: expected one of {listed}")
        if self.replication != "switch" and self.replicas != 2:
            raise InputError(
                f"protect: replication={self.replication!r} expects replicas=2, found "
                f"{self.replicas}; for another number use replication='switch'"
            )
        if self.replication != "switch" and self.on_failure != "block":
            raise InputError(
                f"protect: replication={self.replication!r} gives no tentative results, found "
                f"on_failure={self.on_failure!r}; for tentative results use replication='switch'"
            )
        for option in ("recovery_entries", "recovery_rows", "recovery_time"):
            limit = getattr(self, option)
            if limit is not None and self.recovery != "cec":
                raise InputError(
                    f"protect: {option} expects recovery='cec', found recovery={self.recovery!r}"
                )
            if option == "recovery_time" or limit is None:
                continue
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise InputError(f"protect: {option}={limit!r}: expected an integer >= 1")
            if self.recovery_time is not None:
                raise InputError(
                    f"protect: recovery_time={self.recovery_time!r} chooses {option} itself; state "
                    "only one of them"
                )
        if self.recovery_time is not None:
            stated_us = duration_us(self.recovery_time, of="protect: recovery_time")
            if stated_us < RECOVERY_US_MIN:
                raise InputError(
                    f"protect: recovery_time={self.recovery_time!r}: expected at least "
                    f"{duration_text(RECOVERY_US_MIN)}; the first Spark jobs alone take longer"
                )
        if self.recovery == "cec" and self.reconcile == "undo":
            raise InputError(
                "protect: recovery='cec' keeps the state before a failure, so it does not go with "
                "reconcile='undo'; use reconcile='checkpoint'"
            )
        if self.recovery == "cec" and self.replication != "switch":
            raise InputError(
                f"protect: recovery='cec' expects replication='switch', found "
                f"{self.replication!r}: a lost replica of a pair is rebuilt from its peer"
            )
        if not 0.0 < self.wait_share <= 1.0:
            raise InputError(
                f"protect: wait_share={self.wait_share}: expected a number above 0 and up to 1"
            )
        if self.max_delay is not None:
            duration_us(self.max_delay, of="protect: max_delay")

    @property
    def max_delay_us(self) -> int | None:
        return None if self.max_delay is None else duration_us(self.max_delay)
