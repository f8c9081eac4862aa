"""The figures of the paper on continuous eventual checkpointing (section IV): cost without
checkpoints of open windows (Figure 5), and the dials Q, U and CP (Figures 6 to 9).

A step of Spark takes as long as many periods CP of the paper, so that CI and CP are ten times as
long here. As in the paper, every window that opens leaves a footprint (literal mode).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from holdfast.core.eventual_checkpoint import Pace, Settings, Targets
from holdfast.engine.session import Sessions
from holdfast.experiments.cec_bench import (
    WIDTH_US,
    Bench,
    Form,
    Inputs,
    Workload,
    forget_pages,
)

Say = Callable[[str], None]

ROWS = 20_000
IDS, WINDOW = 100_000, 10
#: Windows that are open on average; the paper has 90,000, too.
OPEN = 90_000
SCALE = 10
Q = (1, 2, 4, 8)
U = (125_000, 250_000, 500_000, 1_000_000)
CP_MS = (25, 50, 100, 250)
CI_MS = {"q": 5, "u": 5, "cp": 10}
#: What the paper reports: footprints of open windows are read from plots without values.
PAPER: dict[str, dict[str, tuple[float | None, ...]]] = {
    "q": {"extent": (120_000, 180_000, None, 500_000), "load_s": (3.5, 5.0, 14.0, 27.0),
          "replayed_mb": (25.0, 50.0, None, 200.0)},
    "u": {"extent": (120_000, None, None, 230_000), "load_s": (2.5, None, None, 6.7),
          "replayed_mb": (20.0, None, None, 90.0)},
    "cp": {"response_s": (32.5, 21.5, 18.5, 16.5)},
}  # fmt: skip
#: Bytes of a row.
ROW_BYTES = 100


def baseline(sessions: Sessions, folder: str, repeats: int, steps: int, say: Say) -> dict[str, Any]:
    """Rows per second with footprints only where they are necessary (Figure 5), as ratios of the
    same steps without footprints. The forms alternate."""
    forms = {
        "none": Form("none"),
        "default": Form("cec", Settings(Targets(), None)),
        "literal": Form("cec", Settings(Targets(), None, literal=True)),
        "lazy": Form("none"),
    }
    found: dict[str, Any] = {}
    for kind, window in (("fast", 1), ("slow", 1_000)):
        work = Workload(2, window, ROWS)
        inputs = Inputs(work, os.path.join(folder, f"in-{kind}"))
        benches = {
            name: Bench(work, form, sessions, os.path.join(folder, f"{kind}-{name}"), inputs)
            for name, form in forms.items()
        }
        rates: dict[str, list[float]] = {name: [] for name in forms}
        for number in range(repeats + 1):
            order = list(forms) if number % 2 else list(forms)[::-1]
            for name in order:
                bench, group = benches[name], 10 if name == "lazy" else 1
                took_s = bench.timed(steps, group)
                if number:  # the first round is a warm-up
                    rates[name].append(steps * ROWS / took_s)
        ratios = {
            name: [rate / none for rate, none in zip(rates[name], rates["none"], strict=True)]
            for name in forms
        }
        found[kind] = {
            "rows_per_s": {name: [round(rate) for rate in of] for name, of in rates.items()},
            "ratios": {name: [round(ratio, 3) for ratio in of] for name, of in ratios.items()},
        }
        for bench in benches.values():
            bench.close()
        shown = [f"{name} {statistics.median(of):,.0f} rows/s" for name, of in rates.items()]
        say(f"{kind} windows: {', '.join(shown)}")
    return found


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a dial."""

    dial: str
    value: int
    settings: Settings


def points() -> list[Point]:
    def of(dial: str, value: int, targets: Targets, cp_ms: int) -> Point:
        pace = Pace(SCALE * CI_MS[dial] * 1_000, SCALE * cp_ms * 1_000)
        return Point(dial, value, Settings(targets, pace, literal=True))

    return [
        *(of("q", times, Targets(entries=times * OPEN), 100) for times in Q),
        *(of("u", rows, Targets(rows=rows), 100) for rows in U),
        *(of("cp", cp_ms, Targets(entries=OPEN), cp_ms) for cp_ms in CP_MS),
    ]


