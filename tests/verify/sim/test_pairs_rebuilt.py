"""Pairs in virtual time: one disk is enough, a replica without progress is evicted, and lost state
is reported. Each case stopped an output, or grew without bound, before catch-up was one state
machine."""

from __future__ import annotations

from holdfast.config import Options
from holdfast.verify.history import Held, Progressed, Stopped
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.simulation import Outcome, simulate

S = 1_000_000
OPTIONS = Options(checkpoint_buckets=7, recovery="checkpoint")


def run(
    network: str, seconds: float, *faults: Fault, options: Options = OPTIONS, seed: int = 0
) -> Outcome:
    return simulate(Scenario("pairs", network, seconds, faults, seed), options)


def events_of(outcome: Outcome, process: str, event: str) -> list[int]:
    return [at for at, name, text, _ in outcome.world.trace if name == process and text == event]


def evicted(outcome: Outcome, node: str) -> bool:
    declarations = [more for _, _, text, more in outcome.world.trace if text == "declares dead"]
    return any(name == node and "no progress although" in why for name, why in declarations)


def longest_wait_us(outcome: Outcome, from_us: int, to_us: int) -> int:
    times = [event.at for event in outcome.history.of(Progressed) if from_us <= event.at <= to_us]
    return max(b - a for a, b in zip([from_us, *times], [*times, to_us], strict=True))


# -- one disk -------------------------------------------------------------------------------------


def test_a_pair_survives_the_loss_of_a_disk_while_the_peer_is_down() -> None:
    """The peer restarts from its own disk: the inputs that its checkpoint needs were retained."""
    outcome = run(
        "pairs-2", 40,
        Fault(10 * S, "kill", "lower.0", 4 * S), Fault(11_500_000, "wipe", "lower.0@2", S),
    )  # fmt: skip
    assert outcome.failed == []


def test_a_pair_survives_the_loss_of_a_disk_long_after_the_peer_was_declared_dead() -> None:
    outcome = run(
        "pairs-1", 60,
        Fault(10 * S, "kill", "lower.0", 20 * S), Fault(25 * S, "wipe", "lower.0@2", 35 * S),
    )  # fmt: skip
    assert outcome.failed == []


def test_a_pair_survives_the_loss_of_a_disk_while_the_peer_is_rebuilt_from_it() -> None:
    """The new replica keeps its old storage until the new storage is complete."""
    for after_ms in (5, 20, 60, 150, 400):
        wiped_us = 14 * S + after_ms * 1_000
        outcome = run(
            "pairs-1", 40,
            Fault(10 * S, "kill", "lower.0", 4 * S), Fault(wiped_us, "wipe", "lower.0@2", 3 * S),
            seed=after_ms,
        )  # fmt: skip
        assert outcome.failed == [], after_ms


def test_the_loss_of_both_replicas_is_reported_at_once_with_the_reason() -> None:
    """One replica is down for longer than `rejoin`, then the disk of its peer is lost."""
    outcome = run(
        "pairs-1", 60,
        Fault(10 * S, "kill", "lower.0", 30 * S), Fault(35 * S, "wipe", "lower.0@2", 6 * S),
        options=Options(checkpoint_buckets=7, recovery="checkpoint", rejoin="10s"),
    )  # fmt: skip
    stopped = next(outcome.history.of(Stopped))
    assert stopped.fault_of == "world" and stopped.at < 44 * S
    assert "StateLost" in stopped.why and "is catching up itself" in stopped.why
    assert "which is retained only from" in stopped.why or "has no checkpoint of" in stopped.why
    restarts = [at for at in events_of(outcome, "lower.0", "started") if at > 41 * S]
    assert not restarts, "a node whose state is lost is not restarted"


# -- a fetch that takes long ----------------------------------------------------------------------


def test_results_are_trimmed_while_a_slow_new_replica_fetches_them() -> None:
    """Every piece takes two seconds; consumers continue to read and to acknowledge."""
    outcome = run(
        "pairs-1", 90,
        Fault(10 * S, "delay", "lower.0@2<->lower.0", 70 * S, 900.0),
        Fault(12 * S, "wipe", "lower.0", S),
    )  # fmt: skip
    assert outcome.failed == []
    (rebuilt,) = events_of(outcome, "lower.0", "caught up, state from")
    assert rebuilt > 25 * S


# -- alive but no progress ------------------------------------------------------------------------

FULL = Fault(5 * S, "full", "lower.0@2", 50 * S)


def test_a_replica_with_a_full_disk_does_not_stop_the_output() -> None:
    for buffer_buckets in (None, 24):
        options = Options(
            checkpoint_buckets=7, recovery="checkpoint", buffer_buckets=buffer_buckets
        )
        outcome = run("pairs-2", 65, FULL, options=options)
        assert outcome.failed == [], buffer_buckets
        assert longest_wait_us(outcome, 6 * S, 54 * S) < 3 * S
        assert events_of(outcome, "lower.0@2", "caught up, state from"), (
            "the replica is rebuilt when its disk works again"
        )


def test_data_retained_for_a_replica_with_a_full_disk_is_bounded() -> None:
    options = Options(checkpoint_buckets=7, recovery="checkpoint", rejoin="5s")
    outcome = run("pairs-2", 65, FULL, options=options)
    assert outcome.failed == []
    held = [h for h in outcome.history.of(Held) if h.where == "ingress log"]
    late = [h.buckets for h in held if 30 * S < h.at < 55 * S]
    assert late and max(late) <= 30, "retained buckets of the source are bounded"


def test_a_replica_whose_steps_hang_is_evicted_and_rebuilt() -> None:
    outcome = run("pairs-2", 40, Fault(5 * S, "slow", "lower.0@2", 10_300_000, 1_000.0))
    assert longest_wait_us(outcome, 6 * S, 39 * S) < 3 * S
    assert evicted(outcome, "lower.0@2")
    assert outcome.failed == []


def test_a_replica_that_is_cut_off_from_its_inputs_is_evicted_and_rebuilt() -> None:
    outcome = run("pairs-2", 60, Fault(5 * S, "cut", "ingress<->lower.0@2", 30 * S))
    assert evicted(outcome, "lower.0@2")
    assert outcome.failed == []
