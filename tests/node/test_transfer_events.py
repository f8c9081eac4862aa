"""Translations that the recorded catch-ups do not cover (`test_two_catch_up_drivers`)."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.core import catch_up_events as core
from holdfast.errors import LogError, StaleEpoch, StateLost, TransportError
from holdfast.node.state_transfer import Staging
from holdfast.node.transfer_events import (
    Broke,
    HoldReplied,
    InstallEnded,
    RawEvent,
    StateReplied,
    Translation,
    reason_to_stop,
)
from holdfast.streams.calls import Holding, OfferedState
from holdfast.verify.sim.simulated_disk import MemoryDisk

HOLD, ASK, INSTALL = core.Hold(3, "s", "p"), core.AskState(3, "peer"), core.Install(3)


def event(raw: RawEvent) -> core.Event:
    return Translation("main", (), Staging("/main", MemoryDisk(Random(0)))).event(raw, 7)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (Holding(False), core.NotOpen()),
        (StaleEpoch("a newer one runs"), core.Replaced("a newer one runs")),
        (TransportError("away"), core.Unreachable("away")),
    ],
)
def test_replies_of_a_producer_become_hold_answers(reply: Holding, answer: core.HoldAnswer) -> None:
    assert event(HoldReplied(HOLD, reply)) == core.HoldAnswered(7, 3, "s", "p", answer)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (OfferedState("began-empty"), core.BeganEmpty()),
        (OfferedState("not-ready", why="soon"), core.NotReady("soon")),
        (OfferedState("waits", own=False), core.Waits(False)),
    ],
)
def test_replies_of_a_peer_become_peer_answers(
    reply: OfferedState, answer: core.PeerAnswer
) -> None:
    assert event(StateReplied(ASK, reply)) == core.PeerAnswered(7, 3, answer)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (InstallEnded(INSTALL, LogError("odd"), closed=True), TransportError),
        (Broke(ValueError("odd")), ValueError),
    ],
)
def test_errors_that_end_the_attempt_are_raised(raw: RawEvent, error: type[Exception]) -> None:
    with pytest.raises(error, match="odd"):
        event(raw)


def test_a_replica_stops_with_stale_epoch_or_state_lost() -> None:
    assert isinstance(reason_to_stop(core.GiveUp("x", replaced=True)), StaleEpoch)
    assert isinstance(reason_to_stop(core.GiveUp("x")), StateLost)
