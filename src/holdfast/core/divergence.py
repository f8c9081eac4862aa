"""Divergence: replicas compare the digests of their results while they run. Pure.

Results are the same to the bit on every replica. If two replicas have different rows for one
bucket, one replica is wrong: memory or a disk returned wrong bits, or a function is not
deterministic. Each replica periodically asks its peers for the digests of the last buckets, and
examines the first bucket that differs, because later differences follow from it. A difference is
reported at once. Then each replica decides whether its own result is wrong:

- If more than half of all replicas agree on a result and this replica has another one, this replica
  is refuted. The replicas of the majority do nothing further.
- Otherwise the replica recomputes the bucket, from its last checkpoint and the inputs since. If the
  new result is that of a peer, the replica is refuted. If the new result is its former result, the
  replica is confirmed, and the peer has to find its own error. A third result means that a function
  is not deterministic; then no replica is more trustworthy than another.
- A replica whose recomputation did not settle the difference may have read wrong rows from a
  producer that has since been refuted and rebuilt. If all producers agree on a bucket of an input
  and the replica read another one, the replica is refuted.

Replicas recompute one after the other, the last name first. No replica is refuted without a recent
answer of a peer, so that at least one replica remains. A refuted replica is quarantined, and
rebuilt from a peer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import field
from operator import itemgetter
from typing import Literal, assert_never

from holdfast.frozen import dataclass

#: Maximum number of buckets of a stream in one comparison.
WINDOW_BUCKETS = 64
#: Interval between two requests to the peers.
COMPARE_US = 1_000_000
#: Interval between two comparisons of the inputs while a difference remains: producers may have
#: been rebuilt in the meantime.
AGAIN_US = 10_000_000
#: Maximum number of recomputations for one difference.
RECOMPUTATIONS_MAX = 3
#: A peer counts as present for this long after its last answer.
FRESH_US = 3 * COMPARE_US
#: A replica waits for peers whose turn to recompute comes first, but no longer than this after it
#: found the difference.
TURN_US = 30_000_000

#: What a replica reports about its own result. `confirmed`: the recomputation gave the same result.
#: `unknown`: the recomputation was impossible, or gave a third result.
Finding = Literal["confirmed", "unknown"]
State = Literal["suspected", "recomputing", "confirmed", "unknown", "not deterministic", "refuted"]


@dataclass(frozen=True, slots=True)
class Window:
    """Digests of the buckets `since` to `upto`, all of which are complete. Buckets without rows are
    not listed."""

    since: int
    upto: int
    digests: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True)
class Difference:
    """The first bucket of a stream for which peers have another result."""

    stream: str
    bucket: int
    #: Digest of the own result; empty: the bucket has no rows.
    own: str
    since: int
    theirs: dict[str, str] = field(default_factory=dict)
    #: Number of differing buckets, by peer.
    number: dict[str, int] = field(default_factory=dict)
    #: What each peer reports about its own result of this bucket.
    found: dict[str, Finding] = field(default_factory=dict)
    #: Peers with the same result.
    agree: set[str] = field(default_factory=set)
    state: State = "suspected"
    why: str = ""
    recomputed: int = 0
    #: Time of the next comparison of the inputs.
    again_at: int = 0

    @property
    def text(self) -> str:
        others = ", ".join(f"{name} {_shown(digest)}" for name, digest in self.theirs.items())
        why = f" ({self.why})" if self.why else ""
        remedy = ""
        if self.state == "not deterministic":
            remedy = "; find the function that is not deterministic"
        return (
            f"bucket {self.bucket} of {self.stream!r} differs between replicas: here "
            f"{_shown(self.own)}, {others}; own result: {self.state}{why}{remedy}"
        )


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """A peer reported the digests of a stream. `found`: the bucket that the peer recomputed, and
    its finding."""

    at: int
    peer: str
    stream: str
    own: Window
    theirs: Window
    found: tuple[int, Finding] | None = None


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A recomputation finished. `digest` None: it was impossible; `why` gives the reason."""

    at: int
    stream: str
    bucket: int
    digest: str | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class InputCompared:
    """The digests of an input as this replica read it, and as all its producers have it now."""

    at: int
    #: The output that differs.
    stream: str
    input: str
    taken: Window
    made: Mapping[str, Window]


