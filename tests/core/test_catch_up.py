"""Catch-up of one copy of a pair, as transcripts (Flux sections 3.3, 3.4 and 5.3)."""

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

#: A checkpoint of bucket 20, which needs its inputs from bucket 18 on.
OWN = OwnPath(("s",), (20, 18))
NOTHING = OwnPath(("s",))
STATE, ROWS = Piece("state/x", 7, "0f"), Piece("segments/s/b30", 9, "1e")
ALL, TRIMMED, DEEPER = Held(0, -1), Held(0, 17), Held(0, 18)


def copy(own: OwnPath = OWN, producers: Sequence[str] = ("m",)) -> CatchUp:
    return CatchUp("a", ("a@2",), {"s": tuple(producers)}, {"out": own})


def said(machine: CatchUp, *events: Event) -> list[Action]:
    """What the last event gives."""
    actions: list[Action] = []
    for event in events:
        actions = machine.handle(event)
    return actions


def round_(
    machine: CatchUp, hold: HoldAnswer, peer: PeerAnswer | None = None, at: int = 0
) -> list[Action]:
    """A round up to the answer of the peer."""
    begun = machine.handle(Begin(at) if machine.round == 0 else Tick(at))
    assert begun == [Hold(machine.round, "s", "m")]
    actions = machine.handle(HoldAnswered(at, machine.round, "s", "m", hold))
    if peer is None:
        return actions
    assert actions == [AskState(machine.round, "a@2")]
    return machine.handle(PeerAnswered(at, machine.round, peer))


def fetching(own: OwnPath = OWN) -> CatchUp:
    """The peer has listed a file of its state and one of its results."""
    machine = copy(own)
    told = round_(machine, TRIMMED, HasState(30, (STATE, ROWS)))
    assert told == [Fetch(1, "a@2", STATE), Wake(RENEW_US)]
    return machine


# -- from the peer --------------------------------------------------------------------------------


def test_3_3_1_producers_hold_before_the_state_is_asked_for_and_it_comes_piece_by_piece() -> None:
    machine = fetching()
    assert machine.handle(Fetched(1, 1, STATE)) == [Fetch(1, "a@2", ROWS)]
    assert machine.handle(Fetched(2, 1, ROWS)) == [Release("a@2"), Install(1)]
    (up,) = machine.handle(Installed(3, 1))
    assert isinstance(up, ComeUp) and up.source == "peer"
    assert machine.handle(Tick(10)) == []


def test_a_state_without_files_is_a_state() -> None:
    told = round_(copy(), TRIMMED, HasState(-1, ()))
    assert told == [Release("a@2"), Install(1), Wake(RENEW_US)]


def test_5_3_2_every_producer_is_asked_and_one_that_holds_is_enough_for_a_stream() -> None:
    machine = copy(producers=("m", "m@2"))
    assert machine.handle(Begin(0)) == [Hold(1, "s", "m"), Hold(1, "s", "m@2")]
    assert machine.handle(HoldAnswered(0, 1, "s", "m", Unreachable("away"))) == []
    assert machine.handle(HoldAnswered(0, 1, "s", "m@2", TRIMMED)) == [AskState(1, "a@2")]


@pytest.mark.parametrize("answer", [NotOpen(), Unreachable("away")])
def test_as_long_as_no_producer_holds_a_stream_the_peer_is_not_asked(answer: HoldAnswer) -> None:
    """However long it takes: that a producer is away is no loss."""
    machine, at = copy(NOTHING), 0
    for _ in range(3):
        assert round_(machine, answer, at=at) == [Wake(at + RETRY_US)]
        assert machine.trouble == "no producer of s holds it yet (m)"
        at += RETRY_US + LOST_US


def test_one_that_was_replaced_stops() -> None:
    machine = copy()
    assert round_(machine, Replaced("epoch 3 is known")) == [
        Discard(),
        GiveUp("epoch 3 is known", replaced=True),
    ]


