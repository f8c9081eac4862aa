"""What the controller replied to the heartbeat of a host, as `core.hosts` hears of it: the one
translation, for hosts with threads and in virtual time."""

from __future__ import annotations

from holdfast.core.hosts import Answered, Event, Replaced, Unanswered
from holdfast.errors import HoldfastError
from holdfast.streams.calls import Registration


def heartbeat_event(reply: Registration | HoldfastError, at: int) -> Event:
    """A controller that replies with an error, such as of its disk, is away like one that does not
    reply: a host waits for it, and ends as an orphan if that lasts."""
    if isinstance(reply, HoldfastError):
        return Unanswered(at)
    if not reply.current:
        return Replaced(at)
    return Answered(at, tuple(reply.assigned), tuple(reply.refused))
