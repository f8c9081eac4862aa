"""Mistakes in telling which of two replicas made wrong rows. A bit is flipped on purpose, and
what follows from that alone is no news."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.core import divergence
from holdfast.core.divergence import Divergence
from tests.verify.sim.mutations.planting import mutation


@mutation("compare no digests", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Divergence, "_compared", lambda self, event: [])


@mutation("compare the newest bucket only", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Divergence._compared

    def newest(self: Divergence, event: Any) -> Any:
        upto = min(event.own.upto, event.theirs.upto)
        return original(self, replace(event, own=replace(event.own, since=upto)))

    patch.setattr(Divergence, "_compared", newest)


@mutation("compare only one replica's turn after the other's", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Divergence, "_its_turn", lambda self, known, at: False)


@mutation("refute whoever is confirmed", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Divergence._recomputed

    def swapped(self: Divergence, event: Any) -> Any:
        known = self.differences.get(event.stream)
        if known is not None and event.digest is not None and known.theirs:
            other = next(iter(known.theirs.values()))
            digest = other if event.digest == known.own else known.own
            event = replace(event, digest=digest)
        return original(self, event)

    patch.setattr(Divergence, "_recomputed", swapped)


@mutation("believe the own result when it is computed again", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Divergence._recomputed

    def sure(self: Divergence, event: Any) -> Any:
        known = self.differences.get(event.stream)
        own = event.digest if known is None else known.own
        return original(self, replace(event, digest=own))

    patch.setattr(Divergence, "_recomputed", sure)


@mutation("think that nobody else is there", "detected", scene="flipped")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(divergence, "FRESH_US", -1)
