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
        return (
            f"bucket {self.bucket} of {self.stream!r} was made otherwise: here "
            f"{_shown(self.own)}, {others}; {self.state}{why}"
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
            stream: (it.bucket, "confirmed" if it.state == "confirmed" else "unknown")
            for stream, it in self.differences.items()
            if it.state in ("confirmed", "unknown", "not deterministic")
        }

    def _compared(self, event: Compared) -> list[Action]:
        peer, known = event.peer, self.differences.get(event.stream)
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
            return self._agrees(known, peer, overlap) if known is not None else []
        first = differing[0]
        if known is None or first < known.bucket:
            known = Difference(event.stream, first, own.get(first, ""), event.at)
            self.differences[event.stream] = known
        elif (known.bucket not in overlap or not known.theirs) and known.state != "recomputing":
            # The bucket is no longer retained, or every differing peer was rebuilt; a later bucket
            # differs, too.
            known.bucket, known.own, known.state = first, own.get(first, ""), "suspected"
            known.theirs.clear()
            known.found.clear()
            known.agree.clear()
        if known.bucket in overlap:
            digest = theirs.get(known.bucket, "")
            if digest == known.own:
                known.agree.add(peer)
                known.theirs.pop(peer, None)
            else:
                known.agree.discard(peer)
                new = peer not in known.theirs
                known.theirs[peer] = digest
                if event.found is not None and event.found[0] == known.bucket:
                    known.found[peer] = event.found[1]
                if new:
                    actions.append(Report(known.text))
        known.number[peer] = len(differing)
        return [*actions, *self._decide(known, event.at)]

    def _agrees(self, known: Difference, peer: str, overlap: range) -> list[Action]:
        if not overlap or known.bucket > overlap[-1]:
            return []
        known.agree.add(peer)
        known.number.pop(peer, None)
        if known.theirs.pop(peer, None) is None or known.theirs or known.state == "recomputing":
            return []
        del self.differences[known.stream]
        return [Report(f"replicas agree on {known.stream!r} again", resolved=True)]

    def _decide(self, known: Difference, at: int) -> list[Action]:
        if known.state in ("recomputing", "refuted") or not known.theirs:
            return []
        made, votes = Counter(known.theirs.values()).most_common(1)[0]
        if self._majority(votes):
            why = f"{votes} of {self._replicas} replicas made {_shown(made)}"
            return self._refute(known, why, at)
        if self._majority(1 + len(known.agree)) or not self._its_turn(known, at):
            return []
        if known.state == "suspected" and known.recomputed < RECOMPUTATIONS_MAX:
            known.state, known.recomputed = "recomputing", known.recomputed + 1
            return [Recompute(known.stream, known.bucket)]
        if known.state in ("confirmed", "unknown") and at >= known.again_at:
            known.again_at = at + AGAIN_US
            return [CompareInputs(known.stream)]
        return []

    def _majority(self, votes: int) -> bool:
        """Majority of all replicas: one that has not answered yet may have either result."""
        return 2 * votes > self._replicas

    def _its_turn(self, known: Difference, at: int) -> bool:
        before = [peer for peer in known.theirs if peer > self.name]
        return all(peer in known.found for peer in before) or at - known.since >= TURN_US

    def _recomputed(self, event: Recomputed) -> list[Action]:
        known = self.differences.get(event.stream)
        if known is None or known.bucket != event.bucket or known.state != "recomputing":
            return []
        known.again_at = event.at
        if not known.theirs:  # the peer was rebuilt in the meantime
            del self.differences[known.stream]
            return [Report(f"replicas agree on {known.stream!r} again", resolved=True)]
        if event.digest is None:
            known.state, known.why = "unknown", event.why
        elif event.digest == known.own:
            known.state, known.why = "confirmed", "computed again, it is the same"
        elif event.digest in known.theirs.values():
            return self._refute(known, "computed again, it is what the other one made", event.at)
        else:
            known.state = "not deterministic"
            known.why = f"computed again, it is {_shown(event.digest)}"
        return [Report(known.text)]

    def _input_compared(self, event: InputCompared) -> list[Action]:
        known = self.differences.get(event.stream)
        if known is None or known.state not in ("confirmed", "unknown") or not event.made:
            return []
        windows = [event.taken, *event.made.values()]
        overlap = range(max(w.since for w in windows), min(w.upto for w in windows) + 1)
        taken, *made = [dict(window.digests) for window in windows]
        for bucket in overlap:
            agreed = {digests.get(bucket, "") for digests in made}
            if len(agreed) == 1 and (had := taken.get(bucket, "")) not in agreed:
                (right,) = agreed
                why = (
                    f"it took {_shown(had)} for bucket {bucket} of its input {event.input!r}, of "
                    f"which every producer says {_shown(right)}"
                )
                return self._refute(known, why, event.at)
        return []

    def _refute(self, known: Difference, why: str, at: int) -> list[Action]:
        """Refute this replica, unless no peer has answered within `FRESH_US`."""
        if all(at - heard > FRESH_US for heard in self._heard.values()):
            known.state, known.why = "suspected", f"{why}, but no other replica is there"
            return [Report(known.text)]
        known.state, known.why = "refuted", why
        return [Report(known.text), Refute(known.text)]


def extended(
    known: Window | None, since: int, upto: int, digests: Iterable[tuple[int, str]]
) -> Window:
    """Extend a window by the new buckets of its stream, up to `upto`. Without a known window: the
    first window of a stream that is retained from `since` on."""
    if known is None:
        return window_of(since, upto, digests)
    since = max(known.since, upto - WINDOW_BUCKETS + 1)
    kept = bisect_left(known.digests, since, key=itemgetter(0))
    return Window(since, upto, known.digests[kept:] + window_of(since, upto, digests).digests)


def window_of(since: int, upto: int, digests: Iterable[tuple[int, str]]) -> Window:
    """The last buckets of a stream that is retained from `since` on and complete up to `upto`. A
    bucket may have several segments, whose digests are joined."""
    since = max(since, upto - WINDOW_BUCKETS + 1)
    found: dict[int, str] = {}
    for bucket, digest in digests:
        if since <= bucket <= upto:
            found[bucket] = f"{found[bucket]}+{digest}" if bucket in found else digest
    return Window(since, upto, tuple(found.items()))


def _shown(digest: str) -> str:
    return digest or "no rows"
