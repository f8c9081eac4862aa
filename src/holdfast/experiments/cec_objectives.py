"""Recovery-time objectives, and whole-state checkpoints on the same workload.

`objectives`: the user states how long recovery may take; the node is crashed at random moments.
`whole_state`: what eventual checkpoints cost beside copies of the whole state that give the same
recovery time, and beside checkpoints of changed layers only.
`delays`: what they cost the slowest results.
"""

from __future__ import annotations

import os
import random
import statistics
from typing import Any

from holdfast.core.eventual_checkpoint import Settings, Targets
from holdfast.engine.session import Sessions
from holdfast.experiments.cec_bench import Bench, Form, Inputs, Recovery, Workload, forget_pages
from holdfast.experiments.cec_sweeps import IDS, ROWS, WINDOW, Say
from holdfast.experiments.growth_bench import Written
from holdfast.model.protection import Protection

OBJECTIVES_S = (1, 2, 5)
#: Every window has closed at least once.
WARM = 2 * IDS * WINDOW // ROWS
#: U of the comparison with checkpoints of the whole state.
COMPARED_ROWS = 1_000_000
#: Steps of a form in a row when delays are measured; every second time there is a checkpoint.
DELAYED = 50


def crash(bench: Bench) -> Recovery:
    bench.crash()
    forget_pages(bench.folder, bench.inputs.folder)
    return bench.recover()


def objectives(sessions: Sessions, folder: str, crashes: int, say: Say) -> dict[str, Any]:
    work, found = Workload(IDS, WINDOW, ROWS), dict[str, Any]()
    inputs = Inputs(work, os.path.join(folder, "in"))
    for stated_s in OBJECTIVES_S:
        settings = Settings.of(Protection(recovery="cec", recovery_time=f"{stated_s}s"))
        name = os.path.join(folder, f"objective-{stated_s}")
        bench = Bench(work, Form("cec", settings), sessions, name, inputs)
        bench.advance(WARM)
        rng, took_s, predicted_s, bytes_, rows = random.Random(stated_s), [], [], 0, 0
        for _ in range(crashes):
            steps, before = rng.randrange(3, 20), bench.durable_bytes
            bench.advance(steps)
            bench.settle()
            rows, bytes_ = rows + steps * ROWS, bytes_ + bench.durable_bytes - before
            assert bench.control is not None
            predicted_s.append(bench.control.predicted_us / 1e6)
            took_s.append(crash(bench).seconds)
        errors = sorted(
            abs(predicted - took) / took
            for predicted, took in zip(predicted_s, took_s, strict=True)
        )
        found[f"{stated_s}s"] = {
            "crashes": crashes,
            "within": sum(took <= stated_s for took in took_s),
            "recovery_s": [round(took, 2) for took in took_s],
            "predicted_s": [round(predicted, 2) for predicted in predicted_s],
            "error_median": round(statistics.median(errors), 3),
            "error_p90": round(errors[int(0.9 * len(errors))], 3),
            "bytes_per_row": round(bytes_ / rows, 2),
        }
        say(f"recovery within {stated_s} s: {found[f'{stated_s}s']['within']} of {crashes}, median "
            f"{statistics.median(took_s):.2f} s, predicted {statistics.median(predicted_s):.2f} s, "
            f"{bytes_ / rows:.1f} bytes made durable a row")  # fmt: skip
        bench.close()
    first, last = (found[f"{stated_s}s"]["bytes_per_row"] for stated_s in OBJECTIVES_S[::2])
    found["bytes_5s_over_1s"] = round(last / first, 3)
    return found


def whole_state(
    sessions: Sessions, folder: str, steps: int, crashes: int, say: Say
) -> dict[str, Any]:
    """Time and bytes of eventual checkpoints, and of copies of the whole state that are made as
    often as the same recovery time requires."""
    work = Workload(IDS, WINDOW, ROWS)
    inputs = Inputs(work, os.path.join(folder, "in"))
    every = COMPARED_ROWS // ROWS
    forms = {
        "none": Form("none"),
        "cec": Form("cec", Settings(Targets(rows=COMPARED_ROWS))),
        "full": Form("full", every=every),
        "delta": Form("delta", every=every),
    }
    benches, written = {}, {}
    for name, form in forms.items():
        benches[name] = Bench(work, form, sessions, os.path.join(folder, f"whole-{name}"), inputs)
        benches[name].advance(WARM + every)  # every window has a footprint or a checkpoint
        written[name] = Written(benches[name].folder)
        written[name].look()
        written[name].reset()
    before = {name: (bench.checkpoint_us, bench.durable_bytes) for name, bench in benches.items()}
    took_s: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(steps):
        for name in list(forms) if number % 2 else list(forms)[::-1]:
            took_s[name].append(benches[name].timed(1))
            written[name].look()
    rows = steps * ROWS
    for bench in benches.values():
        bench.settle()
    found: dict[str, Any] = {}
    for name, bench in benches.items():
        written[name].look()
        spent_us, durable_bytes = before[name]
        more_bytes = written[name].state_bytes - written["none"].state_bytes
        found[name] = {
            "us_per_row": round((bench.checkpoint_us - spent_us) / rows, 4),
            "bytes_per_row": round(more_bytes / rows, 2),
            "durable_bytes_per_row": round((bench.durable_bytes - durable_bytes) / rows, 2),
            "step_ms": round(1_000 * statistics.median(took_s[name]), 1),
        }
    for name in ("cec", "full", "delta"):
        found[name]["recoveries"] = [
            _recovery(benches[name], late) for _ in range(crashes) for late in (False, True)
        ]
    for bench in benches.values():
        bench.close()
    found |= _ratios(found)
    say(f"time {found['time_ratio']:.2f}, bytes {found['bytes_ratio']:.2f} and flushed bytes "
        f"{found['durable_ratio']:.2f} of copies of the whole state every "
        f"{found['full_every_rows']:,.0f} rows")  # fmt: skip
    return found


