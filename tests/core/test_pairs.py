"""One of a pair: what it keeps upstream, alone and not (Flux, sections 3.2 and 3.3)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cluster.controller import Controller
from holdfast.core import progress_events as core
from holdfast.core.catch_up_events import LEASE_US, Held, NotOpen
from holdfast.core.membership import Standing
from holdfast.core.progress import Progress
from holdfast.core.replica_selector import LAG_BUCKETS, STEP_US
from holdfast.errors import TransportError
from holdfast.model.fragments import home_of
from holdfast.storage import Boundary, Log
from holdfast.streams import codec
from holdfast.streams.calls import GetState, Moving, OfferedState, Results, StateFile, reply_of
from holdfast.streams.serving import Service
from holdfast.types import OutputState, Segment, SegmentId, Stability
from tests.core.subscriptions import Consumer

STABLE = OutputState.STABLE
S = 1_000_000


def started(**more: object) -> tuple[Progress, list[core.Action]]:
    plan = core.PathPlan("out", ("a",), ("out",), convergent=False, extent=2)
    how = {"checkpoint_buckets": 0, **more}
    does = Progress([plan], recovery="pairs", **how)  # type: ignore[arg-type]
    does.handle(core.InputOpened(0, "a", 0, -1))
    return does, does.handle(core.BoundaryArrived(0, "a", 4, ((0, 1),)))


def acknowledged(actions: list[core.Action]) -> list[tuple[int, int]]:
    return [(a.received, a.no_longer_needed) for a in actions if isinstance(a, core.Acknowledge)]


def test_with_a_partner_nothing_is_kept_upstream_for_what_is_done() -> None:
    """`replay` would keep all of it for ever: the state cannot be rebuilt from less."""
    does, actions = started()
    assert core.Run("out", 0, 4) in actions
    done = does.handle(core.StepDone(0, "out", 4, needs_from=5, horizon=4))
    assert acknowledged(done) == [(4, 4)]
    assert not [a for a in done if isinstance(a, core.Checkpoint)]


def test_where_it_begins_is_said_at_once() -> None:
    """Fold-in: those who keep everything for the newcomer hear from where on it needs it."""
    plan = core.PathPlan("out", ("a",), ("out",), convergent=False, extent=2)
    does = Progress([plan], recovery="pairs", resumed={"out": (7, 6, 0)})
    assert acknowledged(does.handle(core.InputOpened(0, "a", 0, 3))) == [(7, 5)]


def test_alone_it_keeps_a_checkpoint_and_what_comes_after_it() -> None:
    does, _ = started()
    does.handle(core.StepDone(0, "out", 4, needs_from=5, horizon=4))
    assert does.handle(core.Unpaired(0, True)) == [core.Checkpoint("out", 4)]
    assert does.handle(core.Unpaired(0, True)) == []  # said with every sign of life
    does.handle(core.CheckpointDone(0, "out", 4, 5))
    does.handle(core.BoundaryArrived(0, "a", 6, ()))
    done = does.handle(core.StepDone(0, "out", 6, needs_from=7, horizon=6))
    assert acknowledged(done) == [(6, 4)]


def test_with_checkpoints_both_may_stop_and_come_back() -> None:
    """What comes after the newest is kept, whether there is a partner or not."""
    does, _ = started(checkpoint_buckets=3)
    done = does.handle(core.StepDone(0, "out", 4, needs_from=5, horizon=4))
    assert core.Checkpoint("out", 4) in done and acknowledged(done) == [(4, -1)]
    assert acknowledged(does.handle(core.CheckpointDone(0, "out", 4, 5))) == [(4, 4)]


def test_with_a_partner_again_it_needs_no_checkpoint() -> None:
    does, _ = started()
    does.handle(core.Unpaired(0, True))
    does.handle(core.Unpaired(0, False))
    done = does.handle(core.StepDone(0, "out", 4, needs_from=5, horizon=4))
    assert acknowledged(done) == [(4, 4)]
    assert not [a for a in done if isinstance(a, core.Checkpoint)]


def test_alone_it_keeps_one_now_and_then() -> None:
    does, _ = started(checkpoint_buckets=2)
    does.handle(core.Unpaired(0, True))
    done = does.handle(core.StepDone(0, "out", 4, needs_from=5, horizon=4))
    assert core.Checkpoint("out", 4) in done


# -- what moves --------------------------------------------------------------------------------


def test_what_moves_survives_the_wire() -> None:
    segment = Segment(SegmentId("s", 0, 3), Stability.STABLE, "segments/x", 2, "0f", 7, 9, 1)
    results = Results("s", "ts timestamp", "ts", 0, 2, 4, (segment,))
    moving = Moving("out", 3, {"needs_from": 2}, ("a/b",), (results,))
    offered = OfferedState("state", (moving,), (StateFile("a/b", 7, "0f"),))
    sent = json.loads(json.dumps(codec.encode(offered)))
    assert reply_of(GetState("a"), sent, "a@2") == offered
    with pytest.raises(TransportError, match=r"reply of a@2 to 'state': field 'paths.0': expected"):
        reply_of(GetState("a"), sent | {"paths": [{"path": "out"}]}, "a@2")


# -- who is read ----------------------------------------------------------------------------------


def test_each_reads_within_its_own_dataflow() -> None:
    producers = ("m.0", "m.0@2")
    assert home_of("r.1", producers) == "m.0"
    assert home_of("r.1@2", producers) == "m.0@2"
    assert home_of("r.1", ("source",)) is None


def test_take_over_and_back() -> None:
    upstream = Consumer(replicas=("m", "m@2"), home="m@2")
    assert upstream.hears("m", STABLE, 9, at=0) == ["reads m"]
    back = upstream.hears("m@2", STABLE, 9, at=0)
    assert back == ["reads m@2"]


def test_home_is_no_reason_to_read_one_that_is_behind() -> None:
    upstream = Consumer(replicas=("m", "m@2"), home="m@2")
    upstream.hears("m", STABLE, 9, at=0)
    assert upstream.hears("m@2", STABLE, 5, at=0) == []
    assert upstream.hears("m@2", OutputState.STABILIZATION, 9, at=0) == []


def at_home() -> Consumer:
    """It reads its own copy; both are at bucket 9, and the other one was at 8 before."""
    upstream = Consumer(replicas=("m", "m@2"), home="m@2")
    for upto in (8, 9):
        upstream.hears("m", STABLE, upto, at=0)
        upstream.hears("m@2", STABLE, upto, at=0)
    assert upstream.main == "m@2"
    return upstream


def test_3_1_2_that_the_other_copy_finished_a_long_step_first_is_no_reason_to_leave() -> None:
    """The copies are only loosely in step. Going there and back sends everything twice."""
    upstream, now = at_home(), 0
    for upto in (23, 37, 51):
        now += 5 * S
        assert upstream.hears("m", STABLE, upto, at=now - S) == []
        assert upstream.gets("m@2", STABLE, upto, at=now) == []
        upstream.takes(upto)
    assert upstream.main == "m@2"


def test_a_home_that_is_more_than_a_step_behind_is_left_until_it_has_what_the_reader_has() -> None:
    upstream = at_home()
    assert upstream.hears("m", STABLE, 23, at=1 * S) == []
    assert upstream.hears("m", STABLE, 23, at=2 * S) == []  # nothing new, no second step
    assert upstream.hears("m", STABLE, 24, at=3 * S) == ["reads m"]
    upstream.takes(24)
    assert upstream.hears("m@2", STABLE, 23, at=4 * S) == []
    assert upstream.hears("m@2", STABLE, 24, at=5 * S) == ["reads m@2"]


def test_a_home_that_was_cut_off_is_left_after_a_few_buckets() -> None:
    """Steps of one bucket, as they are without load; the home knows of no failure."""
    upstream = at_home()
    for upto in range(10, 10 + LAG_BUCKETS):
        assert upstream.hears("m", STABLE, upto, at=S) == []
    left = upstream.hears("m", STABLE, 10 + LAG_BUCKETS, at=S)
    assert left == ["reads m"]


def test_a_home_that_was_cut_off_is_left_when_the_other_one_has_come_to_the_end() -> None:
    """There will be no further step to judge by."""
    upstream = at_home()
    assert upstream.hears("m", STABLE, 23, at=S) == []
    assert upstream.hears("m", STABLE, 23, at=S + STEP_US - 1) == []
    left = upstream.hears("m", STABLE, 23, at=S + STEP_US)
    assert left == ["reads m"]


def test_of_one_that_is_heard_for_the_first_time_nobody_knows_its_steps() -> None:
    upstream = at_home()
    upstream.loses("m", at=S)
    assert upstream.hears("m", STABLE, 23, at=2 * S) == []
    assert upstream.hears("m", STABLE, 24, at=3 * S) == ["reads m"]


def test_what_is_taken_back_is_no_step() -> None:
    upstream = at_home()
    upstream.hears("m", OutputState.UP_FAILURE, 9, 14, at=S)
    assert upstream.hears("m", OutputState.UP_FAILURE, 9, 9, at=2 * S) == []
    assert upstream.main == "m@2"


# -- the buffer: who must have had what before it goes --------------------------------------------


@pytest.fixture
def service(tmp_path: Path) -> Service:
    log = Log.open(str(tmp_path), "maker", fsync="never")
    log.open_stream("s", "ts timestamp", "ts", 0)
    log.append(Boundary("s", 9))
    made = Service(logs={"s": log}, readers={"s": {"r", "r@2"}}, trim_buckets=1)
    return made


def trimmed(service: Service) -> int:
    return service.logs["s"].info("s").trimmed_upto


def test_what_both_have_had_goes(service: Service) -> None:
    service.acknowledge("s", "r", 7, 7, 1)
    assert trimmed(service) == -1
    service.acknowledge("s", "r@2", 4, 4, 1)
    assert trimmed(service) == 4


def test_an_acknowledgement_may_come_before_what_it_acknowledges(service: Service) -> None:
    """Dangling (section 3.1.2): a copy that is behind drops what its partner has delivered."""
    for reader in ("r", "r@2"):
        service.acknowledge("s", reader, 12, 12, 1)
    assert trimmed(service) == 9
    service.logs["s"].append(Boundary("s", 11))
    service.acknowledge("s", "r", 12, 12, 1)
    assert trimmed(service) == 11


DEAD = {"r@2": Standing(1, 1)}
RELEASED = {"r@2": Standing(1, 1, 1)}


def test_who_is_dead_stops_nobody_and_its_disk_is_reckoned_with(service: Service) -> None:
    service.acknowledge("s", "r", 7, 7, 1)
    service.acknowledge("s", "r@2", 4, 2, 1)
    service.lost(DEAD, 0)
    assert service.received("s") == 7, "a producer waits for those only that live"
    assert trimmed(service) == 2, "the checkpoint on the disk of the dead needs the rest"


def test_of_who_is_dead_for_long_not_even_the_disk_is_reckoned_with(service: Service) -> None:
    """Section 3.2.2: ack_all."""
    service.acknowledge("s", "r", 7, 7, 1)
    service.lost(RELEASED, 0)
    assert trimmed(service) == 7
    service.acknowledge("s", "r", 8, 8, 1)
    assert trimmed(service) == 8
    service.acknowledge("s", "r@2", 3, 3, 1)  # it was only slow: harmless
    assert trimmed(service) == 8


def test_nothing_goes_that_a_newcomer_may_need(service: Service) -> None:
    """Section 5.3.2: reset, and del extended by the new copy."""
    service.acknowledge("s", "r", 5, 5, 1)
    service.lost(RELEASED, 0)
    held = service.hold("s", "r@2", 2, 0)
    assert held == Held(0, 5) and not held.whole, "some of it was deleted: it wants a state"
    service.lost(RELEASED, 0)  # an old view that comes late
    service.acknowledge("s", "r", 9, 9, 1)
    assert trimmed(service) == 5
    assert service.received("s") == 9, "what it has not had counts only once it reads"
    service.acknowledge("s", "r@2", 7, 6, 2)  # csync: it begins after bucket 7
    assert trimmed(service) == 6
    assert service.received("s") == 7


def test_a_newcomer_that_is_not_heard_of_any_more_holds_nothing(service: Service) -> None:
    service.acknowledge("s", "r", 5, 5, 1)
    service.hold("s", "r@2", 2, 0)
    service.hold("s", "r@2", 2, LEASE_US)
    service.acknowledge("s", "r", 9, 9, 1)
    service.lost(DEAD, 9 * LEASE_US)
    assert trimmed(service) == -1, "its disk is still reckoned with"
    service.lost(RELEASED, 2 * LEASE_US)
    assert trimmed(service) == -1
    service.lost(RELEASED, 2 * LEASE_US + 1)
    assert trimmed(service) == 9


def test_a_producer_that_was_restarted_waits_for_a_newcomer_once_more(service: Service) -> None:
    service.acknowledge("s", "r", 5, 5, 1)
    service.hold("s", "r@2", 2, 0)
    again = Service(logs=service.logs, readers=service.readers, trim_buckets=1)
    for at in (0, LEASE_US):
        again.lost(RELEASED, at)
        assert trimmed(again) == -1
    again.lost(RELEASED, LEASE_US + 1)
    assert trimmed(again) == 5


def test_inputs_that_are_all_there_are_as_good_as_a_state(service: Service) -> None:
    """Both of a pair were stopped before their first checkpoint."""
    held = service.hold("s", "r@2", 2, 0)
    assert isinstance(held, Held) and held.whole


def test_what_is_being_fetched_is_not_trimmed(service: Service) -> None:
    service.pins["r"] = {"s": 3}
    for reader in ("r", "r@2"):
        service.acknowledge("s", reader, 7, 7, 1)
    assert trimmed(service) == 2
    del service.pins["r"]
    service.acknowledge("s", "r", 8, 8, 1)
    assert trimmed(service) == 7


def test_a_stream_that_is_not_open_holds_nothing(tmp_path: Path) -> None:
    log = Log.open(str(tmp_path), "maker", fsync="never")
    service = Service(logs={"s": log}, readers={"s": {"r"}})
    assert service.hold("s", "r", 2, 0) == NotOpen()
    service.lost({"r": Standing(1, 1)}, 0)
    log.close()


# -- the controller -------------------------------------------------------------------------------


PAIR = {"a": "a@2", "a@2": "a"}


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    made = Controller(Log.open(str(tmp_path), "controller", fsync="never"), PAIR, silence_us=10)
    for name in PAIR:
        assert made.register(name, "here", made.next_epoch(name), at=0)
    return made


def test_silence_is_death_while_the_other_speaks(controller: Controller) -> None:
    assert controller.judge(at=9)[0] == []
    controller.register("a", "here", 1, at=13)
    assert controller.judge(at=14)[0] == ["a@2"]
    assert controller.judge(at=15)[0] == []
    assert controller.standings() == {"a": Standing(1, 0), "a@2": Standing(1, 1, 1)}
    assert not controller.register("a@2", "here", 1, at=21)  # it was declared dead
    assert controller.register("a@2", "there", controller.next_epoch("a@2"), at=22)
    assert controller.standings()["a@2"] == Standing(2, 1, 1)


def test_if_nobody_speaks_it_is_the_controller_that_was_cut_off(controller: Controller) -> None:
    assert controller.judge(at=100)[0] == []
    controller.register("a", "here", 1, at=101)
    assert controller.judge(at=102)[0] == ["a@2"]


def test_who_stood_still_himself_has_heard_nobody(controller: Controller) -> None:
    """The one who speaks first afterwards is not the only one alive."""
    assert controller.judge(at=4)[0] == []
    controller.register("a", "here", 1, at=50)
    assert controller.judge(at=51)[0] == []
    controller.register("a", "here", 1, at=56)
    assert controller.judge(at=56)[0] == []
    controller.register("a", "here", 1, at=61)
    assert controller.judge(at=61)[0] == []
    assert controller.judge(at=62)[0] == ["a@2"]


def test_never_both_of_a_pair(controller: Controller) -> None:
    controller.register("a", "here", 1, at=15)
    assert controller.judge(at=20)[0] == ["a@2"]
    assert controller.judge(at=90)[0] == []


def test_a_controller_that_comes_back_gives_everybody_time(
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
