"""The figures of the paper on continuous eventual checkpointing (section IV): cost of footprints
(Figure 5), and the dials Q, U and CP (Figures 6 to 9).

A step of Spark takes longer than the shortest period CP of the paper. So CI and CP are ten times as
long for the dial CP, and twice as long for U, where a longer CP would decide instead of U. The
dials are apart from each other: Q limits the extent by merging layers, U and CP limit what is
replayed by making more footprints durable. With Q, the footprints of every step are made durable,
as in the paper.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

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
from holdfast.model.protection import Protection

Say = Callable[[str], None]

ROWS = 20_000
IDS, WINDOW = 100_000, 10
#: Windows that are open on average; the paper has 90,000, too.
OPEN = 90_000
#: Steps until a window has all its rows.
LIFETIME = IDS * WINDOW // ROWS
#: How many times as long as in the paper CI and CP are.
SCALE = {"u": 2, "cp": 10}
Q = (1, 2, 4, 8)
U = (125_000, 250_000, 500_000, 1_000_000)
CP_MS = (25, 50, 100, 250)
CI_MS = {"u": 5, "cp": 10}
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
#: All footprints of every step are made durable.
EVERY_STEP = Settings(Targets(rows=0), None)


#: Steps of a form in a row; as many buckets are one step of the lazy form.
CHUNK = 10
#: Resampled sets of chunks, for the spread of a ratio.
RESAMPLED = 1_000


def baseline(sessions: Sessions, folder: str, repeats: int, steps: int, say: Say) -> dict[str, Any]:
    """Rows per second with footprints (Figure 5), as ratios of the same steps without checkpoints.
    `literal`: the footprints of every step are made durable, so that every window that is open
    after its first step has one (Gopen). `again`: without checkpoints, too, which shows the noise
    of the measurement. The forms alternate after every `CHUNK` buckets, and the time contains that
    until all work beside the steps is done."""
    forms = {
        "none": Form("none"),
        "again": Form("none"),
        "default": Form("cec", Settings.of(Protection(recovery="cec"))),
        "literal": Form("cec", EVERY_STEP),
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
        took_s: dict[str, list[float]] = {name: [] for name in forms}
        order = list(forms)
        chunks = steps // CHUNK
        for number in range((repeats + 1) * chunks):
            order = [*order[1:], order[0]]
            for name in order:
                group = CHUNK if name == "lazy" else 1
                seconds = benches[name].timed(CHUNK, group, settles=True)
                if number >= chunks:  # first, a warm-up
                    took_s[name].append(seconds)
        found[kind] = compared(took_s, repeats)
        for bench in benches.values():
            bench.close()
        shown = [f"{name} {ratio:.3f}" for name, ratio in found[kind]["ratio"].items()]
        say(f"{kind} windows: rows/s over those without checkpoints: {', '.join(shown)}")
    return found


def compared(took_s: dict[str, list[float]], repeats: int) -> dict[str, Any]:
    """Rates of each form over those of `none`, from the seconds of chunks that ran in turn: in all,
    by repeat, and the middle 90 % of the ratio over resampled chunks."""
    times = {name: np.array(of) for name, of in took_s.items()}
    none = times["none"]
    picks = np.random.default_rng(0).integers(0, len(none), (RESAMPLED, len(none)))
    found: dict[str, Any] = {"rows_per_s": {}, "ratio": {}, "ratio_90": {}, "ratios": {}}
    for name, of in times.items():
        parts, base = (np.array_split(each, repeats) for each in (of, none))
        resampled = none[picks].sum(axis=1) / of[picks].sum(axis=1)
        found["rows_per_s"][name] = [round(CHUNK * ROWS / part.mean()) for part in parts]
        found["ratio"][name] = round(float(none.sum() / of.sum()), 3)
        found["ratio_90"][name] = [round(float(q), 3) for q in np.quantile(resampled, (0.05, 0.95))]
        found["ratios"][name] = [
            round(float(one.sum() / part.sum()), 3) for one, part in zip(base, parts, strict=True)
        ]
    return found


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a dial."""

    dial: str
    value: int
    settings: Settings


def points() -> list[Point]:
    def of(dial: str, value: int, targets: Targets, cp_ms: int) -> Point:
        pace = Pace(SCALE[dial] * CI_MS[dial] * 1_000, SCALE[dial] * cp_ms * 1_000)
        return Point(dial, value, Settings(targets, pace))

    return [
        *(Point("q", times, Settings(Targets(times * OPEN, rows=0), None)) for times in Q),
        *(of("u", rows, Targets(rows=rows), 100) for rows in U),
        *(of("cp", cp_ms, Targets(rows=0), cp_ms) for cp_ms in CP_MS),
    ]


