"""Events of transport and disk while a replica is caught up, and their translation into events of
`core.catch_up`. Production and simulator share this translation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import assert_never

from holdfast.core import catch_up_events as core
from holdfast.errors import (
    HoldfastError,
    LogError,
    NotOffered,
    StaleEpoch,
    StateLost,
    StorageFull,
    TransportError,
)
from holdfast.frozen import dataclass
from holdfast.model.fragments import Path
from holdfast.node.state_transfer import Staging, check_offer
from holdfast.storage import Log
from holdfast.streams.calls import Holding, OfferedState


@dataclass(frozen=True, slots=True)
class Began:
    """The replica has started, and its storage is open."""


@dataclass(frozen=True, slots=True)
class HoldReplied:
    """The reply to `Hold`, or the error."""

    asked: core.Hold
    reply: Holding | HoldfastError


@dataclass(frozen=True, slots=True)
class StateReplied:
    asked: core.AskState
    reply: OfferedState | HoldfastError


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """The piece is on the disk of the replica and was verified; otherwise `error` is set."""

    asked: core.Fetch
    error: HoldfastError | None = None


@dataclass(frozen=True, slots=True)
class InstallEnded:
    asked: core.Install
    error: HoldfastError | None = None
    #: The old log is closed, but the new one has not replaced it: this instance cannot continue.
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Broke:
    """An unexpected error."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Rang:
    """The timer set for `Wake` has expired."""


RawEvent = Began | HoldReplied | StateReplied | FetchEnded | InstallEnded | Broke | Rang


@dataclass(frozen=True, slots=True)
class Translation:
    """Translates the events of the catch-up of one replica."""

    name: str
    paths: Sequence[Path]
    staging: Staging

    def event(self, raw: RawEvent, at: int) -> core.Event:
        """The event of `core.catch_up`. Raises errors that end this attempt to start."""
        match raw:
            case Began():
                return core.Begin(at)
            case HoldReplied(ask, reply):
                answer = _hold_answer(reply)
                return core.HoldAnswered(at, ask.round, ask.stream, ask.producer, answer)
            case StateReplied(ask, reply):
                return core.PeerAnswered(at, ask.round, self._peer_answer(ask.peer, reply))
            case FetchEnded(ask, err):
                if err is None:
                    return core.Fetched(at, ask.round, ask.piece)
                return core.FetchFailed(at, ask.round, ask.piece, _failure(err))
            case InstallEnded(ask, err):
                if err is None:
                    return core.Installed(at, ask.round)
                if raw.closed:
                    raise TransportError(
                        f"node {self.name!r} could not install the state of its peer, and starts "
                        f"again: {err}"
                    )
                return core.InstallFailed(at, ask.round, _failure(err))
            case Broke():
                raise raw.error
            case Rang():
                return core.Tick(at)
            case _:
                assert_never(raw)

    def _peer_answer(self, peer: str, reply: OfferedState | HoldfastError) -> core.PeerAnswer:
        if isinstance(reply, HoldfastError):
            return core.Unreachable(f"{peer}: {reply}")
        match reply.answer:
            case "waits":
                return core.Waits(reply.own)
            case "began-empty":
                return core.BeganEmpty()
            case "not-ready":
                return core.NotReady(reply.why)
        try:
            check_offer(reply, self.paths)
        except TransportError as err:
            return core.Unreachable(f"{peer}: {err}")
        bucket = max(moving.bucket for moving in reply.paths)
        return core.HasState(bucket, self.staging.expect(reply))


def _hold_answer(reply: Holding | HoldfastError) -> core.HoldAnswer:
    if isinstance(reply, StaleEpoch):
        return core.Replaced(str(reply))
    if isinstance(reply, HoldfastError):
        return core.Unreachable(str(reply))
    return core.Held(reply.starts_at, reply.trimmed_upto) if reply.open else core.NotOpen()


def _failure(err: HoldfastError) -> core.Failure:
    return core.Failure(
        str(err), gone=isinstance(err, NotOffered), full=isinstance(err, StorageFull)
    )


def install(
    action: core.Install, staging: Staging, open_log: Callable[[str], Log], own: Log, epoch: int
) -> InstallEnded:
    """Perform the action. After `own.close` this instance cannot return to the old storage; the
    next instance finds either the old or the new storage (`Staging.settle`)."""
    try:
        staging.install(open_log, epoch)
    except HoldfastError as err:
        return InstallEnded(action, err)
    with suppress(HoldfastError):
        own.close()
    try:
        staging.replace()
    except LogError as err:
        return InstallEnded(action, err, closed=True)
    return InstallEnded(action)


def reason_to_stop(action: core.GiveUp) -> HoldfastError:
    return (StaleEpoch if action.replaced else StateLost)(action.why)
