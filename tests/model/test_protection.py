"""How a fragment is protected, refused where it is written or when the network is checked; and how
the delay an output promises is divided among the fragments (Borealis sections 2.3 and 3.5)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import InputError, NetworkError
from holdfast.model.fragments import check_recovery, recovery_of
from holdfast.model.trees import Patience, patience

SCHEMA = "ts timestamp, k string, x double"
SECOND = 1_000_000


def same(df: Any) -> Any:
    return df


def within(text: str) -> hf.Contract:
    return hf.Contract(within=text)


def violation(net: hf.Network) -> str:
    with pytest.raises(NetworkError) as told:
        net.check()
    (message,) = told.value.violations
    return message


# -- what is said of a fragment --------------------------------------------------------------------


def test_a_fragment_nobody_protects_runs_once_and_waits() -> None:
    protection = hf.Network("net").protection("main")
    assert protection == hf.Protection()
    assert (protection.replicas, protection.on_failure, protection.max_delay_us) == (
        1,
        "block",
        None,
    )


def test_what_was_said_is_kept() -> None:
    net = hf.Network("net")
    net.protect(replicas=2, on_failure="process", max_delay="2s")
    net.protect(
        "second", on_failure="delay", while_correcting="suspend", reconcile="undo", wait_share=1
    )
    assert net.protection("main") == hf.Protection(replicas=2, on_failure="process", max_delay="2s")
    assert net.protection("main").max_delay_us == 2 * SECOND
    assert net.protection("second").reconcile == "undo"
    assert list(net.protections) == ["main", "second"]


def test_a_fragment_is_protected_once() -> None:
    net = hf.Network("net")
    net.protect(replicas=2)
    with pytest.raises(InputError, match="fragment 'main' is already protected; put all"):
        net.protect("main", on_failure="delay")
    assert net.protection("main").on_failure == "block"


@pytest.mark.parametrize(
    ("how", "message"),
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
def test_mistakes_are_refused_where_they_are_written(how: dict[str, Any], message: str) -> None:
    net = hf.Network("net")
    with pytest.raises(InputError) as told:
        net.protect(**how)
    assert str(told.value).startswith(message)
    assert net.protections == {}


def test_a_fragment_recovers_its_own_way() -> None:
    net = two_fragments()
    net.protect("second", recovery="checkpoint")
    assert recovery_of(net, "first", hf.Options()) == "replay"
    assert recovery_of(net, "second", hf.Options()) == "checkpoint"
    assert recovery_of(net, "first", hf.Options(recovery="checkpoint")) == "checkpoint"


def test_checkpoints_that_are_never_written_are_no_recovery() -> None:
    net = two_fragments()
    never = hf.Options(checkpoint_buckets=0)
    check_recovery(net, never)
    with pytest.raises(InputError, match="of fragment 'first' needs checkpoint_buckets >= 1"):
        check_recovery(net, hf.Options(checkpoint_buckets=0, recovery="checkpoint"))
    net.protect("second", recovery="checkpoint")
    with pytest.raises(InputError, match="of fragment 'second' needs checkpoint_buckets >= 1"):
        hf.run(net, options=never)


# -- what only the whole network can tell ----------------------------------------------------------


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


def test_a_fragment_in_which_nothing_runs() -> None:
    net = two_fragments()
    net.protect(replicas=2)  # the source belongs to no fragment, so nothing is left in `main`
    assert violation(net) == (
        "protect('main'): no operator runs in this fragment; name another (there are: first, "
        "second), or move a stream to it with .on('main')"
    )


def test_to_go_on_after_a_while_needs_a_promise_downstream() -> None:
    net = two_fragments()
    net.protect("first", on_failure="delay")
    message = violation(net)
    assert message.startswith("protect('first'): on_failure='delay' needs a longest delay")
    assert "Contract(within='5s')" in message and "max_delay='2s'" in message


def test_a_promise_beside_the_fragment_does_not_help() -> None:
    net = two_fragments()
    beside = hf.Stream(net, net.named("a")).apply(same)
    net.output("beside", beside, contract=within("4s"))
    net.protect("second", on_failure="process")
    assert violation(net).startswith("protect('second'): on_failure='process'")


def test_an_x_by_hand_needs_no_promise() -> None:
    net = two_fragments()
    net.protect("first", on_failure="delay", max_delay="1s")
    net.check()


def test_a_cycle_is_still_told_when_a_fragment_is_protected() -> None:
    net = hf.Network("net")
    port = net.port("back", SCHEMA, time="ts")
    both = net.source("a", SCHEMA, time="ts").union(port, name="both")
    net.connect(both, port)
    net.output("out", both, contract=within("4s"))
    net.protect(on_failure="delay")
    assert "the cycle back -> both -> back has no delay" in violation(net)


# -- dividing X ------------------------------------------------------------------------------------


def protect(net: hf.Network, *names: str) -> None:
    for name in names:
        net.protect(name, on_failure="delay")


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_chain_shares_the_promise_equally(length: int) -> None:
    """Property 1: k SUnions on the way, X each, kX at the client."""
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
    """One side of the diamond is longer than the other, and the end reads a source of its own too:

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


