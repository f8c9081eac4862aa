"""Translates the controller's reply to a host heartbeat into an event of `core.hosts`.

Production hosts and simulated hosts share this translation."""

from __future__ import annotations

from holdfast.core.hosts import Answered, Event, Replaced, Unanswered
from holdfast.errors import HoldfastError
from holdfast.streams.calls import Registration


def heartbeat_event(reply: Registration | HoldfastError, at: int) -> Event:
    """An error reply counts like no reply: the host waits for the controller, and terminates as an
    orphan if no valid reply arrives in time."""
    if isinstance(reply, HoldfastError):
        return Unanswered(at)
    if not reply.current:
        return Replaced(at)
    return Answered(at, tuple(reply.assigned), tuple(reply.refused))
