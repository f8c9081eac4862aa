"""Protection of a fragment, validated in the call or when the network is checked; and the division
of an output's `within` among the fragments (Borealis sections 2.3 and 3.5)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import InputError, NetworkError
from holdfast.model.fragments import check_options, recovery_of
from holdfast.model.trees import Patience, patience

SCHEMA = "ts timestamp, k string, x double"
SECOND = 1_000_000


def same(df: Any) -> Any:
    return df


def within(text: str) -> hf.Contract:
    return hf.Contract(within=text)


def violation(net: hf.Network) -> str:
    with pytest.raises(NetworkError) as raised:
        net.check()
    (message,) = raised.value.violations
    return message


# -- options of a fragment -------------------------------------------------------------------------


def test_an_unprotected_fragment_has_one_replica_and_blocks() -> None:
    protection = hf.Network("net").protection("main")
    assert protection == hf.Protection()
    assert (protection.replicas, protection.on_failure, protection.max_delay_us) == (
        1,
        "block",
        None,
    )


def test_protect_stores_its_options() -> None:
    net = hf.Network("net")
    net.protect(replicas=2, on_failure="process", max_delay="2s")
    net.protect(
        "second", on_failure="delay", while_correcting="suspend", reconcile="undo", wait_share=1
    )
    assert net.protection("main") == hf.Protection(replicas=2, on_failure="process", max_delay="2s")
    assert net.protection("main").max_delay_us == 2 * SECOND
    assert net.protection("second").reconcile == "undo"
    assert list(net.protections) == ["main", "second"]


def test_a_second_protect_of_a_fragment_is_refused() -> None:
    net = hf.Network("net")
    net.protect(replicas=2)
    with pytest.raises(InputError, match="fragment 'main' is already protected; put all"):
        net.protect("main", on_failure="delay")
    assert net.protection("main").on_failure == "block"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "protect: replicas=0: expected an integer >= 1"),
        ({"replicas": 1.5}, "protect: replicas=1.5: expected an integer >= 1"),
        ({"on_failure": "suspend"},
         "protect: on_failure='suspend': expected one of 'block', 'delay', 'process'"),
        ({"while_correcting": "block"},
         "protect: while_correcting='block': expected one of 'suspend', 'delay', 'process'"),
        ({"recovery": "never"},
         "protect: recovery='never': expected one of 'replay', 'checkpoint'"),
        ({"reconcile": "redo"}, "protect: reconcile='redo': expected one of 'checkpoint', 'undo'"),
        ({"wait_share": 0}, "protect: wait_share=0: expected a number above 0 and up to 1"),
        ({"wait_share": 1.1}, "protect: wait_share=1.1: expected a number above 0 and up to 1"),
        ({"wait_share": float("nan")},
         "protect: wait_share=nan: expected a number above 0 and up to 1"),
        ({"max_delay": "soon"}, "protect: max_delay: 'soon' is not a duration"),
        ({"max_delay": "0s"}, "protect: max_delay: '0s' must be a positive whole number"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused_by_protect(options: dict[str, Any], message: str) -> None:
    net = hf.Network("net")
    with pytest.raises(InputError) as raised:
        net.protect(**options)
    assert str(raised.value).startswith(message)
    assert net.protections == {}


def test_a_fragment_overrides_the_recovery_of_the_options() -> None:
    net = two_fragments()
    net.protect("second", recovery="checkpoint")
    assert recovery_of(net, "first", hf.Options()) == "replay"
    assert recovery_of(net, "second", hf.Options()) == "checkpoint"
    assert recovery_of(net, "first", hf.Options(recovery="checkpoint")) == "checkpoint"


def test_silence_must_allow_for_a_lost_heartbeat_of_a_host() -> None:
    net = two_fragments()
    short = hf.Options(heartbeat="100ms", silence="1400ms")
    check_options(net, short)
    net.protect("second", replicas=2, replication="pairs")
    with pytest.raises(InputError, match="silence: '1400ms' must be at least 1500ms with pairs"):
        check_options(net, short)
    check_options(net, hf.Options(heartbeat="100ms", silence="1500ms"))


def test_max_delay_must_cover_the_difference_between_the_grace_of_two_sources() -> None:
    def network(max_delay: str) -> hf.Network:
        net = hf.Network("graces", bucket="500ms")
        quick = net.source("quick", "ts timestamp", time="ts", grace="0s")
        slow = net.source("slow", "ts timestamp", time="ts", grace="2s")
        net.output("both", net.union(quick, slow))
        net.protect("main", on_failure="process", max_delay=max_delay)
        return net

    with pytest.raises(hf.NetworkError, match="`grace` differs by 2s need at least 3056ms"):
        network("3s").check()
    network("3056ms").check()


def test_recovery_from_disabled_checkpoints_is_refused() -> None:
    net = two_fragments()
    disabled = hf.Options(checkpoint_buckets=0)
    check_options(net, disabled)
    with pytest.raises(InputError, match="of fragment 'first' needs checkpoint_buckets >= 1"):
        check_options(net, hf.Options(checkpoint_buckets=0, recovery="checkpoint"))
    net.protect("second", recovery="checkpoint")
    with pytest.raises(InputError, match="of fragment 'second' needs checkpoint_buckets >= 1"):
        hf.run(net, options=disabled)


# -- checks of the whole network -------------------------------------------------------------------


def two_fragments(contract: hf.Contract | None = None) -> hf.Network:
    net = hf.Network("net")
    first = net.source("a", SCHEMA, time="ts").on("first").filter("x > 0")
    net.output("out", first.on("second").apply(same), contract=contract)
    return net


def test_a_protected_network_is_well_formed() -> None:
    net = two_fragments(within("4s"))
    net.protect("first", replicas=2, on_failure="delay")
    net.protect("second", replicas=3, on_failure="process")
    net.check()


def test_protection_of_a_fragment_without_operators_is_refused() -> None:
    net = two_fragments()
    net.protect(replicas=2)  # the source belongs to no fragment, so `main` is empty
    assert violation(net) == (
        "protect('main'): no operator runs in this fragment; name another one (the fragments are: "
        "first, second), or move a stream to it with .on('main')"
    )


def test_on_failure_delay_requires_a_contract_downstream() -> None:
    net = two_fragments()
    net.protect("first", on_failure="delay")
    message = violation(net)
    assert message.startswith("protect('first'): on_failure='delay' needs a longest delay")
    assert "Contract(within='5s')" in message and "max_delay='2s'" in message


def test_a_contract_of_another_branch_is_not_sufficient() -> None:
    net = two_fragments()
    beside = hf.Stream(net, net.named("a")).apply(same)
    net.output("beside", beside, contract=within("4s"))
    net.protect("second", on_failure="process")
    assert violation(net).startswith("protect('second'): on_failure='process'")


def test_an_explicit_max_delay_needs_no_contract() -> None:
    net = two_fragments()
    net.protect("first", on_failure="delay", max_delay="1s")
    net.check()


def test_a_cycle_is_reported_in_a_protected_network() -> None:
    net = hf.Network("net")
    port = net.port("back", SCHEMA, time="ts")
    both = net.source("a", SCHEMA, time="ts").union(port, name="both")
    net.connect(both, port)
    net.output("out", both, contract=within("4s"))
    net.protect(on_failure="delay")
    assert "the cycle back -> both -> back has no delay" in violation(net)


# -- division of `within` into max_delay (X) -------------------------------------------------------


def protect(net: hf.Network, *names: str) -> None:
    for name in names:
        net.protect(name, on_failure="delay")


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_chain_divides_within_equally(length: int) -> None:
    """Property 1: k SUnions on the route with X each add up to kX at the client."""
    net = hf.Network("net")
    stream = net.source("a", SCHEMA, time="ts")
    names = [f"f{number}" for number in range(1, length + 1)]
    for name in names:
        stream = stream.on(name).filter("x > 0")
    net.output("out", stream, contract=within("12s"))
    protect(net, *names)
    x_us = 12 * SECOND // length
    assert patience(net) == {
        f"f{number}": Patience(own_us=x_us, total_us=number * x_us)
        for number in range(1, length + 1)
    }


def diamond() -> hf.Network:
    """One side of the diamond is longer than the other; `end` also reads a source directly:

    a -> start -> short ---------> end -> out
           `----> long1 -> long2 --'
    b -----------------------------'
    """
    net = hf.Network("net")
    start = net.source("a", SCHEMA, time="ts").on("start")
    straight = net.source("b", SCHEMA, time="ts")
    sides = [start.on("short"), start.on("long1").on("long2")]
    net.output(
        "out", net.union(*(side.on("end") for side in sides), straight), contract=within("8s")
    )
    return net


def test_a_diamond_divides_within_by_its_longer_side() -> None:
    net = diamond()
    protect(net, "start", "short", "long1", "long2", "end")
    assert patience(net) == {
        "start": Patience(2 * SECOND, 2 * SECOND),
        "short": Patience(2 * SECOND, 4 * SECOND),
        "long1": Patience(2 * SECOND, 4 * SECOND),
        "long2": Patience(2 * SECOND, 6 * SECOND),
        # Rows of `b` may be held for the total delay of the longer side.
        "end": Patience(2 * SECOND, 8 * SECOND),
    }


def test_blocking_fragments_have_no_max_delay_and_add_none() -> None:
    net = diamond()
    protect(net, "start", "short", "end")
    assert patience(net) == {
        "start": Patience(2 * SECOND, 2 * SECOND),
        "short": Patience(2 * SECOND, 4 * SECOND),
        "long1": None,
        "long2": None,
        "end": Patience(2 * SECOND, 6 * SECOND),
    }


def test_an_explicit_max_delay_overrides_the_division() -> None:
    net = diamond()
    protect(net, "start", "long1", "long2", "end")
    net.protect("short", on_failure="process", max_delay="5s")
    delays = patience(net)
    assert delays["short"] == Patience(5 * SECOND, 7 * SECOND)
    assert delays["long2"] == Patience(2 * SECOND, 6 * SECOND)
    # Now the route with the longest delay is the one with fewer fragments.
    assert delays["end"] == Patience(2 * SECOND, 9 * SECOND)


def test_an_explicit_max_delay_does_not_change_on_failure_block() -> None:
    net = two_fragments()
    net.protect("first", max_delay="1s")
    assert patience(net) == {"first": None, "second": None}


def test_a_fragment_takes_the_smallest_share_of_its_outputs() -> None:
    """`shared` is on the route to both outputs, each of two fragments: 3s / 2 is less than 8s / 2.
    A fragment that only the slower output needs gets the larger share."""
    net = hf.Network("net")
    shared = net.source("a", SCHEMA, time="ts").on("shared")
    net.output("slow", shared.on("deep"), contract=within("8s"))
    net.output("fast", shared.on("quick"), contract=within("3s"))
    net.output("whenever", shared.on("idle"))
    protect(net, "shared", "deep", "quick")
    net.check()
    assert patience(net) == {
        "shared": Patience(1_500_000, 1_500_000),
        "deep": Patience(4 * SECOND, 5_500_000),
        "quick": Patience(1_500_000, 3 * SECOND),
        "idle": None,
    }


def test_a_longer_within_over_more_fragments_can_give_the_smaller_share() -> None:
    net = hf.Network("net")
    shared = net.source("a", SCHEMA, time="ts").on("shared")
    net.output("near", shared.apply(same), contract=within("3s"))
    net.output("far", shared.on("f2").on("f3").on("f4"), contract=within("8s"))
    net.protect("shared", on_failure="process")
    assert patience(net)["shared"] == Patience(2 * SECOND, 2 * SECOND)


def test_a_route_that_reenters_a_fragment_counts_it_twice() -> None:
    net = hf.Network("net")
    away = net.source("a", SCHEMA, time="ts").on("home").on("away")
    net.output("out", away.on("home"), contract=within("6s"))
    protect(net, "home", "away")
    assert patience(net) == {
        "home": Patience(2 * SECOND, 6 * SECOND),
        "away": Patience(2 * SECOND, 4 * SECOND),
    }


def test_feedback_edges_do_not_lengthen_a_route() -> None:
    net = hf.Network("net")
    port = net.port("back", SCHEMA, time="ts")
    loop = net.source("a", SCHEMA, time="ts").on("loop").union(port)
    net.connect(loop.on("later"), port, feedback=1)
    net.output("out", loop, contract=within("2s"))
    protect(net, "loop")
    assert patience(net) == {
        "main": None,  # the fragment of ports
        "loop": Patience(2 * SECOND, 2 * SECOND),
        "later": None,
    }


@given(st.data())
def test_the_delays_of_a_route_never_exceed_within(data: st.DataObject) -> None:
    """Property 1, for any acyclic network of fragments."""
    net = hf.Network("net")
    streams = [net.source("a", SCHEMA, time="ts")]
    for number in range(1, data.draw(st.integers(1, 7)) + 1):
        upstream = data.draw(st.lists(st.sampled_from(streams), min_size=1, max_size=3))
        name = f"f{number}"
        streams.append(net.union(*(stream.on(name) for stream in upstream)))
        if data.draw(st.booleans()):
            net.protect(name, on_failure=data.draw(st.sampled_from(["block", "delay", "process"])))
        if data.draw(st.booleans()):
            contract = within(f"{data.draw(st.integers(1, 60))}s")
            net.output(f"o{number}", streams[-1], contract=contract)
    delays = patience(net)
    for output in net.outputs:
        delay = delays[output.fragment]
        assert delay is None or delay.own_us <= delay.total_us <= (output.contract.within_us or 0)


@pytest.mark.parametrize("max_delay", ["100ms", "500ms", "800ms"])
def test_a_max_delay_that_makes_results_tentative_without_a_failure_is_refused(
    max_delay: str,
) -> None:
    net = hf.Network("n", bucket="500ms")
    net.output("out", net.source("s", "ts timestamp, v long", time="ts").filter("v > 0"))
    net.protect("main", on_failure="process", max_delay=max_delay)
    expected = f"its max_delay is {max_delay} .* buckets of 500ms need at least 834ms, or results"
    with pytest.raises(hf.NetworkError, match=expected):
        net.check()


def test_the_smallest_max_delay_in_the_message_is_accepted() -> None:
    net = hf.Network("n", bucket="500ms")
    net.output("out", net.source("s", "ts timestamp, v long", time="ts").filter("v > 0"))
    net.protect("main", on_failure="process", max_delay="834ms")
    net.check()
