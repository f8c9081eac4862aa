"""How a fragment is guarded against failures: by how many replicas, and by what it does with the
rows it has while others are missing or being corrected (Borealis sections 2.3, 3.3, 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.config import duration_us
from holdfast.errors import InputError

FailurePolicy = Literal["block", "delay", "process"]
HealingPolicy = Literal["suspend", "delay", "process"]
Reconcile = Literal["checkpoint", "undo"]
Reading = Literal["switch", "pairs", "clusters"]

_CHOICES = {
    "failure": FailurePolicy,
    "stabilization": HealingPolicy,
    "reconcile": Reconcile,
    "read": Reading,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What a fragment does when an input is missing, and by how many replicas it is run."""

    #: Copies of the fragment, each on a node of its own; all but one of them may fail.
    replicas: int = 1
    #: While an input is missing (UP_FAILURE). `block`: nothing tentative is ever given; `delay`:
    #: each row waits its X first; `process`: only the first rows of a failure do.
    failure: FailurePolicy = "block"
    #: For new rows while results are corrected (STABILIZATION); `suspend` until that is done.
    stabilization: HealingPolicy = "process"
    #: Results are corrected from the state before the failure, or, with `undo`, from one that is
    #: rebuilt from the inputs that still matter.
    reconcile: Reconcile = "checkpoint"
    #: Share of X that is spent on waiting, above 0 and up to 1; the rest is for processing (the
    #: paper's section 5 takes 0.9).
    alpha: float = 0.9
    #: X of this fragment by hand; None: divided from `within` of the outputs downstream.
    x: str | None = None
    #: How replicas stand to each other. `switch`: each can come back by itself, from its storage or
    #: from the sources. `pairs` (Flux): two of them, and one that is lost is made anew from the
    #: other, which goes on meanwhile. `clusters`: two dataflows that know nothing of each other, of
    #: which one with a lost node is useless until it has come back and caught up; to compare with.
    read: Reading = "switch"

    def __post_init__(self) -> None:
        if not isinstance(self.replicas, int) or self.replicas < 1:
            raise InputError(f"protection replicas={self.replicas}: a whole number, at least 1")
        for option, choice in _CHOICES.items():
            if (value := getattr(self, option)) not in get_args(choice):
                known = ", ".join(map(repr, get_args(choice)))
                raise InputError(f"protection {option}={value!r}: one of {known}")
        if self.read != "switch" and self.replicas != 2:
            raise InputError(
                f"protection read={self.read!r}: a pair has replicas=2, not {self.replicas}; with "
                "more of them use read='switch'"
            )
        if self.read != "switch" and self.failure != "block":
            raise InputError(
                f"protection read={self.read!r}: failure={self.failure!r} is for read='switch'; a "
                "pair gives stable results or none"
            )
        if not 0.0 < self.alpha <= 1.0:
            raise InputError(f"protection alpha={self.alpha}: must be above 0 and at most 1")
        if self.x is not None:
            duration_us(self.x, of="protection x")

    @property
    def x_us(self) -> int | None:
        return None if self.x is None else duration_us(self.x)
