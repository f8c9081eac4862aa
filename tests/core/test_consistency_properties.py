"""Properties of the two lines of a path under random failures: at any time, and at the end.

A story is a list of words. `Shell` acts like the shell of a node: it carries out the actions of the
core, and returns their results when the story says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.consistency import MOVES
from holdfast.core.correction_leases import Answer
from holdfast.core.job_size import JobLimits
from holdfast.core.policy import Policy
from holdfast.core.progress import Progress
from holdfast.core.progress_events import (
    Acknowledge,
    Acknowledged,
    Action,
    Answered,
    Ask,
    Asked,
    Began,
    BoundaryArrived,
    Change,
    End,
    Enter,
    Event,
    InputOpened,
    Leave,
    PathPlan,
    Reply,
    Run,
    RunTentative,
    StepDone,
    StepTooLarge,
    TentativeDone,
    Tick,
    Wake,
)
from holdfast.model.trees import AllOf, AnyOf, Tree
from holdfast.types import OutputState

UNION: Mapping[str, Tree] = {"sums": AnyOf(("s1", "s2"))}
FIGURE_6: Mapping[str, Tree] = {**UNION, "joined": AllOf((AnyOf(("s1", "s2")), "s3"))}
EXTENT = 2
PEER = "p.2"


@dataclass
class Shell:
    """Carries out the actions of the core, and checks that each of them is legal."""

    core: Progress
    inputs: tuple[str, ...]
    now: int = 0
    boundary: dict[str, int] = field(default_factory=dict)
    #: Last bucket that has arrived on any input, stable or tentative.
    newest: int = -1
    state: OutputState = OutputState.STABILIZATION
    #: Last bucket of the stable line, and of the tentative line if one exists.
    stable: int = -1
    line: int = 0
    tentative: int | None = None
    #: The stable bucket from which the tentative line started, and whether the stable state was
    #: discarded.
    base: int = -1
    forgotten: bool = False
    run: Run | None = None
    #: Tentative runs in progress, also those of dropped lines.
    tentative_runs: list[RunTentative] = field(default_factory=list)
    #: Buckets that ran as stable, and for each output the buckets that were given as tentative.
    ran: list[int] = field(default_factory=list)
    published: dict[str, list[int]] = field(default_factory=dict)
    #: Number of successful tentative buckets, and number of buckets that restarts repeated.
    tentative_done: int = 0
    repeated: int = 0
    #: Corrections for which the peer was asked and that have not ended.
    asked: list[int] = field(default_factory=list)
    wake_at: list[int] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.boundary = dict.fromkeys(self.inputs, -1)

    @property
    def whole(self) -> int:
        return min(self.boundary.values())

    def tell(self, event: Event) -> None:
        for action in self.core.handle(event):
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        allowed_after_end = isinstance(action, Acknowledge | Reply | Ask | Wake)
        assert allowed_after_end or not self.ended, "an action after the end"
        match action:
            case Change():
                assert action.state in MOVES[self.state]
                self.state = action.state
            case Run():
                assert self.run is None
                assert action.hi <= self.whole, "a stable run of a bucket that is not complete"
                assert action.spent_us >= 0
                assert (action.rebuild_from is not None) == self.forgotten
                if self.forgotten:
                    assert action.rebuild_from == self.stable + 1
                    assert action.lo == max(0, self.stable + 1 - EXTENT)
                    self.forgotten = False
                else:
                    assert action.lo == self.stable + 1
                assert action.hi > self.stable
                self.run = action
            case Enter():
                assert self.state is OutputState.UP_FAILURE
                assert action.line > self.line
                if self.tentative is not None:
                    corrected, repeats = self.stable - self.base, self.tentative - self.stable
                    assert corrected >= repeats and corrected > 0, (
                        "a restart repeats more buckets than were corrected"
                    )
                    assert not action.forget
                    self.repeated += max(0, repeats)
                self.line, self.tentative, self.base = action.line, self.stable, self.stable
                self.forgotten = action.forget
            case RunTentative():
                assert action.line == self.line and self.tentative is not None
                assert action.lo == self.tentative + 1 > self.stable
                assert action.lo <= action.hi <= self.newest
                assert all(upto <= action.hi for _, upto in action.outputs)
                assert 0.0 <= action.partial.inputs <= 1.0 and 0.0 <= action.partial.rows <= 1.0
                assert not any(
                    run_tentative.line == self.line for run_tentative in self.tentative_runs
                )
                self.tentative_runs.append(action)
            case Leave():
                assert self.tentative is not None and self.stable >= self.tentative
                self.tentative, self.forgotten = None, False
            case Ask():
                if action.done:
                    self.asked.clear()
                else:
                    self.asked.append(action.correction)
            case Wake():
                assert action.at > self.now
                self.wake_at.append(action.at)
            case End():
                assert self.stable >= self.newest and not self.tentative_count()
                self.ended = True
            case _:
                pass

    def tentative_count(self) -> int:
        return sum(
            run.line == self.line for run in self.tentative_runs if self.tentative is not None
        )

    # -- the words of a story -----------------------------------------------------------------

    def grow(self, stream: str, buckets: int, tentative_buckets: int, spent_us: int = 0) -> None:
        if stream not in self.boundary:
            return
        self.boundary[stream] += buckets
        upto = self.boundary[stream]
        rows = tuple((bucket, 1, 0) for bucket in range(upto - buckets + 1, upto + 1))
        tentative = (upto + tentative_buckets, ("far",)) if tentative_buckets else (None, ())
        self.newest = max(self.newest, upto + tentative_buckets)
        event = BoundaryArrived(self.now, stream, upto, rows, False, *tentative, spent_us=spent_us)
        self.tell(event)

    def fail(self, stream: str) -> None:
        """Every other input continues."""
        for other in self.inputs:
            if other != stream:
                self.grow(other, 1, 0)
        self.wait(1_100)

    def heal(self) -> None:
        """Every input is complete up to the newest bucket, and tentative input is corrected."""
        for stream in self.inputs:
            self.grow(stream, self.newest - self.boundary[stream], 0)

    def flap(self, stream: str) -> None:
        """The input fails again before any bucket is corrected."""
        self.heal()
        self.fail(stream)
        self.run_tentative()

    def late(self, stream: str) -> None:
        """Every input continues, and one of them is always behind."""
        for _ in range(5):
            self.fail(stream)
            self.run_tentative()
            self.grow(stream, int(self.boundary.get(stream, 0) < self.newest - 2), 0)
            self.finish()

    def finish(self) -> None:
        if self.run is not None:
            run, self.run = self.run, None
            first = run.lo if run.rebuild_from is None else run.rebuild_from
            self.ran += range(first, run.hi + 1)
            assert run.hi > self.stable, "the stable line went back"
            self.stable = run.hi
            self.tell(StepDone(self.now, "p", run.hi, run.hi + 1, run.hi))

    def run_tentative(self, succeeds: bool = True) -> None:
        if not self.tentative_runs:
            return
        run = self.tentative_runs.pop(0)
        current = run.line == self.line and self.tentative is not None
        if succeeds and current:
            self.tentative = run.hi
            self.tentative_done += run.hi + 1 - run.lo
            self.publish(run)
        self.tell(TentativeDone(self.now, "p", run.line, run.hi if succeeds else None))

    def too_large(self) -> None:
        """The results of the stable step do not fit: a smaller step follows."""
        run = self.run
        if run is not None and run.hi > self.stable + 1:
            self.run, self.forgotten = None, run.rebuild_from is not None
            self.tell(StepTooLarge(self.now, "p", None, "too large"))
            after = cast(Run | None, self.run)
            assert after is None or after.hi < run.hi, "a step that is too large is repeated"

    def tentative_too_large(self) -> None:
        if self.tentative_runs:
            run = self.tentative_runs.pop(0)
            self.tell(StepTooLarge(self.now, "p", run.line, "too large"))

    def publish(self, run: RunTentative) -> None:
        """As SOutput does: a bucket that was given before, or is stable, is not given again."""
        for output, upto in run.outputs:
            given_before = self.published.setdefault(output, [])
            since = max([run.lo, self.stable + 1, *(b + 1 for b in given_before[-1:])])
            given_before += range(since, upto + 1)

    def answer(self, answer: Answer) -> None:
        if self.asked:
            self.tell(Answered(self.now, "p", PEER, self.asked.pop(0), answer, reached=self.now))

    def asked_by(self, peer: str, done: bool) -> None:
        actions = self.core.handle(Asked(self.now, 1, "p", peer, 1, self.stable, True, done))
        assert sum(isinstance(action, Reply) for action in actions) == 1
        for action in actions:
            self.carry_out(action)

    def ack(self) -> None:
        for output in self.core.paths["p"].plan.outputs:
            self.tell(Acknowledged(self.now, output, self.stable, self.stable))

    def wait(self, us: int) -> None:
        """Time passes, with a tick at each requested wake-up."""
        until = self.now + us
        while self.wake_at and min(self.wake_at) <= until:
            self.now = min(self.wake_at)
            self.wake_at.remove(self.now)
            self.tell(Tick(self.now))
        self.now = until

    def end(self) -> None:
        for stream, upto in self.boundary.items():
            self.tell(BoundaryArrived(self.now, stream, upto, (), ended=True))

    def agrees(self) -> None:
        """The core and the shell have the same positions and the same state."""
        path = self.core.paths["p"]
        assert path.position == self.stable
        assert path.consistency.position == self.tentative
        assert path.consistency.state is self.state
        assert (self.tentative is None) <= (self.state is not OutputState.UP_FAILURE)
        assert (self.state is OutputState.STABLE) <= (self.tentative is None)


STREAMS = ("s1", "s2", "s3")
words = st.sampled_from(
    [
        *[("grow", stream, n, 0) for stream in STREAMS for n in (1, 3)],
        *[("grow", stream, n, more) for stream in STREAMS for n in (0, 1) for more in (1, 3)],
        *[("grow", stream, 1, 0, spent) for stream in STREAMS for spent in (500, 5_000)],
        *[("fail", stream) for stream in STREAMS for _ in range(3)],
        *[("flap", stream) for stream in STREAMS],
        *[("late", stream) for stream in STREAMS],
        *[("heal",)] * 3,
        *[("wait", us) for us in (1, 200, 900, 1_500, 1_500, 600_000, 3_000_000)],
        *[("finish",)] * 4,
        *[("run_tentative", True)] * 4,
        *[("run_tentative", False)] * 2,
        *[("too_large",)] * 2,
        ("tentative_too_large",),
        *[("answer", answer) for answer in ("answering", "refused", "away")],
        *[("asked_by", peer, False) for peer in (PEER, "p.0")],
        ("asked_by", PEER, True),
        *[("ack",)] * 2,
    ]
)
stories = st.lists(words, min_size=10, max_size=60)
policies = st.builds(
    Policy,
    on_failure=st.sampled_from(["delay", "process", "delay", "process", "block"]),
    while_correcting=st.sampled_from(["suspend", "delay", "process"]),
    reconcile=st.sampled_from(["checkpoint", "undo"]),
    patience_us=st.just(1_000),
    own_us=st.sampled_from([0, 300]),
    peers=st.sampled_from([(), (PEER,)]),
)


@settings(deadline=None, max_examples=300)
@given(
    policy=policies,
    trees=st.sampled_from([UNION, FIGURE_6]),
    convergent=st.booleans(),
    group=st.sampled_from([1, 2, 256]),
    buffer=st.sampled_from([None, None, 8]),
    resumed=st.booleans(),
    story=stories,
    ends=st.booleans(),
)
def test_the_stable_line_never_goes_back_and_every_tentative_bucket_is_corrected(
    policy: Policy,
    trees: Mapping[str, Tree],
    convergent: bool,
    group: int,
    buffer: int | None,
    resumed: bool,
    story: list[tuple[object, ...]],
    ends: bool,
) -> None:
    """Properties 3 and 4 of section 3.5, as far as they apply to one path."""
    inputs = STREAMS[: 1 + len(trees)]
    plan = PathPlan("p", inputs, tuple(trees), convergent, EXTENT, policy, trees)
    core = Progress(
        [plan], me="p.1", checkpoint_buckets=0, limits=JobLimits(group), buffer_buckets=buffer,
        resumed={"p": (4, 3, 0)} if resumed else None,
    )  # fmt: skip
    shell = Shell(core, inputs)
    first = 5 if resumed else 0
    if resumed:  # the inputs are missing at first
        shell.stable = shell.newest = 4
        shell.boundary = dict.fromkeys(inputs, 4)
        shell.tell(Began(0))
    else:
        for stream in inputs:
            shell.tell(InputOpened(0, stream, 0, -1))
        for stream in inputs:
            shell.grow(stream, 5, 0)
        while shell.run is not None:
            shell.finish()
            shell.ack()
    for word, *arguments in story:
        getattr(shell, str(word))(*arguments)
        shell.agrees()
    if policy.on_failure == "block":
        assert shell.line == 0, "a blocking path has no tentative line"

    shell.newest += 1
    shell.asked_by(PEER, True)
    shell.asked_by("p.0", True)
    shell.heal()
    if ends:
        shell.end()
    for _ in range(3 * shell.newest + 20):
        shell.answer("away")
        shell.run_tentative()
        shell.finish()
        shell.ack()
        shell.wait(600_000)
    assert (shell.stable, shell.tentative) == (shell.newest, None)
    assert shell.ended == ends
    assert shell.state is OutputState.STABLE or ends
    assert not (shell.run or shell.tentative_runs)

    assert shell.ran == list(range(first, shell.newest + 1)), "every bucket runs once, and in order"
    for buckets in shell.published.values():
        assert len(set(buckets)) == len(buckets), "a bucket was given as tentative twice"
    assert shell.repeated <= shell.newest + 1, "more buckets were repeated than corrected"


class Prompt(Shell):
    """A shell whose steps take no time: a late result is always due to a decision."""

    def tell(self, event: Event) -> None:
        super().tell(event)
        while self.run is not None or self.tentative_runs:
            self.finish()
            self.run_tentative()

    def given_upto(self) -> int:
        return max([self.stable, *(buckets[-1] for buckets in self.published.values() if buckets)])


prompt_words = st.sampled_from(
    [
        *[
            ("grow", stream, n, 0, spent)
            for stream in STREAMS
            for n in (1, 3)
            for spent in (0, 400)
        ],
        *[("grow", stream, 0, n, 0) for stream in STREAMS for n in (1, 2)],
        *[("wait", us) for us in (1, 99, 300, 301, 700, 1_000, 1_001)],
        ("heal",),
    ]
)


@settings(deadline=None, max_examples=300)
@given(
    on_failure=st.sampled_from(["delay", "process"]),
    while_correcting=st.sampled_from(["suspend", "delay", "process"]),
    reconcile=st.sampled_from(["checkpoint", "undo"]),
    resumed=st.booleans(),
    story=st.lists(prompt_words, min_size=10, max_size=80),
)
def test_property_1_every_bucket_is_given_within_max_delay(
    on_failure: str,
    while_correcting: str,
    reconcile: str,
    resumed: bool,
    story: list[tuple[str, int]],
) -> None:
    """A union of three inputs, any of which may be missing; after a restart all are missing."""
    trees: Mapping[str, Tree] = {"sums": AnyOf(STREAMS)}
    policy = Policy(on_failure, while_correcting, reconcile, 1_000, 300)  # type: ignore[arg-type]
    plan = PathPlan("p", STREAMS, ("sums",), True, EXTENT, policy, trees)
    core = Progress([plan], checkpoint_buckets=0, resumed={"p": (4, 3, 0)} if resumed else None)
    shell = Prompt(core, STREAMS)
    if resumed:
        shell.stable = shell.newest = 4
        shell.boundary = dict.fromkeys(STREAMS, 4)
        shell.tell(Began(0))
    else:
        for stream in STREAMS:
            shell.tell(InputOpened(0, stream, 0, -1))
        for stream in STREAMS:
            shell.grow(stream, 5, 0)
    arrived_at = {}
    for word, *arguments in story:
        getattr(shell, word)(*arguments)
        for bucket in range(shell.given_upto() + 1, shell.newest + 1):
            arrived_at.setdefault(bucket, shell.now)
            assert shell.now < arrived_at[bucket] + 1_000, (
                f"bucket {bucket} arrived at {arrived_at[bucket]}"
            )
        shell.agrees()
    assert shell.ran == list(range(5 if resumed else 0, shell.stable + 1))
