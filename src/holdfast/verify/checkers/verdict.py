"""What a checker says. `unknown` is an answer too: a run that ended in the middle of a repair has
neither kept nor broken what it would have had to keep."""

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
    #: The first thing that was found, and how many more there are; empty when it is `ok`.
    why: str = ""
    #: When it went wrong, in the time of the history.
    at: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One violation. The earliest comes first in a verdict, for it may have caused the others."""

    at: int
    why: str


def judged(checker: str, faults: Sequence[Fault]) -> Verdict:
    if not faults:
        return Verdict(checker, "ok")
    first = min(faults)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Verdict(checker, "failed", first.why + more, first.at)


def verdict_table(verdicts: Sequence[Verdict], *, since_us: int = 0) -> str:
    """One line per checker, the times in seconds since then."""
    lines = [("checker", "outcome", "at", "why")]
    for verdict in verdicts:
        at = "" if verdict.at is None else f"{(verdict.at - since_us) / 1e6:.3f}s"
        lines.append((verdict.checker, verdict.outcome, at, verdict.why))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        "  ".join([*map(str.ljust, line[:3], widths), line[3]]).rstrip() for line in lines
    )


def write_verdicts(told: dict[str, Any], to: str) -> None:
    """As JSON into a file, or `-` to standard output."""
    if to == "-":
        json.dump(told, sys.stdout, indent=2)
        print()
    else:
        with open(to, "w") as file:
            json.dump(told, file, indent=2)