Event = Compared | Recomputed | InputCompared

# -- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """For operators, at once: replicas differ, or agree again."""

    text: str
    resolved: bool = False


@dataclass(frozen=True, slots=True)
class Recompute:
    """`Recomputed` follows."""

    stream: str
    bucket: int


@dataclass(frozen=True, slots=True)
class CompareInputs:
    """Compare the inputs of the path that produces the stream; `InputCompared` follows for each
    input whose producers all answer."""

    stream: str


@dataclass(frozen=True, slots=True)
class Refute:
    """The result of this replica is wrong: the replica must stop."""

    why: str


Action = Report | Recompute | CompareInputs | Refute


class Divergence:
    """State machine of one replica."""

    def __init__(self, name: str, replicas: int) -> None:
        self.name = name
        #: Number of all replicas, this one included, whether they answer or not.
        self._replicas = replicas
        #: By stream.
        self.differences: dict[str, Difference] = {}
        #: Time of the last answer of each peer.
        self._heard: dict[str, int] = {}

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Compared():
                return self._compared(event)
            case Recomputed():
                return self._recomputed(event)
            case InputCompared():
                return self._input_compared(event)
            case _:
                assert_never(event)

    def found(self) -> dict[str, tuple[int, Finding]]:
        """What peers receive: by stream, the recomputed bucket and the finding."""
        return {
            stream: (
                difference.bucket,
                "confirmed" if difference.state == "confirmed" else "unknown",
            )
            for stream, difference in self.differences.items()
            if difference.state in ("confirmed", "unknown", "not deterministic")
        }

    def _compared(self, event: Compared) -> list[Action]:
        peer, difference = event.peer, self.differences.get(event.stream)
        self._heard[peer] = event.at
        overlap = range(
            max(event.own.since, event.theirs.since), min(event.own.upto, event.theirs.upto) + 1
        )
        own, theirs = dict(event.own.digests), dict(event.theirs.digests)
        differing = [
            bucket
            for bucket in sorted(own.keys() | theirs.keys())
            if bucket in overlap and own.get(bucket) != theirs.get(bucket)
        ]
        actions: list[Action] = []
        if not differing:
            return self._agrees(difference, peer, overlap) if difference is not None else []
        first = differing[0]
        if difference is None or first < difference.bucket:
            difference = Difference(event.stream, first, own.get(first, ""), event.at)
            self.differences[event.stream] = difference
        elif (
            difference.bucket not in overlap or not difference.theirs
        ) and difference.state != "recomputing":
            # The bucket is no longer retained, or every differing peer was rebuilt; a later bucket
            # differs, too.
            difference.bucket, difference.own, difference.state = (
                first,
                own.get(first, ""),
                "suspected",
            )
            difference.theirs.clear()
            difference.found.clear()
            difference.agree.clear()
        if difference.bucket in overlap:
            digest = theirs.get(difference.bucket, "")
            if digest == difference.own:
                difference.agree.add(peer)
                difference.theirs.pop(peer, None)
            else:
                difference.agree.discard(peer)
                new = peer not in difference.theirs
                difference.theirs[peer] = digest
                if event.found is not None and event.found[0] == difference.bucket:
                    difference.found[peer] = event.found[1]
                if new:
                    actions.append(Report(difference.text))
        difference.number[peer] = len(differing)
        return [*actions, *self._decide(difference, event.at)]

    def _agrees(self, difference: Difference, peer: str, overlap: range) -> list[Action]:
        if not overlap or difference.bucket > overlap[-1]:
            return []
        difference.agree.add(peer)
        difference.number.pop(peer, None)
        if (
            difference.theirs.pop(peer, None) is None
            or difference.theirs
            or difference.state == "recomputing"
        ):
            return []
        del self.differences[difference.stream]
        return [Report(f"replicas agree on {difference.stream!r} again", resolved=True)]

    def _decide(self, difference: Difference, at: int) -> list[Action]:
        if difference.state in ("recomputing", "refuted") or not difference.theirs:
            return []
        digest, votes = Counter(difference.theirs.values()).most_common(1)[0]
        if self._majority(votes):
            why = f"{votes} of {self._replicas} replicas have {_shown(digest)}"
            return self._refute(difference, why, at)
        if self._majority(1 + len(difference.agree)) or not self._its_turn(difference, at):
            return []
        if difference.state == "suspected" and difference.recomputed < RECOMPUTATIONS_MAX:
            difference.state, difference.recomputed = "recomputing", difference.recomputed + 1
            return [Recompute(difference.stream, difference.bucket)]
        if difference.state in ("confirmed", "unknown") and at >= difference.again_at:
            difference.again_at = at + AGAIN_US
            return [CompareInputs(difference.stream)]
        return []

    def _majority(self, votes: int) -> bool:
        """Majority of all replicas: one that has not answered yet may have either result."""
        return 2 * votes > self._replicas

    def _its_turn(self, difference: Difference, at: int) -> bool:
        before = [peer for peer in difference.theirs if peer > self.name]
        return all(peer in difference.found for peer in before) or at - difference.since >= TURN_US

    def _recomputed(self, event: Recomputed) -> list[Action]:
        difference = self.differences.get(event.stream)
        if (
            difference is None
            or difference.bucket != event.bucket
            or difference.state != "recomputing"
        ):
            return []
        difference.again_at = event.at
        if not difference.theirs:  # the peer was rebuilt in the meantime
            del self.differences[difference.stream]
            return [Report(f"replicas agree on {difference.stream!r} again", resolved=True)]
        if event.digest is None:
            difference.state, difference.why = "unknown", event.why
        elif event.digest == difference.own:
            difference.state, difference.why = "confirmed", "the recomputation gave the same result"
        elif event.digest in difference.theirs.values():
            return self._refute(difference, "the recomputation gave the result of a peer", event.at)
        else:
            difference.state = "not deterministic"
            difference.why = f"the recomputation gave a third result, {_shown(event.digest)}"
        return [Report(difference.text)]

    def _input_compared(self, event: InputCompared) -> list[Action]:
        difference = self.differences.get(event.stream)
        if difference is None or difference.state not in ("confirmed", "unknown") or not event.made:
            return []
        windows = [event.taken, *event.made.values()]
        overlap = range(max(w.since for w in windows), min(w.upto for w in windows) + 1)
        taken, *produced = [dict(window.digests) for window in windows]
        for bucket in overlap:
            agreed = {digests.get(bucket, "") for digests in produced}
            if len(agreed) == 1 and (used := taken.get(bucket, "")) not in agreed:
                (expected,) = agreed
                why = (
                    f"the replica used {_shown(used)} for bucket {bucket} of its input "
                    f"{event.input!r}, but every producer has {_shown(expected)}"
                )
                return self._refute(difference, why, event.at)
        return []

    def _refute(self, difference: Difference, why: str, at: int) -> list[Action]:
        """Refute this replica, unless no peer has answered within `FRESH_US`."""
        if all(at - heard > FRESH_US for heard in self._heard.values()):
            difference.state, difference.why = (
                "suspected",
                f"{why}, but no peer has answered recently",
            )
            return [Report(difference.text)]
        difference.state, difference.why = "refuted", why
        return [Report(difference.text), Refute(difference.text)]


def extended(
    known: Window | None, since: int, upto: int, digests: Iterable[tuple[int, str]]
) -> Window:
    """Extend a window by the new buckets of its stream, up to `upto`. Without a known window: the
    first window of a stream that is retained from `since` on."""
    if known is None:
        return window_of(since, upto, digests)
    since = max(known.since, upto - WINDOW_BUCKETS + 1)
    start = bisect_left(known.digests, since, key=itemgetter(0))
    return Window(since, upto, known.digests[start:] + window_of(since, upto, digests).digests)


def window_of(since: int, upto: int, digests: Iterable[tuple[int, str]]) -> Window:
    """The last buckets of a stream that is retained from `since` on and complete up to `upto`. A
    bucket may have several segments, whose digests are joined."""
    since = max(since, upto - WINDOW_BUCKETS + 1)
    by_bucket: dict[int, str] = {}
    for bucket, digest in digests:
        if since <= bucket <= upto:
            by_bucket[bucket] = f"{by_bucket[bucket]}+{digest}" if bucket in by_bucket else digest
    return Window(since, upto, tuple(by_bucket.items()))


def _shown(digest: str) -> str:
    return digest or "no rows"