def test_one_that_was_replaced_while_it_fetches_stops_too() -> None:
    machine = fetching()
    machine.handle(Tick(RENEW_US))
    told = machine.handle(HoldAnswered(RENEW_US, 1, "s", "m", Replaced("epoch 3 is known")))
    assert told == [Release("a@2"), Discard(), GiveUp("epoch 3 is known", replaced=True)]


# -- pieces ---------------------------------------------------------------------------------------


def test_a_piece_that_does_not_come_is_tried_again() -> None:
    machine = fetching()
    assert machine.handle(FetchFailed(5, 1, STATE, Failure("away"))) == [Wake(5 + RETRY_US)]
    assert machine.trouble == "away"
    assert machine.handle(Tick(5 + RETRY_US)) == [Fetch(1, "a@2", STATE)]
    assert machine.handle(Fetched(9, 1, STATE)) == [Fetch(1, "a@2", ROWS)]


def test_3_4_after_a_few_tries_all_of_it_begins_again() -> None:
    """Idempotent: whatever was fetched is thrown away, here and there."""
    machine, at = fetching(), 0
    for _ in range(PIECE_TRIES - 1):
        machine.handle(FetchFailed(at, 1, STATE, Failure("away")))
        at += RETRY_US
        assert machine.handle(Tick(at)) == [Fetch(1, "a@2", STATE)]
    told = machine.handle(FetchFailed(at, 1, STATE, Failure("away")))
    assert told == [Release("a@2"), Discard(), Wake(at + RETRY_US)]
    assert round_(machine, TRIMMED, HasState(33, (STATE,)), at + RETRY_US)[0] == Fetch(
        2, "a@2", STATE
    )


def test_a_list_that_is_out_of_date_is_not_insisted_on() -> None:
    machine = fetching()
    told = machine.handle(FetchFailed(0, 1, STATE, Failure("not offered", gone=True)))
    assert told == [Release("a@2"), Discard(), Wake(RETRY_US)]


def test_a_transfer_that_fails_again_and_again_pauses_for_longer_than_a_lease() -> None:
    """So that producers do not keep more and more for a copy whose disk is full."""
    machine, at = copy(), 0
    for pause in [*(RETRY_US << n for n in range(6)), PAUSE_US_MAX, PAUSE_US_MAX]:
        round_(machine, TRIMMED, HasState(30, ()), at)
        machine.handle(InstallFailed(at, machine.round, Failure("no space", full=True)))
        at += pause
        early = machine.handle(Tick(at - 1))
        assert early in ([], [Wake(at)]), "nothing is held meanwhile"
    assert PAUSE_US_MAX > LEASE_US


def test_while_pieces_come_the_peer_and_the_producers_are_told_to_go_on() -> None:
    machine = fetching()
    assert machine.handle(Tick(RENEW_US)) == [
        Hold(1, "s", "m"),
        Renew("a@2"),
        Wake(2 * RENEW_US),
    ]
    machine.handle(Fetched(RENEW_US, 1, STATE))
    machine.handle(Fetched(RENEW_US, 1, ROWS))
    assert machine.phase is Phase.INSTALLING
    held = machine.handle(Tick(2 * RENEW_US))
    assert held == [Hold(1, "s", "m"), Wake(3 * RENEW_US)], "the peer has given all it has"


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
def test_what_comes_too_late_is_not_heard(late: Event) -> None:
    machine = fetching()
    assert machine.handle(late) == []
    assert machine.handle(Fetched(1, 1, STATE)) == [Fetch(1, "a@2", ROWS)]


def test_a_timer_that_fires_early_is_set_again() -> None:
    machine = fetching()
    assert machine.handle(Tick(RENEW_US - 1)) == [Wake(RENEW_US)]
    assert machine.handle(Tick(RENEW_US))[-1] == Wake(2 * RENEW_US)


# -- from its own disk ----------------------------------------------------------------------------


