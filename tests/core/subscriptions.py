"""Transcripts of a subscription: the events of a consumer, and the replicas it then reads."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.subscription import (
    Action,
    Begin,
    Connect,
    Delivered,
    Disconnect,
    Event,
    Reported,
    Status,
    Subscription,
    Take,
    Taken,
    Unreachable,
)
from holdfast.types import OutputState

STABLE = OutputState.STABLE
UP_FAILURE = OutputState.UP_FAILURE
STABILIZATION = OutputState.STABILIZATION
REPLICAS = ("a", "b", "c")


class Consumer:
    """By default the consumer has everything up to bucket 9."""

    def __init__(
        self,
        at: int | None = 10,
        replicas: Sequence[str] = REPLICAS,
        local_replica: str | None = None,
        tolerance_buckets: int = 0,
        tentative: bool = True,
    ) -> None:
        self.machine = Subscription(
            tuple(replicas),
            at,
            tentative,
            local_replica=local_replica,
            tolerance_buckets=tolerance_buckets,
        )
        #: Open connections: the replica, and whether it is read only for corrections.
        self.open: dict[int, tuple[str, bool]] = {}
        self.handle(Begin(0))

    def handle(self, event: Event) -> list[Action]:
        actions = self.machine.handle(event)
        for action in actions:
            if isinstance(action, Connect):
                correcting = self.machine.tentative and action.tentative_after is None
                self.open[action.connection] = (action.replica, correcting)
            elif isinstance(action, Disconnect):
                del self.open[action.connection]
        return actions

    def says(self, event: Event) -> list[str]:
        """The replicas that the consumer starts to read, and those that it drops without a
        replacement."""
        before = dict(self.open)
        self.handle(event)
        roles = {False: "reads", True: "corrects from"}
        opened = [role for number, role in self.open.items() if number not in before]
        closed = [role for number, role in before.items() if number not in self.open]
        replaced = {correcting for _, correcting in opened}
        return sorted(
            [f"{roles[correcting]} {replica}" for replica, correcting in opened]
            + [f"drops {replica}" for replica, correcting in closed if correcting not in replaced]
        )

    def hears(
        self,
        replica: str,
        state: OutputState,
        upto: int = 9,
        tentative_upto: int | None = None,
        at: int = 0,
        ended: bool = False,
    ) -> list[str]:
        return self.says(Reported(at, replica, Status(state, upto, tentative_upto, ended)))

    def loses(self, replica: str, at: int = 0) -> list[str]:
        return self.says(Unreachable(at, replica))

    def gets(self, replica: str, state: OutputState, upto: int, at: int = 0) -> list[str]:
        """The replica delivers rows from the next bucket on, and the consumer takes them."""
        number = next(n for n, (name, _) in self.open.items() if name == replica)
        since = upto if self.machine.at is None else self.machine.at
        changes = self.says(Delivered(at, number, 1, since, upto, state))
        self.takes(upto)
        return changes

    def takes(self, upto: int, tentative_upto: int | None = None) -> None:
        self.handle(Taken(0, upto, tentative_upto))

    def taking(self, replica: str, state: OutputState) -> Take:
        """The part of a delivery of this replica that the consumer takes."""
        number = next(n for n, (name, _) in self.open.items() if name == replica)
        since = self.machine.at or 0
        actions = self.handle(Delivered(0, number, 1, since, since, state))
        (take,) = [action for action in actions if isinstance(action, Take)]
        return take

    def _reading(self, correcting: bool) -> str | None:
        return next((name for name, role in self.open.values() if role is correcting), None)

    @property
    def main(self) -> str | None:
        return self._reading(False)

    @property
    def correcting(self) -> str | None:
        return self._reading(True)
