"""Whatever fails, in whatever order: what holds of a path's two lines all the time, and at the end.

A story is a list of words; whoever tells it does what a shell does: carries out the actions, and
gives back their results whenever the story says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.consistency import Answer, Policy
from holdfast.core.moves import (
    Action,
    Answered,
    Ask,
    BoundaryArrived,
    Change,
    Enter,
    Event,
    InputOpened,
    Leave,
    PathPlan,
    Postponed,
    Run,
    RunTentative,
    StepDone,
    TentativeDone,
    Tick,
    Wake,
)
from holdfast.core.progress import Progress
from holdfast.model.trees import AllOf, AnyOf, Tree
from holdfast.types import OutputState

INPUTS = ("s1", "s2", "s3")
TREES: Mapping[str, Tree] = {
    "sums": AnyOf(("s1", "s2")),
    "joined": AllOf((AnyOf(("s1", "s2")), "s3")),
}
#: From where a state may be entered.
LEGAL = {
    OutputState.STABLE: OutputState.STABILIZATION,
    OutputState.UP_FAILURE: OutputState.STABLE,
    OutputState.STABILIZATION: OutputState.UP_FAILURE,
}
EXTENT = 2


@dataclass
class Shell:
    """Carries out what the core says, and minds that it may."""

    core: Progress
    now: int = 0
    boundary: dict[str, int] = field(default_factory=lambda: dict.fromkeys(INPUTS, -1))
    #: Last bucket that anybody has heard of, be it as tentative.
    newest: int = -1
    state: OutputState = OutputState.STABILIZATION
    #: Last bucket of the stable line, and of the tentative one where there is one.
    stable: int = -1
    line: int = 0
    tentative: int | None = None
    run: Run | None = None
    #: Tentative runs under way: those of lines that are over come back too.
    guesses: list[RunTentative] = field(default_factory=list)
    asked: bool = False
    wake_at: list[int] = field(default_factory=list)

    @property
    def whole(self) -> int:
        return min(self.boundary.values())

    def tell(self, event: Event) -> None:
        for action in self.core.handle(event):
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        match action:
            case Change():
                assert self.state is LEGAL[action.state]
                self.state = action.state
            case Run():
                assert self.run is None
                assert action.hi <= self.whole, "stable, and not whole"
                rebuilt = action.rebuild_from is not None
                assert (action.rebuild_from if rebuilt else action.lo) == self.stable + 1
                assert action.lo == max(0, self.stable + 1 - EXTENT) if rebuilt else True
                assert action.hi > self.stable
                self.run = action
            case Enter():
                assert self.tentative is None and self.state is OutputState.UP_FAILURE
                assert action.line > self.line
                self.line, self.tentative = action.line, self.stable
            case RunTentative():
                assert action.line == self.line and self.tentative is not None
                assert action.lo == self.tentative + 1 > self.stable
                assert action.lo <= action.hi
                assert all(upto <= action.hi for _, upto in action.outputs)
                assert not any(guess.line == self.line for guess in self.guesses)
                self.guesses.append(action)
            case Leave():
                assert self.tentative is not None
                self.tentative = None
            case Ask():
                assert not self.asked
                self.asked = True
            case Wake():
                assert action.at > self.now
                self.wake_at.append(action.at)
            case _:
                pass

    # -- the words of a story -----------------------------------------------------------------

    def grow(self, stream: str, buckets: int, guessed: int) -> None:
        self.boundary[stream] += buckets
        upto = self.boundary[stream]
        rows = tuple((bucket, 1) for bucket in range(upto - buckets + 1, upto + 1))
        tentative = (upto + guessed, ("far",)) if guessed else (None, ())
        self.newest = max(self.newest, upto + guessed)
        self.tell(BoundaryArrived(self.now, stream, upto, rows, False, *tentative))

    def fail(self, stream: str) -> None:
        """Everybody else goes on."""
        for other in INPUTS:
            if other != stream:
                self.grow(other, 1, 0)
        self.wait(1_100)

    def heal(self) -> None:
        """Everybody has the same, and what was tentative is corrected."""
        for stream in INPUTS:
            self.grow(stream, self.newest - self.boundary[stream], 0)

    def flap(self, stream: str) -> None:
        """It fails again before anything is corrected."""
        self.heal()
        self.fail(stream)
        self.guess()

    def finish(self) -> None:
        if self.run is not None:
            run, self.run, self.stable = self.run, None, self.run.hi
            self.tell(StepDone(self.now, "p", run.hi, run.hi + 1, run.hi))

    def guess(self, well: bool = True) -> None:
        if self.guesses:
            run = self.guesses.pop(0)
            if well and run.line == self.line and self.tentative is not None:
                self.tentative = run.hi
            self.tell(TentativeDone(self.now, "p", run.line, run.hi if well else None))

    def answer(self, answer: Answer) -> None:
        if self.asked:
            self.asked = False
            self.tell(Answered(self.now, "p", answer))

    def asked_by(self, partner: str) -> None:
        self.core.paths["p"].consistency.asked_by(partner, "p.2")

    def release(self) -> None:
        self.tell(Postponed(self.now, "p", None))

    def wait(self, us: int) -> None:
        """Ticks come when they were asked for."""
        until = self.now + us
        while self.wake_at and min(self.wake_at) <= until:
            self.now = min(self.wake_at)
            self.wake_at.remove(self.now)
            self.tell(Tick(self.now))
        self.now = until


words = st.sampled_from(
    [
        *[("grow", stream, n, 0) for stream in INPUTS for n in (1, 3)],
        *[("grow", stream, n, more) for stream in INPUTS for n in (0, 1) for more in (1, 3)],
        *[("fail", stream) for stream in INPUTS for _ in range(3)],
        *[("flap", stream) for stream in INPUTS],
        *[("heal",)] * 3,
        *[("wait", us) for us in (1, 200, 900, 1_500, 1_500)],
        *[("finish",)] * 4,
        *[("guess", True)] * 4,
        ("guess", False),
        *[("answer", answer) for answer in ("postponed", "refused", "alone")],
        *[("asked_by", partner) for partner in ("p.1", "p.3")],
        *[("release",)] * 2,
    ]
)
stories = st.lists(words, min_size=10, max_size=60)
policies = st.builds(
    Policy,
    failure=st.sampled_from(["delay", "process", "delay", "process", "block"]),
    stabilization=st.sampled_from(["suspend", "delay", "process"]),
    reconcile=st.sampled_from(["checkpoint", "undo"]),
    patience_us=st.just(1_000),
    own_us=st.sampled_from([0, 300]),
    partners=st.sampled_from([(), ("p.1",)]),
)


@settings(deadline=None, max_examples=300)
@given(policies, st.booleans(), st.sampled_from([1, 2, 256]), stories)
def test_stable_never_goes_back_and_everything_is_corrected_once_it_can_be(
    policy: Policy, convergent: bool, group: int, story: list[tuple[object, ...]]
) -> None:
    """Properties 3 and 4 of section 3.5, as far as one path can keep them."""
    plan = PathPlan("p", INPUTS, tuple(TREES), convergent, EXTENT, policy, TREES)
    core = Progress([plan], checkpoint_buckets=0, group_buckets_max=group)
    shell = Shell(core)
    for stream in INPUTS:
        shell.tell(InputOpened(0, stream, 0, -1))
    for stream in INPUTS:
        shell.grow(stream, 5, 0)
    while shell.run is not None:
        shell.finish()
    for word, *how in story:
        getattr(shell, str(word))(*how)
        assert core.paths["p"].position == shell.stable
        assert core.paths["p"].consistency.position == shell.tentative
    if policy.failure == "block":
        assert shell.line == 0, "nothing tentative is ever given"

    shell.newest += 1
    shell.release()
    shell.heal()
    for _ in range(3 * len(story) + 10):
        shell.answer("alone")
        shell.guess()
        shell.finish()
        shell.wait(10_000)
    assert (shell.stable, shell.tentative, shell.state) == (shell.newest, None, OutputState.STABLE)
    assert not (shell.run or shell.guesses or shell.asked)
