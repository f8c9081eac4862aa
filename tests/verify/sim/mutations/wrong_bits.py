"""Mistakes in finding which of two replicas computed wrong rows. A bit is flipped on purpose; the
direct effects of that bit are expected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.core import divergence
from holdfast.core.divergence import Divergence
from tests.verify.sim.mutations.planting import mutation


@mutation("never compare digests", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Divergence, "_compared", lambda self, event: [])


@mutation("compare only the newest bucket", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Divergence._compared

    def newest(self: Divergence, event: Any) -> Any:
        upto = min(event.own.upto, event.theirs.upto)
        return original(self, replace(event, own=replace(event.own, since=upto)))

    patch.setattr(Divergence, "_compared", newest)


@mutation("never let a replica recompute", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Divergence, "_its_turn", lambda self, known, at: False)


@mutation("refute the replica that is confirmed", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Divergence._recomputed

    def swapped(self: Divergence, event: Any) -> Any:
        difference = self.differences.get(event.stream)
        if difference is not None and event.digest is not None and difference.theirs:
            other = next(iter(difference.theirs.values()))
            digest = other if event.digest == difference.own else difference.own
            event = replace(event, digest=digest)
        return original(self, event)

    patch.setattr(Divergence, "_recomputed", swapped)


@mutation("trust the own result in a recomputation", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Divergence._recomputed

    def sure(self: Divergence, event: Any) -> Any:
        difference = self.differences.get(event.stream)
        own = event.digest if difference is None else difference.own
        return original(self, replace(event, digest=own))

    patch.setattr(Divergence, "_recomputed", sure)


@mutation("ignore all other replicas", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(divergence, "FRESH_US", -1)