def sweep(sessions: Sessions, folder: str, crashes: int, steps: int, say: Say) -> dict[str, Any]:
    """Run every setting to a steady state, then crash it several times, at moments that are spread
    evenly between two actions of the dial."""
    work = Workload(IDS, WINDOW, ROWS)
    inputs = Inputs(work, os.path.join(folder, "in"))
    warm = 2 * LIFETIME  # every window has closed at least once
    found: dict[str, Any] = {"q": [], "u": [], "cp": [], "without": {}}
    for point in [*points(), None]:
        form = Form("none") if point is None else Form("cec", point.settings)
        name = "without" if point is None else f"{point.dial}-{point.value}"
        bench = Bench(work, form, sessions, os.path.join(folder, name), inputs)
        bench.advance(warm)
        if point is None:
            samples = [_response(bench, steps) for _ in range(crashes)]
        else:
            samples = [
                _sample(bench, point, max(steps, 2 * _cycle(point)), (number + 0.5) / crashes)
                for number in range(crashes)
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


def _cycle(point: Point) -> int:
    """Steps in which a dial acts at least once: until the extent or the rows reach the target, or
    two periods CP, of which a step takes a tenth of a second or longer."""
    if point.dial == "q":
        return point.value * OPEN // ROWS
    if point.dial == "u":
        return point.value // ROWS
    assert point.settings.pace is not None
    return 2 * point.settings.pace.period_us // WIDTH_US


def _response(bench: Bench, steps: int) -> dict[str, float]:
    """The time from the opening to the closing of a window."""
    return {"response_s": round(LIFETIME * bench.timed(steps) / steps, 2)}


def _sample(bench: Bench, point: Point, steps: int, share: float) -> dict[str, float]:
    """Run so many steps, then until this share of the time between two actions of the dial has
    passed, and crash."""
    before = bench.durable_entries, bench.rewritten
    sample = _response(bench, steps)
    footprints, rewritten = bench.durable_entries - before[0], bench.rewritten - before[1]
    acted = bench.merged_at if point.dial == "q" else bench.named_at
    cycle = max((after - at for at, after in pairwise(acted)), default=_cycle(point))
    passed = bench.bucket - acted[-1] if acted else 0
    bench.advance((round(share * cycle) - passed) % cycle)
    bench.crash()
    forget_pages(bench.folder, bench.inputs.folder)
    recovery = bench.recover()
    return sample | {
        "footprints": footprints / steps,
        "rewritten": rewritten / steps,
        "extent": recovery.entries,
        "load_s": round(recovery.load_s, 3),
        "decode_s": round(bench.decode_s(), 3),
        "replayed_mb": round(recovery.buckets * bench.workload.rows * ROW_BYTES / 1e6, 1),
        "recovery_s": round(recovery.seconds, 2),
    }


def _rises(values: Sequence[float]) -> bool:
    return all(one <= other for one, other in pairwise(values))


#: What each dial lowers, and what it raises for that.
CHANGES = {
    "q": ("rewritten", "extent"),
    "u": ("footprints", "replayed_mb"),
    "cp": ("footprints", "replayed_mb"),
}


def monotone(found: dict[str, Any]) -> dict[str, bool]:
    """Whether each dial lowers the work of running and raises that of recovery, step by step, and
    between its ends at least three times."""
    result = {}
    for dial, keys in CHANGES.items():
        work, recovery = ([row[key] for row in found[dial]] for key in keys)
        ordered = _rises(work[::-1]) and _rises(recovery)
        result[dial] = ordered and work[0] >= 3 * work[-1] and recovery[-1] >= 3 * recovery[0]
    return result


def load_times(found: dict[str, Any]) -> dict[str, Any]:
    """The time to load an extent of at least 120,000 and 500,000 entries."""
    samples = [
        sample for dial in ("q", "u", "cp") for row in found[dial] for sample in row["samples"]
    ]
    result = {}
    for name, entries in (("120k", 120_000), ("500k", 500_000)):
        near = [s for s in samples if 0.9 * entries <= s["extent"] <= 1.3 * entries]
        for part in ("load", "decode") if near else ():
            per_entry = statistics.median(s[f"{part}_s"] / s["extent"] for s in near)
            result[f"{part}_s_{name}"] = round(per_entry * entries, 3)
    return result
