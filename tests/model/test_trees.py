"""Results that continue while inputs are missing (Borealis section 3.5)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import InputError
from holdfast.model.fragments import fragments
from holdfast.model.trees import AllOf, AnyOf, Kind, Tree, kind, reach, tree_of

SCHEMA = "ts timestamp, k string, x double"
STABLE, TENTATIVE, BLOCKING = Kind.STABLE, Kind.TENTATIVE, Kind.BLOCKING


def same(df: Any) -> Any:
    return df


def sources(net: hf.Network, *names: str) -> list[hf.Stream]:
    return [net.source(name, SCHEMA, time="ts") for name in names]


def join(left: hf.Stream, right: hf.Stream, name: str | None = None) -> hf.Stream:
    return left.join(right, on=["k"], within="1s", name=name)


# -- Figure 6 --------------------------------------------------------------------------------------


def figure_6(on_failure: Any = "delay") -> hf.Network:
    """U unites s1 and s2, J joins the result with s3, and client c reads it. U and J have two
    replicas each."""
    net = hf.Network("figure-6")
    s1, s2, s3 = sources(net, "s1", "s2", "s3")
    united = s1.on("U").union(s2)
    net.output("c", join(united.on("J"), s3), contract=hf.Contract(within="4s"))
    net.protect("U", replicas=2, on_failure=on_failure)
    net.protect("J", replicas=2, on_failure=on_failure)
    net.check()
    return net


@pytest.mark.parametrize(
    ("available", "running", "expected"),
    [
        ("s1 s2 s3", "U U' J J'", STABLE),
        ("s1 s2 s3", "U' J", STABLE),  # any running replica is sufficient
        ("s2 s3", "U U' J J'", TENTATIVE),  # the Union continues without s1 ...
        ("s1 s3", "U J'", TENTATIVE),
        ("s1 s2", "U U' J J'", BLOCKING),  # ... but the Join does not continue without s3
        ("s3", "U U' J J'", BLOCKING),
        ("", "U U' J J'", BLOCKING),
        (
            "s1 s2 s3",
            "J J'",
            BLOCKING,
        ),  # both replicas of U are down: one side of the Join is missing
        ("s1 s2 s3", "U U'", BLOCKING),
    ],
)
def test_section_3_5_figure_6_trees_are_stable_tentative_or_blocking(
    available: str, running: str, expected: Kind
) -> None:
    """The stable, the tentative and the blocking tree. The fourth tree of the figure, with one
    replica of J for U's rows and the other for s3, cannot occur: a fragment is up or down."""
    nodes_up = {replica.rstrip("'") for replica in running.split()}
    assert kind(figure_6(), "c", available.split(), nodes_up) is expected


def test_figure_6_trees_per_fragment() -> None:
    net = figure_6()
    upper, lower = fragments(net)
    assert tree_of(upper.paths[0], upper.outputs[0], net) == AnyOf(("s1", "s2"))
    (from_u, s3) = sorted(lower.inputs, key=lambda name: name == "s3")
    assert tree_of(lower.paths[0], "c", net) == AllOf((from_u, s3))


# -- networks --------------------------------------------------------------------------------------


def test_a_blocking_network_gives_no_tentative_results() -> None:
    net = figure_6(on_failure="block")
    assert kind(net, "c", ["s1", "s2", "s3"]) is STABLE
    assert kind(net, "c", ["s1", "s3"]) is BLOCKING


def two_sites(**failure: str) -> hf.Network:
    """Each site unites two taps; the center unites the sites."""
    net = hf.Network("sites")
    a, b, c, d = sources(net, "a", "b", "c", "d")
    east = a.on("east").union(b)
    west = c.on("west").union(d)
    net.output("all", east.on("center").union(west), contract=hf.Contract(within="4s"))
    net.output("east-only", east.apply(same), contract=hf.Contract(within="4s"))
    for name, policy in failure.items():
        net.protect(name, on_failure=policy)
    net.check()
    return net


def test_a_blocking_fragment_is_missing_downstream() -> None:
    """A tap of `east` is missing, so `east` blocks; the center continues with rows of `west`."""
    net = two_sites(west="delay", center="delay")
    assert kind(net, "east-only", "bcd") is BLOCKING
    assert kind(net, "all", "bcd") is TENTATIVE
    assert kind(net, "all", "b") is BLOCKING


def test_tentative_inputs_block_a_blocking_fragment() -> None:
    net = two_sites(east="process", west="process")
    assert kind(net, "east-only", "bcd") is TENTATIVE
    assert kind(net, "all", "bcd") is BLOCKING


def test_a_union_continues_without_a_fragment_that_is_down() -> None:
    net = two_sites(east="delay", west="delay", center="delay")
    assert kind(net, "all", "abcd", ["center", "west"]) is TENTATIVE
    assert kind(net, "east-only", "abcd", ["center", "west"]) is BLOCKING
    assert kind(net, "all", "abcd", ["center"]) is BLOCKING


def test_an_unrelated_failure_keeps_results_stable() -> None:
    net = two_sites()
    assert kind(net, "east-only", "ab", ["east"]) is STABLE


def test_the_kind_of_an_unknown_output_is_refused() -> None:
    with pytest.raises(InputError, match="no operator 'nope'"):
        kind(two_sites(), "nope", "abcd")


def fed_back() -> hf.Network:
    """A union and a join with their own results of the previous bucket."""
    net = hf.Network("loop")
    (a,) = sources(net, "a")
    port = net.port("back", SCHEMA, time="ts")
    both = join(a.union(port), port.filter("x > 0"))
    net.connect(both, port, feedback=1)
    net.output("out", both)
    return net


