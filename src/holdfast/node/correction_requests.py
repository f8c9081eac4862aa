"""Requests and replies between replicas during a correction, on the wire and as events and actions
of `core.correction_leases`. Production and simulator share this one translation."""

from __future__ import annotations

from holdfast.core import progress_events as core
from holdfast.errors import HoldfastError
from holdfast.node.node_events import Replied
from holdfast.streams.calls import Postpone, Postponement


def question(ask: core.Ask, me: str) -> Postpone:
    return Postpone(ask.path, me, ask.correction, ask.position, ask.started, ask.done)


def asked(asks: Postpone, at: int, ticket: int) -> core.Asked:
    return core.Asked(
        at, ticket, asks.path, asks.peer, asks.correction, asks.position, asks.started, asks.done
    )


def reply(told: core.Reply) -> Postponement:
    return Postponement(told.answer, told.reached)


def answered(replied: Replied, at: int) -> core.Answered | None:
    """A peer that does not reply, for whatever reason, is away; one that was told of the end of a
    correction is asked nothing."""
    asks, told = replied.asked, replied.reply
    if asks.done:
        return None
    if isinstance(told, HoldfastError):
        told = Postponement("away")
    return core.Answered(at, asks.path, replied.peer, asks.correction, told.answer, told.reached)