def test_the_peer_is_asked_a_few_times_before_the_own_disk_has_to_do() -> None:
    machine, at = copy(), 0
    for _ in range(REFUSALS - 1):
        assert round_(machine, TRIMMED, Unreachable("away"), at) == [Wake(at + RETRY_US)]
        at += RETRY_US
    assert round_(machine, TRIMMED, NotReady("starting"), at) == [ComeUp("own", "starting")]


def test_a_peer_that_waits_for_state_itself_is_not_waited_for() -> None:
    """Both were stopped, and both have their disks; or the other one lost its own."""
    for peer in (Waits(None), Waits(own=False), Waits(own=True)):
        (up,) = round_(copy(), TRIMMED, peer)
        assert isinstance(up, ComeUp) and up.source == "own"


def test_what_the_own_checkpoint_needs_must_still_be_kept() -> None:
    """It came back and found its inputs deleted, a hundred and sixteen times."""
    machine = copy()
    assert round_(machine, DEEPER, Waits(None)) == [Wake(RETRY_US)]
    assert machine.own_suffices is False


def test_an_empty_start_will_do_where_every_input_is_there_since_the_start() -> None:
    (up,) = round_(copy(NOTHING), ALL, BeganEmpty())
    assert isinstance(up, ComeUp) and up.source == "empty"


def test_a_peer_that_began_empty_is_no_reason_to_when_inputs_are_gone() -> None:
    assert round_(copy(NOTHING), TRIMMED, BeganEmpty()) == [Wake(RETRY_US)]


def test_a_peer_that_has_not_opened_its_inputs_yet_is_asked_again() -> None:
    """After a full restart the survivor has state, and says so only a little later."""
    machine = copy(NOTHING)
    assert round_(machine, TRIMMED, NotReady("not yet")) == [Wake(RETRY_US)]
    told = round_(machine, TRIMMED, HasState(30, (STATE,)), RETRY_US)
    assert told[0] == Fetch(2, "a@2", STATE)


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
def test_one_producer_that_keeps_enough_is_enough(
    first: HoldAnswer, second: HoldAnswer, suffices: bool | None
) -> None:
    machine = copy(producers=("m", "m@2"))
    machine.handle(Begin(0))
    machine.handle(HoldAnswered(0, 1, "s", "m", first))
    machine.handle(HoldAnswered(0, 1, "s", "m@2", second))
    assert machine.own_suffices is suffices
    assert machine.as_peer() == Waits(suffices)


def test_every_path_must_be_there() -> None:
    paths = {"out": OWN, "other": OwnPath(("s", "t"), (20, 25))}
    machine = CatchUp("a", ("a@2",), {"s": ("m",), "t": ("n",)}, paths)
    machine.handle(Begin(0))
    machine.handle(HoldAnswered(0, 1, "s", "m", TRIMMED))
    assert machine.own_suffices is None
    machine.handle(HoldAnswered(0, 1, "t", "n", Held(0, 25)))
    assert machine.own_suffices is False


# -- lost -----------------------------------------------------------------------------------------


def test_both_have_lost_it_and_know_it_at_once() -> None:
    (_, gone) = round_(copy(NOTHING), TRIMMED, Waits(own=False))
    assert isinstance(gone, GiveUp) and not gone.replaced
    assert "a@2 waits for state itself" in gone.why
    assert "its own disk has no checkpoint of 'out'" in gone.why
    assert "Bring back the storage of a@2" in gone.why


def test_it_says_what_its_own_checkpoint_lacks() -> None:
    (_, gone) = round_(copy(), Held(0, 40), Waits(own=False))
    assert isinstance(gone, GiveUp)
    assert "bucket 20 of 'out') needs 's' from bucket 18 on, which is kept from 41 on" in gone.why


def test_one_whose_peer_can_come_back_from_its_disk_waits_for_it() -> None:
    for peer in (Waits(own=True), Waits(own=None)):
        assert round_(copy(NOTHING), TRIMMED, peer) == [Wake(RETRY_US)]


