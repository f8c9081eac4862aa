"""Networks for planted bugs, and changes that no fault of a scenario can make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

from holdfast.model.contract import Contract
from holdfast.model.network import Network
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.networks import _sources as sources
from holdfast.verify.sim.networks import _windows, cec_chain, cec_single, even, small
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulation import Simulation
from holdfast.verify.sim.tables import Row
from tests.verify.sim.lab import flip_result, group_steps, strike, union_of_two

Tweak = Callable[[Simulation], None]

S = 1_000_000


def row_of_two() -> Network:
    """Two fragments in a row that continue without an input, each with two replicas; the second
    fragment also reads its own source."""
    net = Network("row", bucket="500ms")
    s1, s2, s3 = sources(net, 3)
    upper = net.union(s1.on("upper"), s2.on("upper")).apply(small)
    lower = net.union(upper.on("lower"), s3.on("lower")).apply(even)
    net.output("merged", lower, contract=Contract(within="4s"))
    for name in ("upper", "lower"):
        net.protect(
            name, replicas=2, on_failure="process", while_correcting="process", max_delay="1500ms"
        )
    return net


def suspending() -> Network:
    """One fragment with two replicas that gives no new results while it corrects."""
    net = Network("suspending", bucket="500ms")
    net.output("merged", net.union(*sources(net, 2)).apply(small), contract=Contract(within="3s"))
    net.protect(
        "main", replicas=2, on_failure="process", while_correcting="suspend", max_delay="1500ms"
    )
    return net


def undoing() -> Network:
    """Windows whose state is rebuilt from the inputs instead of retained."""
    net = Network("undoing", bucket="500ms")
    both = net.union(*sources(net, 2)).apply(small)
    net.output("windows", _windows(both, "2s", "1s"), contract=Contract(within="3s"))
    net.protect(
        "main",
        on_failure="process",
        while_correcting="process",
        reconcile="undo",
        max_delay="1500ms",
    )
    return net


def picky() -> Network:
    """The filter depends on all rows of a window: a tentative row may be replaced by none."""

    def some(rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if row[2] % 5 == 0]

    net = Network("picky", bucket="500ms")
    both = net.union(*sources(net, 2)).apply(small)
    net.output("windows", _windows(both, "1s", "500ms").apply(some), contract=Contract(within="3s"))
    net.protect("main", on_failure="process", while_correcting="process", max_delay="1500ms")
    return net


def delaying() -> Network:
    """Every bucket with a missing input waits as long as allowed; no other event ends the wait."""
    net = Network("delaying", bucket="500ms")
    net.output("merged", net.union(*sources(net, 2)).apply(small), contract=Contract(within="3s"))
    net.protect("main", on_failure="delay", while_correcting="delay", max_delay="1200ms")
    return net


def three_fragments() -> Network:
    """Two fragments that may each wait, and a third that merges their streams: k is 2, X is 3 s."""
    net = Network("three", bucket="500ms")
    s1, s2, s3 = sources(net, 3)
    left = net.union(s1.on("left"), s2.on("left")).apply(small)
    right = s3.on("right").apply(small)
    merged = net.union(left.on("end"), right.on("end")).apply(even)
    net.output("merged", merged, contract=Contract(within="6s"))
    for fragment in ("left", "right", "end"):
        net.protect(fragment, on_failure="delay", while_correcting="delay")
    return net


def few_entries() -> Network:
    """All layers become one as soon as recovery would have to read nine entries."""
    net = cec_single()
    net.protect("main", recovery="cec", recovery_rows=120, recovery_entries=8, on_failure="block")
    return net


def eventual_chain() -> Network:
    """Two nodes in a row with eventual checkpoints."""
    net = cec_chain()
    for name in ("first", "second"):
        net.protect(name, recovery="cec", recovery_rows=15, on_failure="block")
    return net


def two_replicas() -> Network:
    return union_of_two(2, "500ms")


def three_replicas() -> Network:
    return union_of_two(3, "500ms")


def one_replica() -> Network:
    return union_of_two(1, "500ms")


def flip_a_row(name: str, at_s: float) -> Tweak:
    """Damages one row of the next non-empty bucket that the node computes."""

    def tweak(sim: Simulation) -> None:
        def flip() -> None:
            node = sim.cast.by_name[name]
            assert isinstance(node, NodeProcess)
            flip_result(node)

        sim.world.at(int(at_s * S), flip)

    return tweak


def rot_manifest(name: str, at_s: float) -> Tweak:
    """A bit in the middle of a log's manifest flips."""

    def tweak(sim: Simulation) -> None:
        def flip() -> None:
            disk = sim.cast.by_name[name].disk
            (path, *_) = [path for path in sorted(disk._nodes) if "manifest" in path]
            data: Any = disk._nodes[path].data  # type: ignore[union-attr]
            data[len(data) // 2] ^= 4

        sim.world.at(int(at_s * S), flip)

    return tweak


def damage_a_piece(name: str) -> Tweak:
    """The first state file that is fetched from the node arrives damaged."""

    def tweak(sim: Simulation) -> None:
        node = sim.cast.by_name[name]
        assert isinstance(node, NodeProcess)
        original = node.piece

        def piece(piece_name: str) -> bytes:
            data = original(piece_name)
            if piece_name.startswith("state/"):
                del node.piece
                data = data[:-1] + bytes([data[-1] ^ 1])
            return data

        node.piece = piece  # type: ignore[method-assign, assignment]

    return tweak


def full_from_the_start(name: str) -> Tweak:
    """When the node is up, and before it opens its outputs, its disk is full for a while."""

    def tweak(sim: Simulation) -> None:
        node = sim.cast.by_name[name]
        assert isinstance(node, NodeProcess)
        original = node.up

        def up() -> None:
            original()
            node.disk.full = True
            sim.world.at(sim.world.now + S, lambda: setattr(node.disk, "full", False))

        node.up = up  # type: ignore[method-assign]

    return tweak


def flushing_for(*seconds: float) -> Tweak:
    """The checkpoints of every node take so much longer, in turn."""

    def tweak(sim: Simulation) -> None:
        for node in sim.cast.nodes:
            slowly = partial(flush, node, node.flush, cycle(seconds))
            node.flush = slowly  # type: ignore[method-assign]

    def flush(node: NodeProcess, original: Any, longer: Any, *args: Any) -> None:
        node.after(int(next(longer) * S), partial(original, *args))

    return tweak


def torn_while_flushing(since_s: float, writes: Sequence[int]) -> Tweak:
    """From then on, the next checkpoints are interrupted by a crash, one at each of these
    writes."""
    left = [*writes]

    def tweak(sim: Simulation) -> None:
        for node in sim.cast.nodes:
            node.up = partial(up, sim, node, node.up)  # type: ignore[method-assign]

    def up(sim: Simulation, node: NodeProcess, original: Callable[[], None]) -> None:
        original()
        flush_some = partial(flush, sim, node, node.performer.flush)
        node.performer.flush = flush_some  # type: ignore[method-assign]

    def flush(sim: Simulation, node: NodeProcess, original: Callable[..., int], *args: Any) -> int:
        if left and sim.world.now > since_s * S and node.disk.crash_after is None:
            sim.inject(Fault(0, "torn", node.name, S, float(left.pop(0))))
        return original(*args)

    return tweak


def full_while_flushing(*times: tuple[float, float]) -> Tweak:
    """The disks have no space for checkpoints at these times, but steps continue."""

    def tweak(sim: Simulation) -> None:
        for node in sim.cast.nodes:
            node.up = partial(up, node, node.up)  # type: ignore[method-assign]

    def up(node: NodeProcess, original: Callable[[], None]) -> None:
        original()
        flush_some = partial(flush, node, node.performer.flush)
        node.performer.flush = flush_some  # type: ignore[method-assign]

    def flush(node: NodeProcess, original: Callable[..., int], *args: Any) -> int:
        node.disk.full = any(since * S < node.world.now < until * S for since, until in times)
        try:
            return original(*args)
        finally:
            node.disk.full = False

    return tweak


#: The clock that the function in `failing` reads.
_clock: list[Callable[[], int]] = []


def failing() -> Network:
    """A function that raises an error on partial input."""

    def strict(rows: Sequence[Row]) -> list[Row]:
        if _clock and 6 * S < _clock[0]() < 9 * S:
            raise ValueError("half of the rows are missing")
        return list(rows)

    net = Network("failing", bucket="500ms")
    net.output("merged", net.union(*sources(net, 2)).apply(strict))
    net.protect("main", on_failure="process", while_correcting="process", max_delay="1500ms")
    return net


def tell_time(sim: Simulation) -> None:
    _clock[:] = [lambda: sim.world.now]


LONG_US = 130_000


def _fault(do: str, for_us: int, answers: str, _: str) -> Fault:
    return Fault(0, do, answers, for_us)


def long_correction(*strikes: tuple[float, str, float]) -> Tweak:
    """Steps of many buckets are slow; meanwhile faults hit the replica that answers."""

    def tweak(sim: Simulation) -> None:
        group_steps(LONG_US)(sim)
        for at_s, do, for_s in strikes:
            strike(sim, int(at_s * S), partial(_fault, do, int(for_s * S)))

    return tweak
