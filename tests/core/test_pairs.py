"""What is retained upstream for a replica, paired and unpaired (Flux, sections 3.2 and 3.3)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cluster.controller import Controller
from holdfast.core import progress_events as core
from holdfast.core.catch_up_events import LEASE_US, Held, NotOpen
from holdfast.core.membership import InstanceStatus
from holdfast.core.progress import Progress
from holdfast.core.replica_selector import LAG_BUCKETS, STEP_US
from holdfast.errors import TransportError
from holdfast.model.fragments import local_replica_of
from holdfast.storage import Boundary, Log
from holdfast.streams import codec
from holdfast.streams.calls import GetState, Moving, OfferedState, Results, StateFile, reply_of
from holdfast.streams.serving import Service
from holdfast.types import OutputState, Segment, SegmentId, Stability
from tests.core.subscriptions import Consumer

STABLE = OutputState.STABLE
S = 1_000_000


def started(**overrides: object) -> tuple[Progress, list[core.Action]]:
    plan = core.PathPlan("out", ("a",), ("out",), convergent=False, extent=2)
    options = {"checkpoint_buckets": 0, **overrides}
    node = Progress([plan], recovery="pairs", **options)  # type: ignore[arg-type]
    node.handle(core.InputOpened(0, "a", 0, -1))
    return node, node.handle(core.BoundaryArrived(0, "a", 4, ((0, 1, 0),)))


def acknowledged(actions: list[core.Action]) -> list[tuple[int, int]]:
    return [(a.received, a.no_longer_needed) for a in actions if isinstance(a, core.Acknowledge)]


def test_with_a_peer_a_replica_releases_the_inputs_of_finished_buckets() -> None:
    """`replay` would retain all inputs forever: the state cannot be rebuilt from fewer."""
    node, actions = started()
    assert core.Run("out", 0, 4) in actions
    done = node.handle(core.StepDone(0, "out", 4, needs_from=5, horizon=4))
    assert acknowledged(done) == [(4, 4)]
    assert not [a for a in done if isinstance(a, core.Checkpoint)]


def test_a_new_replica_acknowledges_its_start_position_at_once() -> None:
    """Fold-in: producers that retain everything for the new replica learn what it needs."""
    plan = core.PathPlan("out", ("a",), ("out",), convergent=False, extent=2)
    node = Progress([plan], recovery="pairs", resumed={"out": (7, 6, 0)})
    assert acknowledged(node.handle(core.InputOpened(0, "a", 0, 3))) == [(7, 5)]


def test_an_unpaired_replica_writes_a_checkpoint_and_retains_the_inputs_after_it() -> None:
    node, _ = started()
    node.handle(core.StepDone(0, "out", 4, needs_from=5, horizon=4))
    assert node.handle(core.Unpaired(0, True)) == [core.Checkpoint("out", 4)]
    assert node.handle(core.Unpaired(0, True)) == []  # repeated with every heartbeat
    node.handle(core.CheckpointDone(0, "out", 4, 5))
    node.handle(core.BoundaryArrived(0, "a", 6, ()))
    done = node.handle(core.StepDone(0, "out", 6, needs_from=7, horizon=6))
    assert acknowledged(done) == [(6, 4)]


def test_with_checkpoints_both_replicas_may_stop_and_restart() -> None:
    """Inputs after the newest checkpoint are retained, paired or unpaired."""
    node, _ = started(checkpoint_buckets=3)
    done = node.handle(core.StepDone(0, "out", 4, needs_from=5, horizon=4))
    assert core.Checkpoint("out", 4) in done and acknowledged(done) == [(4, -1)]
    assert acknowledged(node.handle(core.CheckpointDone(0, "out", 4, 5))) == [(4, 4)]


def test_a_replica_that_is_paired_again_needs_no_checkpoint() -> None:
    node, _ = started()
    node.handle(core.Unpaired(0, True))
    node.handle(core.Unpaired(0, False))
    done = node.handle(core.StepDone(0, "out", 4, needs_from=5, horizon=4))
    assert acknowledged(done) == [(4, 4)]
    assert not [a for a in done if isinstance(a, core.Checkpoint)]


def test_an_unpaired_replica_writes_a_checkpoint_every_checkpoint_buckets() -> None:
    node, _ = started(checkpoint_buckets=2)
    assert node.handle(core.Unpaired(0, True)) == [core.Checkpoint("out", -1)]
    node.handle(core.CheckpointDone(0, "out", -1, needs_from=0))
    done = node.handle(core.StepDone(0, "out", 4, needs_from=5, horizon=4))
    assert core.Checkpoint("out", 4) in done


# -- state on the wire -------------------------------------------------------------------------


def test_offered_state_survives_encoding_and_decoding() -> None:
    segment = Segment(SegmentId("s", 0, 3), Stability.STABLE, "segments/x", 2, "0f", 7, 9, 1)
    results = Results("s", "ts timestamp", "ts", 0, 2, 4, (segment,))
    moving = Moving("out", 3, {"needs_from": 2}, ("a/b",), (results,))
    offered = OfferedState("state", (moving,), (StateFile("a/b", 7, "0f"),))
    sent = json.loads(json.dumps(codec.encode(offered)))
    assert reply_of(GetState("a"), sent, "a@2") == offered
    with pytest.raises(TransportError, match=r"reply of a@2 to 'state': field 'paths.0': expected"):
        reply_of(GetState("a"), sent | {"paths": [{"path": "out"}]}, "a@2")


# -- which replica is read ------------------------------------------------------------------------


def test_each_replica_reads_within_its_own_dataflow() -> None:
    producers = ("m.0", "m.0@2")
    assert local_replica_of("r.1", producers) == "m.0"
    assert local_replica_of("r.1@2", producers) == "m.0@2"
    assert local_replica_of("r.1", ("source",)) is None


def test_a_consumer_reads_the_peer_until_its_local_replica_reports() -> None:
    upstream = Consumer(replicas=("m", "m@2"), local_replica="m@2")
    assert upstream.hears("m", STABLE, 9, at=0) == ["reads m"]
    actions = upstream.hears("m@2", STABLE, 9, at=0)
    assert actions == ["reads m@2"]


def test_a_local_replica_that_is_behind_is_not_preferred() -> None:
    upstream = Consumer(replicas=("m", "m@2"), local_replica="m@2")
    upstream.hears("m", STABLE, 9, at=0)
    assert upstream.hears("m@2", STABLE, 5, at=0) == []
    assert upstream.hears("m@2", OutputState.STABILIZATION, 9, at=0) == []


def with_local_replica() -> Consumer:
    """The consumer reads its local replica. Both replicas are at bucket 9, and were at 8 before."""
    upstream = Consumer(replicas=("m", "m@2"), local_replica="m@2")
    for upto in (8, 9):
        upstream.hears("m", STABLE, upto, at=0)
        upstream.hears("m@2", STABLE, upto, at=0)
    assert upstream.main == "m@2"
    return upstream


def test_3_1_2_a_consumer_stays_although_the_peer_finished_a_long_step_first() -> None:
    """Replicas are only loosely synchronized. Switching there and back sends every row twice."""
    upstream, now = with_local_replica(), 0
    for upto in (23, 37, 51):
        now += 5 * S
        assert upstream.hears("m", STABLE, upto, at=now - S) == []
        assert upstream.gets("m@2", STABLE, upto, at=now) == []
        upstream.takes(upto)
    assert upstream.main == "m@2"


def test_a_local_replica_more_than_a_step_behind_is_left_until_it_has_caught_up() -> None:
    upstream = with_local_replica()
    assert upstream.hears("m", STABLE, 23, at=1 * S) == []
    assert upstream.hears("m", STABLE, 23, at=2 * S) == []  # nothing new, no second step
    assert upstream.hears("m", STABLE, 24, at=3 * S) == ["reads m"]
    upstream.takes(24)
    assert upstream.hears("m@2", STABLE, 23, at=4 * S) == []
    assert upstream.hears("m@2", STABLE, 24, at=5 * S) == ["reads m@2"]


def test_a_local_replica_that_was_cut_off_is_left_after_a_few_buckets() -> None:
    """Steps of one bucket, as without load; the local replica knows of no failure."""
    upstream = with_local_replica()
    for upto in range(10, 10 + LAG_BUCKETS):
        assert upstream.hears("m", STABLE, upto, at=S) == []
    actions = upstream.hears("m", STABLE, 10 + LAG_BUCKETS, at=S)
    assert actions == ["reads m"]


def test_a_local_replica_that_was_cut_off_is_left_when_its_peer_has_finished() -> None:
    """No further step of the peer will show that the local replica is cut off."""
    upstream = with_local_replica()
    assert upstream.hears("m", STABLE, 23, at=S) == []
    assert upstream.hears("m", STABLE, 23, at=S + STEP_US - 1) == []
    actions = upstream.hears("m", STABLE, 23, at=S + STEP_US)
    assert actions == ["reads m"]


def test_the_first_report_of_a_replica_shows_no_step() -> None:
    upstream = with_local_replica()
    upstream.loses("m", at=S)
    assert upstream.hears("m", STABLE, 23, at=2 * S) == []
    assert upstream.hears("m", STABLE, 24, at=3 * S) == ["reads m"]


def test_a_position_that_goes_back_is_not_a_step() -> None:
    upstream = with_local_replica()
    upstream.hears("m", OutputState.UP_FAILURE, 9, 14, at=S)
    assert upstream.hears("m", OutputState.UP_FAILURE, 9, 9, at=2 * S) == []
    assert upstream.main == "m@2"


# -- retention: what must be acknowledged before it is deleted ------------------------------------


@pytest.fixture
def service(tmp_path: Path) -> Service:
    log = Log.open(str(tmp_path), "producer", fsync="never")
    log.open_stream("s", "ts timestamp", "ts", 0)
    log.append(Boundary("s", 9))
    serving = Service(logs={"s": log}, consumers={"s": {"r", "r@2"}}, trim_buckets=1)
    return serving


def trimmed(service: Service) -> int:
    return service.logs["s"].info("s").trimmed_upto


def test_buckets_that_both_replicas_released_are_deleted(service: Service) -> None:
    service.acknowledge("s", "r", 7, 7, 1)
    assert trimmed(service) == -1
    service.acknowledge("s", "r@2", 4, 4, 1)
    assert trimmed(service) == 4


def test_an_acknowledgement_may_arrive_before_the_bucket_that_it_acknowledges(
    service: Service,
) -> None:
    """Dangling (section 3.1.2): a replica that is behind drops what its peer has delivered."""
    for consumer in ("r", "r@2"):
        service.acknowledge("s", consumer, 12, 12, 1)
    assert trimmed(service) == 9
    service.logs["s"].append(Boundary("s", 11))
    service.acknowledge("s", "r", 12, 12, 1)
    assert trimmed(service) == 11


DEAD = {"r@2": InstanceStatus(1, 1)}
RELEASED = {"r@2": InstanceStatus(1, 1, 1)}


def test_producers_do_not_wait_for_a_dead_replica_but_retain_the_inputs_for_its_disk(
    service: Service,
) -> None:
    service.acknowledge("s", "r", 7, 7, 1)
    service.acknowledge("s", "r@2", 4, 2, 1)
    service.lost(DEAD, 0)
    assert service.received("s") == 7, "a producer waits only for live replicas"
    assert trimmed(service) == 2, "the checkpoint on the disk of the dead replica needs the rest"


def test_nothing_is_retained_for_the_disk_of_a_released_replica(service: Service) -> None:
    """Section 3.2.2: ack_all."""
    service.acknowledge("s", "r", 7, 7, 1)
    service.lost(RELEASED, 0)
    assert trimmed(service) == 7
    service.acknowledge("s", "r", 8, 8, 1)
    assert trimmed(service) == 8
    service.acknowledge("s", "r@2", 3, 3, 1)  # the replica was only slow: no effect
    assert trimmed(service) == 8


def test_nothing_is_deleted_that_a_new_replica_may_need(service: Service) -> None:
    """Section 5.3.2: reset, and del extended by the new replica."""
    service.acknowledge("s", "r", 5, 5, 1)
    service.lost(RELEASED, 0)
    held = service.hold("s", "r@2", 2, 0)
    assert held == Held(0, 5) and not held.whole, "inputs were deleted: a state is needed"
    service.lost(RELEASED, 0)  # a late, outdated view
    service.acknowledge("s", "r", 9, 9, 1)
    assert trimmed(service) == 5
    assert service.received("s") == 9, "the new replica does not read yet"
    service.acknowledge("s", "r@2", 7, 6, 2)  # csync: the new replica starts after bucket 7
    assert trimmed(service) == 6
    assert service.received("s") == 7


def test_the_hold_of_a_new_replica_expires_if_it_is_not_renewed(service: Service) -> None:
    service.acknowledge("s", "r", 5, 5, 1)
    service.hold("s", "r@2", 2, 0)
    service.hold("s", "r@2", 2, LEASE_US)
    service.acknowledge("s", "r", 9, 9, 1)
    service.lost(DEAD, 9 * LEASE_US)
    assert trimmed(service) == -1, "the disk still counts"
    service.lost(RELEASED, 2 * LEASE_US)
    assert trimmed(service) == -1
    service.lost(RELEASED, 2 * LEASE_US + 1)
    assert trimmed(service) == 9


def test_a_restarted_producer_waits_once_more_for_a_new_replica(service: Service) -> None:
    service.acknowledge("s", "r", 5, 5, 1)
    service.hold("s", "r@2", 2, 0)
    again = Service(logs=service.logs, consumers=service.consumers, trim_buckets=1)
    for at in (0, LEASE_US):
        again.lost(RELEASED, at)
        assert trimmed(again) == -1
    again.lost(RELEASED, LEASE_US + 1)
    assert trimmed(again) == 5


def test_complete_inputs_make_a_state_unnecessary(service: Service) -> None:
    """Both replicas of a pair were stopped before their first checkpoint."""
    held = service.hold("s", "r@2", 2, 0)
    assert isinstance(held, Held) and held.whole


def test_buckets_that_are_being_fetched_are_not_trimmed(service: Service) -> None:
    service.pins["r"] = {"s": 3}
    for consumer in ("r", "r@2"):
        service.acknowledge("s", consumer, 7, 7, 1)
    assert trimmed(service) == 2
    del service.pins["r"]
    service.acknowledge("s", "r", 8, 8, 1)
    assert trimmed(service) == 7


def test_a_stream_that_is_not_open_cannot_be_held(tmp_path: Path) -> None:
    log = Log.open(str(tmp_path), "producer", fsync="never")
    service = Service(logs={"s": log}, consumers={"s": {"r"}})
    assert service.hold("s", "r", 2, 0) == NotOpen()
    service.lost({"r": InstanceStatus(1, 1)}, 0)
    log.close()


# -- the controller -------------------------------------------------------------------------------


PAIR = {"a": "a@2", "a@2": "a"}


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    machine = Controller(Log.open(str(tmp_path), "controller", fsync="never"), PAIR, silence_us=10)
    for name in PAIR:
        assert machine.register(name, "here", machine.next_epoch(name), at=0)
    return machine


def test_a_replica_without_heartbeats_is_dead_if_its_peer_sends_heartbeats(
    controller: Controller,
) -> None:
    assert controller.judge(at=9)[0] == []
    controller.register("a", "here", 1, at=13)
    assert controller.judge(at=14)[0] == ["a@2"]
    assert controller.judge(at=15)[0] == []
    assert controller.statuses() == {"a": InstanceStatus(1, 0), "a@2": InstanceStatus(1, 1, 1)}
    assert not controller.register("a@2", "here", 1, at=21)  # this instance was declared dead
    assert controller.register("a@2", "there", controller.next_epoch("a@2"), at=22)
    assert controller.statuses()["a@2"] == InstanceStatus(2, 1, 1)


def test_no_replica_is_dead_if_the_controller_itself_was_cut_off(controller: Controller) -> None:
    assert controller.judge(at=100)[0] == []
    controller.register("a", "here", 1, at=101)
    assert controller.judge(at=102)[0] == ["a@2"]


def test_a_suspended_controller_does_not_count_missing_heartbeats(controller: Controller) -> None:
    """The replica that sends the first heartbeat afterwards is not the only live one."""
    assert controller.judge(at=4)[0] == []
    controller.register("a", "here", 1, at=50)
    assert controller.judge(at=51)[0] == []
    controller.register("a", "here", 1, at=56)
    assert controller.judge(at=56)[0] == []
    controller.register("a", "here", 1, at=61)
    assert controller.judge(at=61)[0] == []
    assert controller.judge(at=62)[0] == ["a@2"]


def test_never_both_replicas_of_a_pair_are_declared_dead(controller: Controller) -> None:
    controller.register("a", "here", 1, at=15)
    assert controller.judge(at=20)[0] == ["a@2"]
    assert controller.judge(at=90)[0] == []


def test_a_restarted_controller_gives_every_replica_time(
    controller: Controller, tmp_path: Path
) -> None:
    controller._log.close()
    log = Log.open(str(tmp_path), "controller", fsync="never")
    again = Controller(log, PAIR, at=1_000, silence_us=10)
    again.register("a", "here", 1, at=1_005)
    assert again.judge(at=1_008)[0] == []
    again.register("a", "here", 1, at=1_010)
    assert again.judge(at=1_012)[0] == ["a@2"]
    log.close()
