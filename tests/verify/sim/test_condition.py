"""What the oracle takes for granted about slow links, and for how long."""

from __future__ import annotations

from holdfast.verify.scenario import Scenario
from holdfast.verify.sim.condition import Condition
from holdfast.verify.sim.links import SILENCE_US
from holdfast.verify.sim.simulation import Simulation

MS = 1_000


def calm(network: str) -> Simulation:
    return Simulation(Scenario("calm", network, 1.0, ()))


def test_a_delay_that_a_blocking_fragment_passes_on_must_be_bearable_downstream() -> None:
    """`top` blocks and would bear any delay; `bottom` also reads a source that is not delayed."""
    run = calm("diamond")
    run.network.protect("bottom", on_failure="delay", max_delay="850ms")
    bears_us = Condition(run.cast, 0)._bears_us
    assert 0 < bears_us["bottom"] < 200 * MS
    assert bears_us["top"] == bears_us["left"] == bears_us["right"] == bears_us["bottom"]


def test_blocking_fragments_bear_every_delay_that_is_no_silence() -> None:
    run = calm("chain")
    assert set(Condition(run.cast, 0)._bears_us.values()) == {SILENCE_US}


def test_messages_in_flight_delay_later_ones_after_the_fault() -> None:
    run = calm("chain")
    wire, world = run.cast.wire, run.world
    link = wire.link("s1", "first")
    assert wire.delays_us == 0 and not wire.settling
    link.delay_us = 400 * MS
    arrives_us = world.now + wire.delay(link)
    link.delay_us = 0
    assert wire.delays_us == 400 * MS and wire.settling
    world.now = arrives_us - 1
    assert wire.delays_us == 400 * MS
    world.now = arrives_us
    assert wire.delays_us == 0 and not wire.settling
