"""Following a stream through connections that come and go. Pure.

Whoever follows knows how far it got and which epoch of the producer it has heard; a new connection
goes on from there. What was taken before is not taken again, and an instance older than one already
heard is a zombie: what it says is not taken at all (ARCHITECTURE.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Before every bucket.
NOTHING = -(2**62)
#: Until a lost connection is tried again: doubled while nobody answers.
RETRY_MS, RETRY_MS_MAX = 50, 400


@dataclass(slots=True)
class Following:
    #: The next bucket wanted; None for the oldest there is.
    at: int | None = None
    #: The newest epoch of each replica of the producer heard of. Never falls.
    epochs: dict[str, int] = field(default_factory=dict)
    #: What is tentative is wanted too.
    tentative: bool = False
    #: Last tentative bucket taken: the t_max of Borealis section 3.5. What another replica made of
    #: the same bucket would be the same rows again, or some of them.
    tentative_upto: int = NOTHING
    #: Buckets that were offered although they had been taken.
    repeats: int = 0
    _retry_ms: int = RETRY_MS

    def refuses(self, epoch: int, since: int, replica: str = "") -> str | None:
        """Why nothing that an instance of this epoch says, from bucket `since` on, is taken; None
        when it is welcome."""
        newest = self.epochs.get(replica, 0)
        if epoch < newest:
            return f"epoch {epoch} spoke after its successor of epoch {newest}"
        if self.at is not None and since > self.at:
            return f"bucket {since} came while {self.at} is still missing"
        self.epochs[replica], self._retry_ms = epoch, RETRY_MS
        return None

    def lost(self) -> int:
        """The connection is gone, or was not made; the milliseconds until the next try."""
        pause_ms = self._retry_ms
        self._retry_ms = min(2 * pause_ms, RETRY_MS_MAX)
        return pause_ms

    def is_new(self, bucket: int) -> bool:
        if self.at is None or bucket >= self.at:
            return True
        self.repeats += 1
        return False

    def is_behind(self, upto: int) -> bool:
        return self.at is None or upto >= self.at

    def taken(self, upto: int) -> None:
        """Everything up to this bucket is safe with the reader."""
        self.at = upto + 1 if self.at is None else max(self.at, upto + 1)

    @property
    def tentative_after(self) -> int | None:
        """What to ask a producer for that has tentative rows: only what is younger."""
        return self.tentative_upto if self.tentative else None

    def is_younger(self, bucket: int) -> bool:
        """Whether a tentative bucket is worth taking: it was not given before, by anybody."""
        ahead = self.at is None or bucket >= self.at
        return self.tentative and ahead and bucket > self.tentative_upto

    def taken_tentative(self, upto: int) -> None:
        self.tentative_upto = max(self.tentative_upto, upto)
