"""Pairs in virtual time: one disk is enough, a copy that does not work is evicted, and a loss is
told. Each of these stopped an output, or grew without bound, before catch-up was one machine."""

from __future__ import annotations

from holdfast.config import Options
from holdfast.verify.history import Held, Stopped, Told
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.simulation import Outcome, simulate

S = 1_000_000
OPTIONS = Options(checkpoint_buckets=7, recovery="checkpoint")


def run(
    network: str, seconds: float, *faults: Fault, options: Options = OPTIONS, seed: int = 0
) -> Outcome:
    return simulate(Scenario("pairs", network, seconds, faults, seed), options)


def said(outcome: Outcome, who: str, what: str) -> list[int]:
    return [at for at, name, text, _ in outcome.world.trace if name == who and text == what]


def evicted(outcome: Outcome, node: str) -> bool:
    told = [more for _, _, text, more in outcome.world.trace if text == "declares dead"]
    return any(name == node and "makes no progress" in why for name, why in told)


def longest_wait_us(outcome: Outcome, from_us: int, to_us: int) -> int:
    told = [event.at for event in outcome.history.of(Told) if from_us <= event.at <= to_us]
    return max(b - a for a, b in zip([from_us, *told], [*told, to_us], strict=True))


# -- one disk -------------------------------------------------------------------------------------


def test_a_disk_that_is_lost_while_the_other_copy_is_down_is_survived() -> None:
    """The other one comes back from its own disk: what its checkpoint needs was kept."""
    outcome = run(
        "pairs-2", 40,
        Fault(10 * S, "kill", "lower.0", 4 * S), Fault(11_500_000, "wipe", "lower.0@2", S),
    )  # fmt: skip
    assert outcome.failed == []


def test_so_is_one_that_is_lost_long_after_the_other_copy_was_declared_dead() -> None:
    outcome = run(
        "pairs-1", 60,
        Fault(10 * S, "kill", "lower.0", 20 * S), Fault(25 * S, "wipe", "lower.0@2", 35 * S),
    )  # fmt: skip
    assert outcome.failed == []


def test_a_disk_that_is_lost_while_the_other_copy_is_rebuilt_from_it_is_survived() -> None:
    """The newcomer has its old storage until the new one is complete."""
    for after_ms in (5, 20, 60, 150, 400):
        wiped_us = 14 * S + after_ms * 1_000
        outcome = run(
            "pairs-1", 40,
            Fault(10 * S, "kill", "lower.0", 4 * S), Fault(wiped_us, "wipe", "lower.0@2", 3 * S),
            seed=after_ms,
        )  # fmt: skip
        assert outcome.failed == [], after_ms


def test_where_both_are_lost_it_is_told_at_once_and_with_the_reason() -> None:
    """One was away for longer than its disk is reckoned with, then the other disk is lost."""
    outcome = run(
        "pairs-1", 60,
        Fault(10 * S, "kill", "lower.0", 30 * S), Fault(35 * S, "wipe", "lower.0@2", 6 * S),
        options=Options(checkpoint_buckets=7, recovery="checkpoint", rejoin="10s"),
    )  # fmt: skip
    stopped = next(outcome.history.of(Stopped))
    assert stopped.fault_of == "world" and stopped.at < 44 * S
    assert "StateLost" in stopped.why and "waits for state itself" in stopped.why
    assert "which is kept from" in stopped.why or "has no checkpoint of" in stopped.why
    again = [at for at in said(outcome, "lower.0", "starts") if at > 41 * S]
    assert not again, "it does not try again and again"


# -- a fetch that takes long ----------------------------------------------------------------------


def test_results_are_trimmed_while_a_slow_newcomer_fetches_them() -> None:
    """Every piece takes two seconds; consumers go on reading and acknowledging."""
    outcome = run(
        "pairs-1", 90,
        Fault(10 * S, "delay", "lower.0@2<->lower.0", 70 * S, 900.0),
        Fault(12 * S, "wipe", "lower.0", S),
    )  # fmt: skip
    assert outcome.failed == []
    (rebuilt,) = said(outcome, "lower.0", "comes up from")
    assert rebuilt > 25 * S


# -- alive but no progress ------------------------------------------------------------------------

FULL = Fault(5 * S, "full", "lower.0@2", 50 * S)


def test_a_copy_with_a_full_disk_does_not_stop_the_output() -> None:
    for buffer_buckets in (None, 24):
        options = Options(
            checkpoint_buckets=7, recovery="checkpoint", buffer_buckets=buffer_buckets
        )
        outcome = run("pairs-2", 65, FULL, options=options)
        assert outcome.failed == [], buffer_buckets
        assert longest_wait_us(outcome, 6 * S, 54 * S) < 3 * S
        assert said(outcome, "lower.0@2", "comes up from"), "rebuilt when it works again"


def test_nor_does_what_is_kept_for_it_grow_without_bound() -> None:
    options = Options(checkpoint_buckets=7, recovery="checkpoint", rejoin="5s")
    outcome = run("pairs-2", 65, FULL, options=options)
    assert outcome.failed == []
    held = [h for h in outcome.history.of(Held) if h.where == "ingress log"]
    late = [h.buckets for h in held if 30 * S < h.at < 55 * S]
    assert late and max(late) <= 30, "a hundred of them were kept after fifty seconds"


def test_a_copy_whose_steps_hang_is_evicted_and_rebuilt() -> None:
    outcome = run("pairs-2", 40, Fault(5 * S, "slow", "lower.0@2", 10_300_000, 1_000.0))
    assert longest_wait_us(outcome, 6 * S, 39 * S) < 3 * S
    assert evicted(outcome, "lower.0@2")
    assert outcome.failed == []


def test_a_copy_that_was_cut_off_from_its_inputs_is_evicted_and_rebuilt() -> None:
    outcome = run("pairs-2", 60, Fault(5 * S, "cut", "ingress<->lower.0@2", 30 * S))
    assert evicted(outcome, "lower.0@2")
    assert outcome.failed == []