def test_feedback_inputs_are_never_missing() -> None:
    net = fed_back()
    ((path,),) = (fragment.paths for fragment in fragments(net))
    assert tree_of(path, "out", net) == "a"
    assert kind(net, "out", ["a"]) is STABLE
    assert kind(net, "out", []) is BLOCKING


# -- the tree of a path ----------------------------------------------------------------------------


def grown(net: hf.Network, stream: hf.Stream) -> Tree:
    net.output("out", stream)
    (fragment,) = fragments(net)
    (path,) = fragment.paths
    return tree_of(path, "out", net)


def test_operators_with_one_input_keep_the_tree() -> None:
    net = hf.Network("net")
    (a,) = sources(net, "a")
    counted = a.filter("x > 0").window("1s").group_by("k").agg(n=hf.count())
    assert grown(net, counted.apply(same).count_window(2, by="k").agg(s=hf.sum("n"))) == "a"


def test_nested_nodes_of_one_class_are_merged() -> None:
    net = hf.Network("net")
    a, b, c, d = sources(net, "a", "b", "c", "d")
    assert grown(net, a.union(b).filter("x > 0").union(join(join(c, d), a), b.union(c))) == AnyOf(
        ("a", "b", AllOf(("c", "d", "a")), "c")
    )


def test_equal_parts_of_a_tree_are_merged() -> None:
    net = hf.Network("net")
    a, b = sources(net, "a", "b")
    assert grown(net, join(a.union(a), a.filter("x > 0"))) == "a"
    net = hf.Network("net")
    a, b = sources(net, "a", "b")
    assert grown(net, join(a.union(b), b.union(a))) == AllOf((AnyOf(("a", "b")), AnyOf(("b", "a"))))


def test_a_union_of_one_stream_is_a_leaf() -> None:
    net = hf.Network("net")
    (a,) = sources(net, "a")
    assert grown(net, net.union(a)) == "a"


def test_outputs_of_one_path_have_separate_trees() -> None:
    net = hf.Network("net")
    a, b = sources(net, "a", "b")
    net.output("either", a.union(b))
    net.output("both", join(a, b))
    ((path,),) = (fragment.paths for fragment in fragments(net))
    assert tree_of(path, "either", net) == AnyOf(("a", "b"))
    assert tree_of(path, "both", net) == AllOf(("a", "b"))


# -- reach of a tree -------------------------------------------------------------------------------

FIGURE_6 = AllOf((AnyOf(("s1", "s2")), "s3"))


@pytest.mark.parametrize(
    ("tree", "upto", "expected"),
    [
        ("s1", {"s1": 7}, 7),
        ("s1", {"s1": None}, None),
        ("s1", {}, None),
        (AnyOf(("s1", "s2")), {"s1": 7, "s2": 9}, 9),
        (AnyOf(("s1", "s2")), {"s1": None, "s2": -3}, -3),
        (AnyOf(("s1", "s2")), {}, None),
        (AnyOf(()), {"s1": 7}, None),
        (AllOf(("s1", "s2")), {"s1": 7, "s2": 9}, 7),
        (AllOf(("s1", "s2")), {"s1": 7}, None),
        (FIGURE_6, {"s1": 3, "s2": 9, "s3": 8}, 8),
        (FIGURE_6, {"s1": 3, "s3": 8}, 3),
        (FIGURE_6, {"s1": 3, "s2": 9}, None),
        (FIGURE_6, {"s1": 0, "s2": None, "s3": 0}, 0),
    ],
)
def test_reach_is_the_last_computable_bucket_in_examples(
    tree: Tree, upto: dict[str, int | None], expected: int | None
) -> None:
    assert reach(tree, upto) == expected


def goes_on(tree: Tree, present: Collection[str]) -> bool:
    """Evaluate the tree as a Boolean formula for one bucket."""
    match tree:
        case str():
            return tree in present
        case AnyOf(parts):
            return any(goes_on(part, present) for part in parts)
        case AllOf(parts):
            return all(goes_on(part, present) for part in parts)


LEAVES = ("a", "b", "c", "d")
TREES: st.SearchStrategy[Tree] = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.lists(inner, min_size=2, max_size=3).map(tuple).flatmap(
        lambda parts: st.sampled_from([AnyOf(parts), AllOf(parts)])
    ),
)  # fmt: skip
UPTO = st.dictionaries(st.sampled_from(LEAVES), st.none() | st.integers(-3, 6))


@given(TREES, UPTO)
def test_reach_is_the_last_computable_bucket_of_any_tree(
    tree: Tree, upto: dict[str, int | None]
) -> None:
    def present(bucket: int) -> list[str]:
        return [name for name, last in upto.items() if last is not None and last >= bucket]

    computable = [bucket for bucket in range(-3, 7) if goes_on(tree, present(bucket))]
    assert reach(tree, upto) == max(computable, default=None)


@given(st.data())
def test_the_tree_of_a_path_agrees_with_the_oracle(data: st.DataObject) -> None:
    """One non-blocking fragment with any unions and joins: no bucket is reached if it blocks."""
    net = hf.Network("net")
    streams = sources(net, *LEAVES)
    for _ in range(data.draw(st.integers(1, 8))):
        left, right = data.draw(st.sampled_from(streams)), data.draw(st.sampled_from(streams))
        streams.append(left.union(right) if data.draw(st.booleans()) else join(left, right))
    net.output("out", streams[-1])
    net.protect(on_failure="process", max_delay="1s")
    ((path,),) = (fragment.paths for fragment in fragments(net))
    available = data.draw(st.lists(st.sampled_from(LEAVES), unique=True))
    reached = reach(tree_of(path, "out", net), dict.fromkeys(available, 5))
    expected = kind(net, "out", available)
    assert reached == (None if expected is BLOCKING else 5)
    assert (expected is STABLE) == (set(path.inputs) <= set(available))
