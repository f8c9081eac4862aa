"""Translation between the calls of replicas during a correction and the events and actions of
`core.progress`. Production and simulator share this translation."""

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


def reply(answer: core.Reply) -> Postponement:
    return Postponement(answer.answer, answer.reached)


def answered(replied: Replied, at: int) -> core.Answered | None:
    """The event for a reply. A peer that does not reply is `away`. None: the request only announced
    the end of a correction, so its reply carries no answer."""
    request, response = replied.asked, replied.reply
    if request.done:
        return None
    if isinstance(response, HoldfastError):
        response = Postponement("away")
    return core.Answered(
        at, request.path, replied.peer, request.correction, response.answer, response.reached
    )
