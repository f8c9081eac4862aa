"""Runner of one scenario on a deployment.

The runner pushes rows, injects and repairs the faults, waits until the clients have caught up, and
returns the history of the scenario.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

from holdfast.clock import now_us
from holdfast.config import duration_us
from holdfast.errors import InputError
from holdfast.model.operators import sources_of
from holdfast.verify.chaos.deployment import Deployment
from holdfast.verify.chaos.process_faults import apply, check
from holdfast.verify.history import (
    Accepted,
    Began,
    Broke,
    Closed,
    Event,
    Finished,
    Given,
    Healed,
    Hinted,
    History,
    Ideal,
    Logged,
    Made,
    Progressed,
    Promised,
)
from holdfast.verify.scenario import Fault, Scenario

#: Bounds of the checkers, chosen for a machine with two cores and one JVM per node.
DELAY_US = 5_000_000
RECOVERY_US = 40_000_000
HELD_BUCKETS = 400
#: Wait beyond `RECOVERY_US`, so that a late result is recorded as late instead of missing.
PATIENCE_S = 5.0


def run_scenario(
    scenario: Scenario, to: Deployment, say: Callable[[str], None] = lambda text: None
) -> History:
    network = to.network
    if scenario.network != network.name:
        raise InputError(
            f"scenario {scenario.name!r} is for network {scenario.network!r}, but the deployment "
            f"runs {network.name!r}"
        )
    check(scenario, network)
    first = to.begin(scenario.seed)
    began_us = first * network.width_us
    healed_us = _break(scenario, to, began_us, say)
    _sleep_until(began_us + int(scenario.seconds * 1e6))
    upto = to.pusher.rest()
    say(f"waiting until all clients have received bucket {upto}")
    limit_s = max(0.0, (healed_us + RECOVERY_US - now_us()) / 1e6) + PATIENCE_S
    settled = to.settle(upto, limit_s)
    ended_us = now_us()
    say(
        "clients have caught up; computing the ideal"
        if settled
        else "clients have not caught up in time; computing the ideal"
    )
    events: list[Event] = [
        Began(
            began_us,
            network.name,
            network.width_us,
            DELAY_US,
            RECOVERY_US,
            HELD_BUCKETS,
            announces=True,
        ),
        *_promises(to, began_us),
        *to.recorder.take(),
        *to.watcher.made(),
        *to.aftermath.logged(ended_us, first, upto),
        *to.aftermath.ideal(first, upto),
    ]
    events = [event for event in events if _belongs(event, first, upto)]
    events.sort(key=lambda event: event.at)
    return History([*events, Finished(max(ended_us, events[-1].at), settled)])


def _promises(to: Deployment, at: int) -> list[Promised]:
    promises = []
    for client in to.clients:
        op = next(op for op in to.network.outputs if op.name == client.output)
        contract = op.contract
        within = None if contract.within is None else duration_us(contract.within)
        promises.append(
            Promised(at, client.name, op.name, tuple(s.name for s in sources_of(op)), within,
                     contract.loss, contract.error, contract.order)
        )  # fmt: skip
    return promises


def _break(scenario: Scenario, to: Deployment, began_us: int, say: Callable[[str], None]) -> int:
    """Inject and repair every fault at its time. Returns the time of the last repair."""
    due: list[tuple[int, int, Fault, Callable[[], None] | None]] = [
        (began_us + fault.at_us, number, fault, None)
        for number, fault in enumerate(scenario.faults)
    ]
    heapq.heapify(due)
    repaired_us = began_us
    while due:
        at, number, fault, repair = heapq.heappop(due)
        _sleep_until(at)
        if repair is None:
            to.recorder.add(Broke(now_us(), fault.do, fault.on))
            heapq.heappush(due, (at + fault.for_us, number, fault, apply(fault, to)))
            say(str(fault))
        else:
            repair()
            repaired_us = now_us()
            to.recorder.add(Healed(repaired_us, fault.do, fault.on))
            if fault.for_us:
                say(f"{fault.do} {fault.on} is over")
    return repaired_us


def _belongs(event: Event, first: int, upto: int) -> bool:
    """Whether the event concerns a bucket of this scenario; other events are dropped."""
    match event:
        case Given() | Made() | Logged() | Ideal():
            return first <= event.bucket <= upto
        case Progressed() | Closed() | Hinted():
            return event.upto >= first
        case Accepted():
            return bool(event.rows)
    return True


def _sleep_until(at_us: int) -> None:
    time.sleep(max(0.0, (at_us - now_us()) / 1e6))
