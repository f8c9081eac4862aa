"""Mistakes in sources whose clock is stepped, and in the handling of rejected rows."""

from __future__ import annotations

import pytest

from holdfast.core.source_clock import Behind, ClockAction, Read, SourceClock
from holdfast.core.watermark import Watermark
from holdfast.edge.dead_letters import DeadLetters
from holdfast.edge.source import Source
from holdfast.types import Segment
from holdfast.verify.scenario import Fault
from tests.verify.sim.mutations.planting import S, mutation

HOUR_MS = 3_600_000.0
SET_BACK = (Fault(5 * S, "skew", "s1", 9 * S, -HOUR_MS),)
PUT_RIGHT = (Fault(2 * S, "skew", "s1", 6 * S, -HOUR_MS),)
AN_HOUR_AHEAD = (Fault(4 * S, "skew", "s1", 9 * S, HOUR_MS),)
GLITCH = (Fault(5 * S, "skew", "s1", 600_000, HOUR_MS),)
#: Killed while its clock is behind the buckets that it has closed.
RESTARTED = (
    Fault(4 * S, "skew", "s2", 16 * S, -HOUR_MS),
    Fault(5 * S, "kill", "s2", S // 2),
)
#: A crash at any write of a push or of a closed bucket.
TORN = tuple(Fault((2 + 2 * n) * S, "torn", "s2", S, float(n)) for n in range(1, 9))


def _shows(patch: pytest.MonkeyPatch, ahead: bool, back: bool) -> None:
    """The source clock follows the wall clock at once after a step ahead, or back."""
    original = SourceClock.handle

    def handle(self: SourceClock, event: Read) -> list[ClockAction]:
        actions = original(self, event)
        if (ahead and self.apart_us < 0) or (back and self.apart_us > 0):
            self._shown = self._wall
        return actions

    patch.setattr(SourceClock, "handle", handle)


@mutation("close buckets by the wall clock", "closing", faults=SET_BACK)
def _(patch: pytest.MonkeyPatch) -> None:
    _shows(patch, ahead=True, back=True)


@mutation("follow a clock step ahead at once", "closing", faults=GLITCH)
def _(patch: pytest.MonkeyPatch) -> None:
    _shows(patch, ahead=True, back=False)


@mutation("never follow a clock step ahead", "closing", faults=PUT_RIGHT)
def _(patch: pytest.MonkeyPatch) -> None:
    original = SourceClock.handle

    def handle(self: SourceClock, event: Read) -> list[ClockAction]:
        shown, actions = self._shown, original(self, event)
        self._shown = min(self._shown, shown)
        return actions

    patch.setattr(SourceClock, "handle", handle)


@mutation("stop the source clock until the wall clock has caught up", "closing", faults=SET_BACK)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("holdfast.core.source_clock.SLOWER", 1)


@mutation("start from the wall clock regardless of closed buckets", "closing", faults=RESTARTED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = SourceClock._begin

    def begin(self: SourceClock, at: int, wall: int) -> list[ClockAction]:
        self._not_before_us = None
        return [a for a in original(self, at, wall) if not isinstance(a, Behind)]

    patch.setattr(SourceClock, "_begin", begin)


@mutation("drop late rows", "accepted", faults=SET_BACK)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeadLetters, "add", lambda self, rows, reason: None)


@mutation("log dead letters before the token of their push", "accepted", faults=TORN)
def _(patch: pytest.MonkeyPatch) -> None:
    original = DeadLetters.write

    def apart(self: DeadLetters, now_us: int) -> Segment | None:
        segment = original(self, now_us)
        if segment is not None:
            self._log.commit(self.stream, [segment], segment.id.bucket)
            self.written()
        return None

    patch.setattr(DeadLetters, "write", apart)


@mutation("keep dead letters after they were logged", "accepted", faults=SET_BACK)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeadLetters, "written", lambda self: None)


@mutation("accept rows of closed buckets", "alive", "accepted", faults=SET_BACK)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Source, "_open_us", lambda self: -(2**62))


@mutation("accept rows of the future", "bounded", faults=AN_HOUR_AHEAD)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watermark, "future_after_us", 2**62)
