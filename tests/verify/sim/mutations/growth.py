"""Mistakes that only let data grow, or only take longer."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core import durability, progress
from holdfast.core.sunion import FOREVER, SUnion
from holdfast.edge.client import Client
from holdfast.engine.inputs import Results
from holdfast.node.executor import Performer
from holdfast.node.input_index import InputIndex
from holdfast.storage import Log
from holdfast.streams.soutput import SOutput
from holdfast.verify.sim.tables import Rows
from tests.verify.sim.lab import changing
from tests.verify.sim.mutations.planting import mutation


@mutation("never trim a log", "bounded", scene="undoing_reader")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Log, "trim", lambda self, stream, upto: None)


@mutation("never forget an input", "bounded", scene="undoing_reader")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InputIndex, "forget", lambda self, stream, upto: None)


@mutation("never acknowledge an input", "bounded", scene="undoing_reader")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.Progress, "_acknowledge", lambda self, path: [])


@mutation("never acknowledge an output", "bounded", scene="undoing_reader")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Client, "_acknowledge", lambda self: None)


@mutation("never write a checkpoint", "bounded", scene="suspending")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(durability, "_requested", lambda path, at: [])


@mutation("wait for more input than needed", "delay", scene="undoing_reader")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.all_complete_upto

    def cautious(self: SUnion) -> int | None:
        complete_upto = original(self)
        return (
            complete_upto
            if complete_upto is None or complete_upto >= FOREVER
            else complete_upto - 3
        )

    patch.setattr(SUnion, "all_complete_upto", cautious)


@mutation("compute different bits after a restart", "converge", scene="wipes")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer.step

    def other(self: Performer, path: Any, *rest: Any) -> Any:
        def shift(results: Results) -> None:
            for tables in results.values():
                for number, (bucket, table) in enumerate(tables):
                    rows = [(*row[:-1], row[-1] + self.log.epoch) for row in table.rows]
                    tables[number] = bucket, Rows(rows)

        patch.setattr(self.engine, "run", changing(self.engine.run, shift))
        return original(self, path, *rest)

    patch.setattr(Performer, "step", other)
    patch.setattr(SOutput, "_compare", lambda self, output, results, lo, hi: None)
