"""Verdicts of the checkers. `unknown` is a valid outcome: a run that ended during a recovery has
neither kept nor broken the promise in question."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["ok", "failed", "unknown"]


@dataclass(frozen=True, slots=True)
class Verdict:
    checker: str
    outcome: Outcome
    #: The first violation, and the number of further ones; empty if the outcome is `ok`.
    why: str = ""
    #: Time of the violation, on the clock of the history.
    at: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One violation. A verdict shows the earliest one, which may have caused the others."""

    at: int
    why: str


def judged(checker: str, faults: Sequence[Fault]) -> Verdict:
    if not faults:
        return Verdict(checker, "ok")
    first = min(faults)
    others = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Verdict(checker, "failed", first.why + others, first.at)


def verdict_table(verdicts: Sequence[Verdict], *, since_us: int = 0) -> str:
    """One line per checker, with times in seconds since `since_us`."""
    lines = [("checker", "outcome", "at", "why")]
    for verdict in verdicts:
        at = "" if verdict.at is None else f"{(verdict.at - since_us) / 1e6:.3f}s"
        lines.append((verdict.checker, verdict.outcome, at, verdict.why))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        "  ".join([*map(str.ljust, line[:3], widths), line[3]]).rstrip() for line in lines
    )


def write_json(body: dict[str, Any], to: str) -> None:
    """Writes JSON to a file, or to standard output if `to` is `-`."""
    if to == "-":
        json.dump(body, sys.stdout, indent=2)
        print()
    else:
        with open(to, "w") as file:
            json.dump(body, file, indent=2)