def sweep(sessions: Sessions, folder: str, crashes: int, steps: int, say: Say) -> dict[str, Any]:
    """Run every setting to a steady state, then crash it several times."""
    work = Workload(IDS, WINDOW, ROWS)
    inputs = Inputs(work, os.path.join(folder, "in"))
    #: Every window has closed at least once.
    warm = 2 * IDS * WINDOW // ROWS
    found: dict[str, Any] = {"q": [], "u": [], "cp": [], "without": {}}
    lifetime = IDS * WINDOW // ROWS
    for point in [*points(), None]:
        form = Form("none") if point is None else Form("cec", point.settings)
        name = "without" if point is None else f"{point.dial}-{point.value}"
        bench = Bench(work, form, sessions, os.path.join(folder, name), inputs)
        bench.advance(warm)
        of_point = max(steps, 0 if point is None else _steps_of(point.settings))
        samples = [
            _sample(bench, of_point, lifetime, crash=point is not None) for _ in range(crashes)
        ]
        median = {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
        row = {"value": None if point is None else point.value, "samples": samples, **median}
        if point is None:
            found["without"] = row
        else:
            found[point.dial].append(row)
        say(f"{name}: " + ", ".join(f"{key} {value:,.3g}" for key, value in median.items()))
        bench.close()
    found["monotone"] = monotone(found)
    return found


def _steps_of(settings: Settings) -> int:
    """Steps that contain two periods CP; a step takes a tenth of a second or longer."""
    return 0 if settings.pace is None else -(-2 * settings.pace.period_us // WIDTH_US)


def _sample(bench: Bench, steps: int, lifetime: int, *, crash: bool) -> dict[str, float]:
    before = 0 if bench.eventual is None else bench.eventual.written["checks"]
    took_s = bench.timed(steps)
    sample: dict[str, float] = {"response_s": round(lifetime * took_s / steps, 2)}
    if not crash or bench.eventual is None:
        return sample
    sample["checks"] = (bench.eventual.written["checks"] - before) / steps
    bench.crash()
    forget_pages(bench.folder, bench.inputs.folder)
    recovery = bench.recover()
    return sample | {
        "extent": recovery.entries,
        "load_s": round(recovery.load_s, 3),
        "replayed_mb": round(recovery.buckets * bench.workload.rows * ROW_BYTES / 1e6, 1),
        "recovery_s": round(recovery.seconds, 2),
    }


def _rises(values: Sequence[float]) -> bool:
    return all(one <= other for one, other in pairwise(values))


def monotone(found: dict[str, Any]) -> dict[str, bool]:
    """Whether the dials work as in the paper: footprints of open windows become fewer, the extent
    larger and the replayed bytes more. Between the ends, footprints and one of the others differ at
    least three times."""
    result = {}
    for dial in ("q", "u", "cp"):
        checks, extent, replayed = (
            [row[key] for row in found[dial]] for key in ("checks", "extent", "replayed_mb")
        )
        ordered = _rises(checks[::-1]) and _rises(extent) and _rises(replayed)
        apart = checks[0] >= 3 * checks[-1] and (
            extent[-1] >= 3 * extent[0] or replayed[-1] >= 3 * replayed[0]
        )
        result[dial] = ordered and apart
    return result


def load_times(found: dict[str, Any]) -> dict[str, Any]:
    """The time to load an extent of at least 120,000 and 500,000 entries."""
    samples = [
        sample for dial in ("q", "u", "cp") for row in found[dial] for sample in row["samples"]
    ]
    result = {}
    for name, entries in (("120k", 120_000), ("500k", 500_000)):
        near = [s for s in samples if 0.9 * entries <= s["extent"] <= 1.3 * entries]
        if near:
            per_entry = statistics.median(s["load_s"] / s["extent"] for s in near)
            result[f"load_s_{name}"] = round(per_entry * entries, 3)
    return result