def _recovery(bench: Bench, late: bool) -> dict[str, Any]:
    """Crash soon after a checkpoint, or just before the next one."""
    at = COMPARED_ROWS // ROWS - 1 if late else 1
    while bench.since_checkpoint != at:
        bench.advance(1)
        bench.settle()
    recovery = crash(bench)
    return {"seconds": round(recovery.seconds, 2), "rows": recovery.buckets * ROWS, "late": late}


def _ratios(found: dict[str, Any]) -> dict[str, Any]:
    """Copies of the whole state are made every so many rows that their longest recovery takes as
    long as the longest one with CEC. The time of a recovery from copies is a linear function of the
    rows since the last copy."""

    def median(key: str, name: str, late: bool) -> float:
        of = [one[key] for one in found[name]["recoveries"] if one["late"] == late]
        return float(statistics.median(of))

    soon_s, late_s = (median("seconds", "full", late) for late in (False, True))
    soon_rows, late_rows = (median("rows", "full", late) for late in (False, True))
    per_row_s = max(1e-9, (late_s - soon_s) / (late_rows - soon_rows))
    equal_rows = max(ROWS, late_rows + (median("seconds", "cec", True) - late_s) / per_row_s)
    keys = {
        "time_ratio": "us_per_row", "bytes_ratio": "bytes_per_row",
        "durable_ratio": "durable_bytes_per_row",
    }  # fmt: skip
    ratios = {
        name: round(found["cec"][key] * equal_rows / (late_rows * found["full"][key]), 3)
        for name, key in keys.items()
    }
    return {"full_every_rows": round(equal_rows), **ratios}


def delays(sessions: Sessions, folder: str, steps: int, say: Say) -> dict[str, Any]:
    """Delays of results of small steps, with and without footprints. The forms alternate after
    `DELAYED` steps, when all work beside the steps is done, so that the work of one form never
    delays a step of another one. `again`: without checkpoints, too, which shows the noise of the
    measurement."""
    work = Workload(IDS, WINDOW, 1_000)
    inputs = Inputs(work, os.path.join(folder, "in-delays"))
    forms = {
        "none": Form("none"),
        "cec": Form("cec", Settings(Targets(rows=100_000))),
        "again": Form("none"),
    }
    benches = {
        name: Bench(work, form, sessions, os.path.join(folder, f"delays-{name}"), inputs)
        for name, form in forms.items()
    }
    took_s: dict[str, list[float]] = {name: [] for name in forms}
    order, warm = list(forms), steps // 5
    for number in range(0, steps + warm, DELAYED):
        order = [*order[1:], order[0]]
        for name in order:
            seconds = benches[name].advance(DELAYED)
            benches[name].settle()
            if number >= warm:
                took_s[name] += seconds
    found: dict[str, Any] = {"steps": steps}
    for name, times in took_s.items():
        times.sort()
        found[name] = {
            f"ms_{label}": round(1_000 * times[min(len(times) - 1, int(share * len(times)))], 1)
            for label, share in (("median", 0.5), ("p99", 0.99), ("p999", 0.999))
        }
    found["checkpoints"] = benches["cec"].checkpointed
    for bench in benches.values():
        bench.close()
    found["p999_ratio"] = round(found["cec"]["ms_p999"] / found["none"]["ms_p999"], 3)
    found["p999_noise"] = round(found["again"]["ms_p999"] / found["none"]["ms_p999"], 3)
    say(f"99.9th percentile of delays: {found['cec']['ms_p999']} ms with footprints, "
        f"{found['none']['ms_p999']} and {found['again']['ms_p999']} ms without")  # fmt: skip
    return found
