"""Replicas compare what they made, bucket by bucket, while they run. Pure.

Results are the same to the bit on every replica, so of two that made different rows of one bucket
one is wrong: memory or a disk gave wrong bits, or some function is not deterministic. Each replica
asks the others now and then for the digests of the last buckets, and looks at the first one that
differs, because later ones follow from it. A difference is reported at once. Then it is decided who
is wrong, and each replica decides about itself alone:

- more than half of all replicas made the same, and it made something else: it is refuted. Those
  who made the same leave it at that;
- else it computes the bucket again, from its last checkpoint and the inputs since. If that gives
  what the other one made, it is refuted. If it gives what it had made, it is confirmed, and it is
  for the other one to find its mistake. If it gives a third result, no copy is to be trusted more
  than the other: some function is not deterministic;
- if it was no mistake of its own, it may have read wrong rows from a producer that was refuted and
  rebuilt since: if all producers agree on a bucket of an input and it took another, it is refuted.

They compute one after the other, the last in the order of names first, and none is refuted while no
other one is heard of: somebody must be left. A replica that is refuted is quarantined, and rebuilt
from another one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import field
from operator import itemgetter
from typing import Literal, assert_never

from holdfast.frozen import dataclass

#: So many buckets of a stream are compared at once.
WINDOW_BUCKETS = 64
#: The others are asked this often.
COMPARE_US = 1_000_000
#: What stays different is looked at again after so long: producers may have been mended by then.
AGAIN_US = 10_000_000
#: Buckets of one difference are computed again so often at most.
RECOMPUTATIONS_MAX = 3
#: One that was heard of within so long is there.
FRESH_US = 3 * COMPARE_US
#: One whose turn it is to compute and that says nothing for so long is not waited for.
TURN_US = 30_000_000

#: What a replica found about its own result: the same again, or it could not compute it again.
Finding = Literal["confirmed", "unknown"]
State = Literal["suspected", "recomputing", "confirmed", "unknown", "not deterministic", "refuted"]


@dataclass(frozen=True, slots=True)
class Window:
    """Digests of the buckets `since` to `upto`, all of which are complete; those without rows are
    not listed."""

    since: int
    upto: int
    digests: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True)
class Difference:
    """The first bucket of a stream that other replicas made otherwise."""

    stream: str
    bucket: int
    #: Empty: the bucket has no rows.
    own: str
    since: int
    theirs: dict[str, str] = field(default_factory=dict)
    #: Buckets that differ from those of each.
    number: dict[str, int] = field(default_factory=dict)
    #: What others found about their own result of this bucket.
    found: dict[str, Finding] = field(default_factory=dict)
    #: Those that made the same.
    agree: set[str] = field(default_factory=set)
    state: State = "suspected"
    why: str = ""
    recomputed: int = 0
    #: When inputs are compared next.
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
    """A peer said what it made of a stream; `found`: the bucket it computed again, and with what
    result."""

    at: int
    peer: str
    stream: str
    own: Window
    theirs: Window
    found: tuple[int, Finding] | None = None


@dataclass(frozen=True, slots=True)
class Recomputed:
    """`digest` None: it could not be, as `why` says."""

    at: int
    stream: str
    bucket: int
    digest: str | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class InputCompared:
    """What was taken of an input, and what its producers have made of it by now: all of them."""

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
    """For people, at once: replicas differ, or agree again."""

    text: str
    resolved: bool = False


@dataclass(frozen=True, slots=True)
class Recompute:
    """`Recomputed` follows."""

    stream: str
    bucket: int


@dataclass(frozen=True, slots=True)
class CompareInputs:
    """Of the path that makes the stream; `InputCompared` follows where all producers answer."""

    stream: str


@dataclass(frozen=True, slots=True)
class Refute:
    """This replica is wrong: it must not go on."""

    why: str


Action = Report | Recompute | CompareInputs | Refute


class Divergence:
    """Of one replica."""

    def __init__(self, name: str, replicas: int) -> None:
        self.name = name
        #: How many there are, this one among them, whether heard of or not.
        self._replicas = replicas
        #: By stream.
        self.differences: dict[str, Difference] = {}
        #: When each of the others was heard of.
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
        """What others are told: by stream, the bucket that was computed again, and the result."""
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
            # Nobody keeps it any more, or who differed was rebuilt; what follows differs, too.
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
        """Of all: who has not answered yet may be on either side."""
        return 2 * votes > self._replicas

    def _its_turn(self, known: Difference, at: int) -> bool:
        before = [peer for peer in known.theirs if peer > self.name]
        return all(peer in known.found for peer in before) or at - known.since >= TURN_US

    def _recomputed(self, event: Recomputed) -> list[Action]:
        known = self.differences.get(event.stream)
        if known is None or known.bucket != event.bucket or known.state != "recomputing":
            return []
        known.again_at = event.at
        if not known.theirs:  # the other one was rebuilt meanwhile
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
        """Unless nobody else is there."""
        if all(at - heard > FRESH_US for heard in self._heard.values()):
            known.state, known.why = "suspected", f"{why}, but no other replica is there"
            return [Report(known.text)]
        known.state, known.why = "refuted", why
        return [Report(known.text), Refute(known.text)]


def extended(
    known: Window | None, since: int, upto: int, digests: Iterable[tuple[int, str]]
) -> Window:
    """The window of a stream that has got on, by buckets that were not in it; the first one of a
    stream that is kept from `since` on."""
    if known is None:
        return window_of(since, upto, digests)
    since = max(known.since, upto - WINDOW_BUCKETS + 1)
    kept = bisect_left(known.digests, since, key=itemgetter(0))
    return Window(since, upto, known.digests[kept:] + window_of(since, upto, digests).digests)


def window_of(since: int, upto: int, digests: Iterable[tuple[int, str]]) -> Window:
    """Of a stream that is kept from `since` on, and complete up to `upto`: the last buckets. A
    bucket may have several segments."""
    since = max(since, upto - WINDOW_BUCKETS + 1)
    found: dict[int, str] = {}
    for bucket, digest in digests:
        if since <= bucket <= upto:
            found[bucket] = f"{found[bucket]}+{digest}" if bucket in found else digest
    return Window(since, upto, tuple(found.items()))


def _shown(digest: str) -> str:
    return digest or "no rows"
