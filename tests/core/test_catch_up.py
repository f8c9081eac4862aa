"""Transcripts of the catch-up of one replica of a pair (Flux sections 3.3, 3.4 and 5.3)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.catch_up import (
    LOST_US,
    PAUSE_US_MAX,
    PIECE_TRIES,
    REFUSALS,
    RETRY_US,
    CatchUp,
    Phase,
)
from holdfast.core.catch_up_events import (
    LEASE_US,
    RENEW_US,
    Action,
    AskState,
    BeganEmpty,
    Begin,
    ComeUp,
    Discard,
    Event,
    Failure,
    Fetch,
    Fetched,
    FetchFailed,
    GiveUp,
    HasState,
    Held,
    Hold,
    HoldAnswer,
    HoldAnswered,
    Install,
    Installed,
    InstallFailed,
    Lending,
    NotOpen,
    NotReady,
    OwnPath,
    PeerAnswer,
    PeerAnswered,
    Piece,
    Release,
    Renew,
    Replaced,
    Tick,
    Unreachable,
    Waits,
    Wake,
)

#: A checkpoint of bucket 20 that needs its inputs from bucket 18.
OWN = OwnPath(("s",), (20, 18))
NOTHING = OwnPath(("s",))
STATE, ROWS = Piece("state/x", 7, "0f"), Piece("segments/s/b30", 9, "1e")
ALL, TRIMMED, DEEPER = Held(0, -1), Held(0, 17), Held(0, 18)


def copy(own: OwnPath = OWN, producers: Sequence[str] = ("m",)) -> CatchUp:
    return CatchUp("a", ("a@2",), {"s": tuple(producers)}, {"out": own})


def handle(machine: CatchUp, *events: Event) -> list[Action]:
    """Actions of the last event."""
    actions: list[Action] = []
    for event in events:
        actions = machine.handle(event)
    return actions


def round_(
    machine: CatchUp, hold: HoldAnswer, peer: PeerAnswer | None = None, at: int = 0
) -> list[Action]:
    """One round, up to the answer of the peer."""
    requests = machine.handle(Begin(at) if machine.round == 0 else Tick(at))
    assert requests == [Hold(machine.round, "s", "m")]
    actions = machine.handle(HoldAnswered(at, machine.round, "s", "m", hold))
    if peer is None:
        return actions
    assert actions == [AskState(machine.round, "a@2")]
    return machine.handle(PeerAnswered(at, machine.round, peer))


def fetching(own: OwnPath = OWN) -> CatchUp:
    """The peer has listed one file of its state and one file of its results."""
    machine = copy(own)
    actions = round_(machine, TRIMMED, HasState(30, (STATE, ROWS)))
    assert actions == [Fetch(1, "a@2", STATE), Wake(RENEW_US)]
    return machine


# -- from the peer --------------------------------------------------------------------------------


def test_3_3_1_producers_hold_before_the_state_is_requested_and_fetched_in_pieces() -> None:
    machine = fetching()
    assert machine.handle(Fetched(1, 1, STATE)) == [Fetch(1, "a@2", ROWS)]
    assert machine.handle(Fetched(2, 1, ROWS)) == [Release("a@2"), Install(1)]
    (up,) = machine.handle(Installed(3, 1))
    assert isinstance(up, ComeUp) and up.source == "peer"
    assert machine.handle(Tick(10)) == []


def test_a_state_without_files_is_installed() -> None:
    actions = round_(copy(), TRIMMED, HasState(-1, ()))
    assert actions == [Release("a@2"), Install(1), Wake(RENEW_US)]


def test_5_3_2_every_producer_is_asked_to_hold_and_one_per_stream_is_enough() -> None:
    machine = copy(producers=("m", "m@2"))
    assert machine.handle(Begin(0)) == [Hold(1, "s", "m"), Hold(1, "s", "m@2")]
    assert machine.handle(HoldAnswered(0, 1, "s", "m", Unreachable("away"))) == []
    assert machine.handle(HoldAnswered(0, 1, "s", "m@2", TRIMMED)) == [AskState(1, "a@2")]


@pytest.mark.parametrize("answer", [NotOpen(), Unreachable("away")])
def test_the_peer_is_not_asked_before_a_producer_of_each_stream_holds(answer: HoldAnswer) -> None:
    """There is no time limit: a producer that is unreachable is not a loss of state."""
    machine, at = copy(NOTHING), 0
    for _ in range(3):
        assert round_(machine, answer, at=at) == [Wake(at + RETRY_US)]
        assert machine.trouble == "no producer retains s for the replica yet (m)"
        at += RETRY_US + LOST_US


def test_a_replaced_replica_gives_up() -> None:
    machine = copy()
    assert round_(machine, Replaced("epoch 3 is known")) == [
        Discard(),
        GiveUp("epoch 3 is known", replaced=True),
    ]


def test_a_replica_that_is_replaced_while_it_fetches_gives_up() -> None:
    machine = fetching()
    machine.handle(Tick(RENEW_US))
    actions = machine.handle(HoldAnswered(RENEW_US, 1, "s", "m", Replaced("epoch 3 is known")))
    assert actions == [Release("a@2"), Discard(), GiveUp("epoch 3 is known", replaced=True)]


# -- pieces ---------------------------------------------------------------------------------------


def test_a_failed_fetch_is_retried() -> None:
    machine = fetching()
    assert machine.handle(FetchFailed(5, 1, STATE, Failure("away"))) == [Wake(5 + RETRY_US)]
    assert machine.trouble == "away"
    assert machine.handle(Tick(5 + RETRY_US)) == [Fetch(1, "a@2", STATE)]
    assert machine.handle(Fetched(9, 1, STATE)) == [Fetch(1, "a@2", ROWS)]


def test_3_4_after_a_few_failed_fetches_the_transfer_restarts() -> None:
    """Idempotent: both replicas discard the pieces of the failed transfer."""
    machine, at = fetching(), 0
    for _ in range(PIECE_TRIES - 1):
        machine.handle(FetchFailed(at, 1, STATE, Failure("away")))
        at += RETRY_US
        assert machine.handle(Tick(at)) == [Fetch(1, "a@2", STATE)]
    actions = machine.handle(FetchFailed(at, 1, STATE, Failure("away")))
    assert actions == [Release("a@2"), Discard(), Wake(at + RETRY_US)]
    assert round_(machine, TRIMMED, HasState(33, (STATE,)), at + RETRY_US)[0] == Fetch(
        2, "a@2", STATE
    )


def test_an_outdated_list_of_pieces_restarts_the_transfer_at_once() -> None:
    machine = fetching()
    actions = machine.handle(FetchFailed(0, 1, STATE, Failure("not offered", gone=True)))
    assert actions == [Release("a@2"), Discard(), Wake(RETRY_US)]


def test_a_transfer_that_fails_repeatedly_pauses_for_longer_than_a_lease() -> None:
    """Otherwise producers would retain more and more for a replica whose disk is full."""
    machine, at = copy(), 0
    for pause in [*(RETRY_US << n for n in range(6)), PAUSE_US_MAX, PAUSE_US_MAX]:
        round_(machine, TRIMMED, HasState(30, ()), at)
        machine.handle(InstallFailed(at, machine.round, Failure("no space", full=True)))
        at += pause
        early = machine.handle(Tick(at - 1))
        assert early in ([], [Wake(at)]), "no producer is asked to hold during the pause"
    assert PAUSE_US_MAX > LEASE_US


def test_the_leases_of_the_peer_and_the_producers_are_renewed_during_the_transfer() -> None:
    machine = fetching()
    assert machine.handle(Tick(RENEW_US)) == [
        Hold(1, "s", "m"),
        Renew("a@2"),
        Wake(2 * RENEW_US),
    ]
    machine.handle(Fetched(RENEW_US, 1, STATE))
    machine.handle(Fetched(RENEW_US, 1, ROWS))
    assert machine.phase is Phase.INSTALLING
    renewals = machine.handle(Tick(2 * RENEW_US))
    assert renewals == [Hold(1, "s", "m"), Wake(3 * RENEW_US)], "the peer has sent all pieces"


@pytest.mark.parametrize(
    "late",
    [
        HoldAnswered(1, 0, "s", "m", ALL),
        PeerAnswered(1, 0, Waits(own=False)),
        PeerAnswered(1, 1, Waits(own=False)),
        Fetched(1, 0, STATE),
        Fetched(1, 1, ROWS),
        FetchFailed(1, 0, STATE, Failure("late")),
        Installed(1, 1),
        InstallFailed(1, 1, Failure("late")),
    ],
)
def test_a_late_event_is_ignored(late: Event) -> None:
    machine = fetching()
    assert machine.handle(late) == []
    assert machine.handle(Fetched(1, 1, STATE)) == [Fetch(1, "a@2", ROWS)]


def test_a_timer_that_fires_early_is_rearmed() -> None:
    machine = fetching()
    assert machine.handle(Tick(RENEW_US - 1)) == [Wake(RENEW_US)]
    assert machine.handle(Tick(RENEW_US))[-1] == Wake(2 * RENEW_US)


# -- from the own disk ----------------------------------------------------------------------------


def test_the_peer_is_asked_a_few_times_before_the_own_disk_is_used() -> None:
    machine, at = copy(), 0
    for _ in range(REFUSALS - 1):
        assert round_(machine, TRIMMED, Unreachable("away"), at) == [Wake(at + RETRY_US)]
        at += RETRY_US
    assert round_(machine, TRIMMED, NotReady("starting"), at) == [ComeUp("own", "starting")]


def test_a_replica_does_not_wait_for_a_peer_that_waits_for_state_itself() -> None:
    """Both replicas were stopped and have their disks, or the peer has lost its disk."""
    for peer in (Waits(None), Waits(own=False), Waits(own=True)):
        (up,) = round_(copy(), TRIMMED, peer)
        assert isinstance(up, ComeUp) and up.source == "own"


def test_the_own_checkpoint_suffices_only_if_its_inputs_are_still_retained() -> None:
    """A replica that starts without that finds its inputs deleted, and fails at every restart."""
    machine = copy()
    assert round_(machine, DEEPER, Waits(None)) == [Wake(RETRY_US)]
    assert machine.own_suffices is False


def test_an_empty_start_suffices_if_every_input_is_retained_from_its_start() -> None:
    (up,) = round_(copy(NOTHING), ALL, BeganEmpty())
    assert isinstance(up, ComeUp) and up.source == "empty"


def test_a_replica_does_not_start_empty_like_its_peer_if_inputs_were_deleted() -> None:
    assert round_(copy(NOTHING), TRIMMED, BeganEmpty()) == [Wake(RETRY_US)]


def test_a_peer_that_is_not_ready_is_asked_again() -> None:
    """After a full restart the surviving replica has state, but reports it only a little later."""
    machine = copy(NOTHING)
    assert round_(machine, TRIMMED, NotReady("not yet")) == [Wake(RETRY_US)]
    actions = round_(machine, TRIMMED, HasState(30, (STATE,)), RETRY_US)
    assert actions[0] == Fetch(2, "a@2", STATE)


@pytest.mark.parametrize(
    ("first", "second", "suffices"),
    [
        (TRIMMED, DEEPER, True),
        (DEEPER, Unreachable("away"), None),
        (DEEPER, NotOpen(), None),
        (DEEPER, DEEPER, False),
        (Unreachable("away"), TRIMMED, True),
    ],
)
def test_one_producer_that_retains_the_needed_inputs_is_enough(
    first: HoldAnswer, second: HoldAnswer, suffices: bool | None
) -> None:
    machine = copy(producers=("m", "m@2"))
    machine.handle(Begin(0))
    machine.handle(HoldAnswered(0, 1, "s", "m", first))
    machine.handle(HoldAnswered(0, 1, "s", "m@2", second))
    assert machine.own_suffices is suffices
    assert machine.as_peer() == Waits(suffices)


def test_the_own_disk_must_suffice_for_every_path() -> None:
    paths = {"out": OWN, "other": OwnPath(("s", "t"), (20, 25))}
    machine = CatchUp("a", ("a@2",), {"s": ("m",), "t": ("n",)}, paths)
    machine.handle(Begin(0))
    machine.handle(HoldAnswered(0, 1, "s", "m", TRIMMED))
    assert machine.own_suffices is None
    machine.handle(HoldAnswered(0, 1, "t", "n", Held(0, 25)))
    assert machine.own_suffices is False


# -- lost state -----------------------------------------------------------------------------------


def test_a_replica_gives_up_at_once_if_both_replicas_have_lost_their_state() -> None:
    (_, give_up) = round_(copy(NOTHING), TRIMMED, Waits(own=False))
    assert isinstance(give_up, GiveUp) and not give_up.replaced
    assert "a@2 is catching up itself" in give_up.why
    assert "its own disk has no checkpoint of 'out'" in give_up.why
    assert "Restore the storage of a@2" in give_up.why


def test_the_error_names_the_inputs_missing_for_the_own_checkpoint() -> None:
    (_, give_up) = round_(copy(), Held(0, 40), Waits(own=False))
    assert isinstance(give_up, GiveUp)
    assert (
        "bucket 20 of 'out') needs 's' from bucket 18 on, which is retained only from 41 on"
        in give_up.why
    )


def test_a_replica_waits_for_a_peer_that_can_restart_from_its_own_disk() -> None:
    for peer in (Waits(own=True), Waits(own=None)):
        assert round_(copy(NOTHING), TRIMMED, peer) == [Wake(RETRY_US)]


def test_a_replica_gives_up_after_two_minutes_without_any_state() -> None:
    machine, at, actions = copy(NOTHING), 0, [Wake(0)]
    while isinstance(actions[-1], Wake):
        assert at <= LOST_US + RETRY_US
        at = actions[-1].at
        actions = round_(machine, TRIMMED, Unreachable("a@2: connection refused"), at)
    assert isinstance(actions[-1], GiveUp)
    assert "a@2: connection refused (waited 12" in actions[-1].why and at > LOST_US


# -- leases of the lender -------------------------------------------------------------------------


def test_lent_state_is_retained_while_its_lease_is_renewed() -> None:
    lending = Lending()
    assert lending.lend(0, "a") == LEASE_US
    assert lending.expired(LEASE_US - 1) == ([], LEASE_US)
    assert lending.renew(LEASE_US - 1, "a")
    assert lending.expired(LEASE_US) == ([], 2 * LEASE_US - 1)
    assert lending.expired(2 * LEASE_US - 1) == (["a"], None)
    assert not lending.renew(2 * LEASE_US, "a"), "the peer has to request a new list"


def test_lent_state_is_released_when_it_was_fetched() -> None:
    lending = Lending()
    lending.lend(0, "a")
    lending.lend(5, "b")
    lending.end("a")
    assert lending.expired(LEASE_US) == ([], LEASE_US + 5)


# -- random answers -------------------------------------------------------------------------------

ANSWERS = st.sampled_from([ALL, TRIMMED, DEEPER, NotOpen(), Unreachable("away")])
PEERS = st.sampled_from(
    [HasState(30, (STATE, ROWS)), HasState(3, ()), Waits(None), Waits(own=True), Waits(own=False),
     BeganEmpty(), NotReady("not yet"), Unreachable("away")]
)  # fmt: skip
FAILURES = st.sampled_from(
    [None, None, Failure("away"), Failure("gone", gone=True), Failure("no space", full=True)]
)


@given(st.data(), st.sampled_from([OWN, NOTHING]))
def test_a_catch_up_never_gets_stuck_and_its_outcome_is_justified(
    data: st.DataObject, own: OwnPath
) -> None:
    """Whatever the answers: the catch-up has ended, a request is open, or a wake-up is set. And the
    outcome agrees with what the disks hold."""
    machine = copy(own)
    requests: list[Action] = []
    wakes: list[int] = []
    actions = machine.handle(Begin(0))
    at, holds, peer = 0, ALL, Unreachable("away")
    for _ in range(60):
        for action in actions:
            match action:
                case Wake():
                    wakes.append(action.at)
                case Hold() | AskState() | Fetch() | Install():
                    requests.append(action)
                case ComeUp():
                    if action.source != "peer":
                        assert machine.own_suffices
                    return
                case GiveUp():
                    assert machine.own_suffices is not True
                    return
        assert requests or wakes, "no request is open and no wake-up is set"
        if not requests or (wakes and data.draw(st.booleans())):
            wakes.remove(due := min(wakes))
            at = max(at, due - data.draw(st.integers(0, 2)))  # timers may fire early
            actions = machine.handle(Tick(at))
            continue
        request = requests.pop(data.draw(st.integers(0, len(requests) - 1)))
        match request:
            case Hold():
                holds = data.draw(ANSWERS)
                event: Event = HoldAnswered(at, request.round, "s", "m", holds)
            case AskState():
                peer = data.draw(PEERS)
                event = PeerAnswered(at, request.round, peer)
            case Fetch():
                failure = data.draw(FAILURES)
                event = (
                    Fetched(at, request.round, request.piece)
                    if failure is None
                    else FetchFailed(at, request.round, request.piece, failure)
                )
            case Install():
                failure = data.draw(FAILURES)
                event = (
                    Installed(at, request.round)
                    if failure is None
                    else InstallFailed(at, request.round, failure)
                )
        actions = machine.handle(event)