def test_after_two_minutes_without_any_state_it_says_so() -> None:
    machine, at, told = copy(NOTHING), 0, [Wake(0)]
    while isinstance(told[-1], Wake):
        assert at <= LOST_US + RETRY_US
        at = told[-1].at
        told = round_(machine, TRIMMED, Unreachable("a@2: connection refused"), at)
    assert isinstance(told[-1], GiveUp)
    assert "a@2: connection refused for 12" in told[-1].why and at > LOST_US


# -- lending --------------------------------------------------------------------------------------


def test_what_is_lent_stays_while_somebody_asks_for_it() -> None:
    lending = Lending()
    assert lending.lend(0, "a") == LEASE_US
    assert lending.expired(LEASE_US - 1) == ([], LEASE_US)
    assert lending.renew(LEASE_US - 1, "a")
    assert lending.expired(LEASE_US) == ([], 2 * LEASE_US - 1)
    assert lending.expired(2 * LEASE_US - 1) == (["a"], None)
    assert not lending.renew(2 * LEASE_US, "a"), "it has to ask anew what there is"


def test_what_was_fetched_need_not_stay() -> None:
    lending = Lending()
    lending.lend(0, "a")
    lending.lend(5, "b")
    lending.end("a")
    assert lending.expired(LEASE_US) == ([], LEASE_US + 5)


# -- whatever happens -----------------------------------------------------------------------------

ANSWERS = st.sampled_from([ALL, TRIMMED, DEEPER, NotOpen(), Unreachable("away")])
PEERS = st.sampled_from(
    [HasState(30, (STATE, ROWS)), HasState(3, ()), Waits(None), Waits(own=True), Waits(own=False),
     BeganEmpty(), NotReady("not yet"), Unreachable("away")]
)  # fmt: skip
FAILURES = st.sampled_from(
    [None, None, Failure("away"), Failure("gone", gone=True), Failure("no space", full=True)]
)


@given(st.data(), st.sampled_from([OWN, NOTHING]))
def test_every_question_is_answered_and_it_never_gets_stuck(
    data: st.DataObject, own: OwnPath
) -> None:
    """Whatever is answered: it is over, or somebody is asked, or a time is named. And what it says
    in the end is true."""
    machine = copy(own)
    open_: list[Action] = []
    wakes: list[int] = []
    actions = machine.handle(Begin(0))
    at, holds, peer = 0, ALL, Unreachable("away")
    for _ in range(60):
        for action in actions:
            match action:
                case Wake():
                    wakes.append(action.at)
                case Hold() | AskState() | Fetch() | Install():
                    open_.append(action)
                case ComeUp():
                    if action.source != "peer":
                        assert machine.own_suffices
                    return
                case GiveUp():
                    assert machine.own_suffices is not True
                    return
        assert open_ or wakes, "nothing will ever happen again"
        if not open_ or (wakes and data.draw(st.booleans())):
            wakes.remove(due := min(wakes))
            at = max(at, due - data.draw(st.integers(0, 2)))  # timers may fire early
            actions = machine.handle(Tick(at))
            continue
        asked = open_.pop(data.draw(st.integers(0, len(open_) - 1)))
        match asked:
            case Hold():
                holds = data.draw(ANSWERS)
                event: Event = HoldAnswered(at, asked.round, "s", "m", holds)
            case AskState():
                peer = data.draw(PEERS)
                event = PeerAnswered(at, asked.round, peer)
            case Fetch():
                failure = data.draw(FAILURES)
                event = (
                    Fetched(at, asked.round, asked.piece)
                    if failure is None
                    else FetchFailed(at, asked.round, asked.piece, failure)
                )
            case Install():
                failure = data.draw(FAILURES)
                event = (
                    Installed(at, asked.round)
                    if failure is None
                    else InstallFailed(at, asked.round, failure)
                )
        actions = machine.handle(event)
