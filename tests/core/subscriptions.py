"""Words for transcripts of a subscription: what a consumer hears, and whom it reads then."""

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
    """Has everything up to bucket 9, unless something else is said."""

    def __init__(
        self,
        at: int | None = 10,
        replicas: Sequence[str] = REPLICAS,
        home: str | None = None,
        tolerance_buckets: int = 0,
        tentative: bool = True,
    ) -> None:
        self.machine = Subscription(
            tuple(replicas), at, tentative, home=home, tolerance_buckets=tolerance_buckets
        )
        #: Connections that are open: whom they read, and whether only for corrections.
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
        """Whom it begins to read, and what it stops without reading another."""
        before = dict(self.open)
        self.handle(event)
        roles = {False: "reads", True: "corrects from"}
        new = [who for number, who in self.open.items() if number not in before]
        gone = [who for number, who in before.items() if number not in self.open]
        replaced = {correcting for _, correcting in new}
        return sorted(
            [f"{roles[correcting]} {replica}" for replica, correcting in new]
            + [f"drops {replica}" for replica, correcting in gone if correcting not in replaced]
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
        """Rows of the next bucket on, which it takes."""
        number = next(n for n, (name, _) in self.open.items() if name == replica)
        since = upto if self.machine.at is None else self.machine.at
        said = self.says(Delivered(at, number, 1, since, upto, state))
        self.takes(upto)
        return said

    def takes(self, upto: int, tentative_upto: int | None = None) -> None:
        self.handle(Taken(0, upto, tentative_upto))

    def taking(self, replica: str, state: OutputState) -> Take:
        """What of a delivery of this replica is taken."""
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