def test_a_diamond_is_divided_by_its_longer_side() -> None:
    net = diamond()
    protect(net, "start", "short", "long1", "long2", "end")
    assert patience(net) == {
        "start": Patience(2 * SECOND, 2 * SECOND),
        "short": Patience(2 * SECOND, 4 * SECOND),
        "long1": Patience(2 * SECOND, 4 * SECOND),
        "long2": Patience(2 * SECOND, 6 * SECOND),
        # Rows of `b` may be held for all that the longer side may take.
        "end": Patience(2 * SECOND, 8 * SECOND),
    }


def test_those_that_block_have_no_x_and_add_nothing_to_it() -> None:
    net = diamond()
    protect(net, "start", "short", "end")
    assert patience(net) == {
        "start": Patience(2 * SECOND, 2 * SECOND),
        "short": Patience(2 * SECOND, 4 * SECOND),
        "long1": None,
        "long2": None,
        "end": Patience(2 * SECOND, 6 * SECOND),
    }


def test_an_x_by_hand_goes_before_the_division() -> None:
    net = diamond()
    protect(net, "start", "long1", "long2", "end")
    net.protect("short", on_failure="process", max_delay="5s")
    found = patience(net)
    assert found["short"] == Patience(5 * SECOND, 7 * SECOND)
    assert found["long2"] == Patience(2 * SECOND, 6 * SECOND)
    # Now the way that may take longest is the one with fewer fragments.
    assert found["end"] == Patience(2 * SECOND, 9 * SECOND)


def test_an_x_by_hand_does_not_unblock() -> None:
    net = two_fragments()
    net.protect("first", max_delay="1s")
    assert patience(net) == {"first": None, "second": None}


def test_a_fragment_serves_the_hastiest_of_its_outputs() -> None:
    """`shared` lies on the way to both outputs, each of two fragments: 3s / 2 is less than 8s / 2.
    What only the slower one needs keeps the larger share."""
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


def test_a_longer_promise_over_more_fragments_can_be_the_tighter_one() -> None:
    net = hf.Network("net")
    shared = net.source("a", SCHEMA, time="ts").on("shared")
    net.output("near", shared.apply(same), contract=within("3s"))
    net.output("far", shared.on("f2").on("f3").on("f4"), contract=within("8s"))
    net.protect("shared", on_failure="process")
    assert patience(net)["shared"] == Patience(2 * SECOND, 2 * SECOND)


def test_a_way_that_comes_back_to_a_fragment_waits_there_twice() -> None:
    net = hf.Network("net")
    there = net.source("a", SCHEMA, time="ts").on("home").on("away")
    net.output("out", there.on("home"), contract=within("6s"))
    protect(net, "home", "away")
    assert patience(net) == {
        "home": Patience(2 * SECOND, 6 * SECOND),
        "away": Patience(2 * SECOND, 4 * SECOND),
    }


def test_rows_that_were_fed_back_do_not_lengthen_a_way() -> None:
    net = hf.Network("net")
    port = net.port("back", SCHEMA, time="ts")
    loop = net.source("a", SCHEMA, time="ts").on("loop").union(port)
    net.connect(loop.on("later"), port, feedback=1)
    net.output("out", loop, contract=within("2s"))
    protect(net, "loop")
    assert patience(net) == {
        "main": None,  # where ports are
        "loop": Patience(2 * SECOND, 2 * SECOND),
        "later": None,
    }


@given(st.data())
def test_no_way_adds_up_to_more_than_is_promised(data: st.DataObject) -> None:
    """Property 1, for any network of fragments that read any of those before them."""
    net = hf.Network("net")
    made = [net.source("a", SCHEMA, time="ts")]
    for number in range(1, data.draw(st.integers(1, 7)) + 1):
        read = data.draw(st.lists(st.sampled_from(made), min_size=1, max_size=3))
        name = f"f{number}"
        made.append(net.union(*(stream.on(name) for stream in read)))
        if data.draw(st.booleans()):
            net.protect(name, on_failure=data.draw(st.sampled_from(["block", "delay", "process"])))
        if data.draw(st.booleans()):
            contract = within(f"{data.draw(st.integers(1, 60))}s")
            net.output(f"o{number}", made[-1], contract=contract)
    found = patience(net)
    for output in net.outputs:
        mine = found[output.fragment]
        assert mine is None or mine.own_us <= mine.total_us <= (output.contract.within_us or 0)


@pytest.mark.parametrize("x", ["100ms", "500ms", "800ms"])
def test_an_x_that_would_turn_results_tentative_without_a_failure_is_refused(x: str) -> None:
    net = hf.Network("n", bucket="500ms")
    net.output("out", net.source("s", "ts timestamp, v long", time="ts").filter("v > 0"))
    net.protect("main", on_failure="process", max_delay=x)
    with pytest.raises(hf.NetworkError, match=r"the smallest that works is 834ms") as refused:
        net.check()
    assert "a max_delay of " in str(refused.value)


def test_the_smallest_x_that_is_named_works() -> None:
    net = hf.Network("n", bucket="500ms")
    net.output("out", net.source("s", "ts timestamp, v long", time="ts").filter("v > 0"))
    net.protect("main", on_failure="process", max_delay="834ms")
    net.check()
