"""No protocol decision outside `core/`. Drivers carry out the actions of `core`, with threads or in
virtual time. Drivers import machines, events, actions and types from `core`, but no policy. The
rules have the form of those in `test_tidy`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import ModuleType
from typing import get_args

import pytest

from holdfast.core import catch_up_events, subscription
from tests.test_tidy import ROOT, Module, Problem, Rule, judge, snippet


def events_of(machine: ModuleType) -> set[str]:
    room = machine.__name__.rpartition(".")[2]
    return {f"{room}.{event.__name__}" for event in get_args(machine.Event)}


#: Rooms that carry out the decisions of `core`. They may not import its policy, that is constants
#: and functions; machines, events, actions and types remain.
DRIVERS = (
    "storage", "engine", "streams", "transport", "node", "edge", "cluster", "runtime", "verify.sim",
)  # fmt: skip
#: Modules in the rooms of drivers that are no drivers: they check a run against the bounds.
JUDGES = {f"holdfast.verify.sim.{name}" for name in (
    "condition", "inspection", "observer", "oracle", "pair_observer", "placement_observer",
)}  # fmt: skip
#: Names that are no policy, with the reason. None of them may occur in a comparison.
NOT_POLICY = {
    "connection.check_source": "asks core for the decision",
    "connection.first_bucket": "asks core for the decision",
    "divergence.COMPARE_US": "a period: how long a loop waits",
    "divergence.extended": "the shape of an answer",
    "hosts.HEARTBEAT_US": "a period: how long a loop waits",
    "hosts.may_try_again": "asks core for the decision",
    "membership.host_of": "names",
    "membership.process_of": "names",
    "policy.policy_of": "what the network says, as a value",
    "quarantine.EXIT_CODES": "the language between a host and its supervisor",
    "quarantine.damaged_to_delete": "asks core for the decision",
    "quarantine.kind_of": "asks core which table row an error belongs to",
    "quarantine.kind_of_exit": "asks core which table row an exit code belongs to",
    "quarantine.reason_of": "text for people",
    "quarantine.stopped": "asks core for the decision",
    "replica_selector.NOTHING": "before every bucket: a word, no threshold",
    "retention.position_of_gone": "asks core for the decision",
    "source_clock.course_of": "asks core for the decision",
}
#: The only modules that create the events of machines with two drivers, so that threads and virtual
#: time cannot differ in these events. `test_two_*drivers` compare both drivers.
TRANSLATIONS = {
    "holdfast.streams.subscription_events": events_of(subscription),
    "holdfast.node.transfer_events": events_of(catch_up_events),
    "holdfast.node.correction_requests": {"progress_events.Asked", "progress_events.Answered"},
}
#: States that only `core` may base decisions on.
STATES = ("OutputState", "PathState", "Phase")


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    paths = sorted((ROOT / "src").rglob("*.py"))
    return [Module.of(str(path.relative_to(ROOT)), path.read_text()) for path in paths]


def is_driver(module: Module) -> bool:
    rooms = tuple(f"holdfast.{room}." for room in DRIVERS)
    return module.name.startswith(rooms) and module.name not in JUDGES


def from_core(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Imports of names of `core`, and their uses through a module: `hosts.ORPHANED_US`."""
    modules: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "holdfast.core":
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast.core."):
            yield from ((node, f"{str(node.module)[14:]}.{alias.name}") for alias in node.names)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
            yield node, f"{modules[ast.unparse(node.value)]}.{node.attr}"


def drivers_import_no_policy(module: Module) -> list[Problem]:
    """Constants are in capitals and functions begin with a lower-case letter, unlike classes."""
    if not is_driver(module):
        return []
    return [
        Problem(module.path, getattr(node, "lineno", 1), f"takes the policy {name} from core")
        for node, name in from_core(module)
        if (last := name.rpartition(".")[2]) and (last.isupper() or last[0].islower())
        if name not in NOT_POLICY
    ]


def drivers_decide_nothing(module: Module) -> list[Problem]:
    """No comparison contains a state of a protocol or a number of `core`, judged by the syntax."""
    if not is_driver(module):
        return []
    values = {name.rpartition(".")[2] for _, name in from_core(module)} & {
        name.rpartition(".")[2] for name in NOT_POLICY if name.rpartition(".")[2].isupper()
    }
    problems: list[Problem] = []
    for node in ast.walk(module.tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node]
        elif isinstance(node, ast.match_case):
            parts = [node.pattern]
        for part in (inner for outer in parts for inner in ast.walk(outer)):
            state = isinstance(part, ast.Attribute) and ast.unparse(part.value) in STATES
            name = getattr(part, "attr", None) or getattr(part, "id", None)
            if state or name in values:
                line = getattr(part, "lineno", 1)
                problems.append(Problem(module.path, line, f"decides by {ast.unparse(part)}"))
    return problems


def drivers_share_their_translation(module: Module) -> list[Problem]:
    if not is_driver(module):
        return []
    return [
        Problem(module.path, getattr(node, "lineno", 1), f"has {name}, which {place} makes")
        for place, events in TRANSLATIONS.items()
        for node, name in from_core(module)
        if name in events and module.name != place
    ]


RULES = [drivers_import_no_policy, drivers_decide_nothing, drivers_share_their_translation]


@pytest.mark.parametrize("rule", RULES)
def test_no_driver_makes_protocol_decisions(rule: Rule, modules: list[Module]) -> None:
    judge(problem for module in modules for problem in rule(module))


def test_exceptions_do_not_outlive_their_use(modules: list[Module]) -> None:
    assert sorted(JUDGES - {module.name for module in modules}) == []
    drivers = [module for module in modules if is_driver(module)]
    assert len(drivers) > 60
    imported = {name for module in drivers for _, name in from_core(module)}
    for place, events in TRANSLATIONS.items():
        created = {n for m in drivers if m.name == place for _, n in from_core(m)}
        assert sorted(events - created) == []
    assert sorted(set(NOT_POLICY) - imported) == []


BAD = [
    (
        drivers_import_no_policy,
        "node/x.py",
        "from holdfast.core.correction_leases import STALLED_US",
        "correction_leases.STALLED_US",
    ),
    (
        drivers_import_no_policy,
        "cluster/x.py",
        "from holdfast.core import hosts as h\nx = h.ORPHANED_US",
        "hosts.ORPHANED_US",
    ),
    (
        drivers_import_no_policy,
        "verify/sim/x.py",
        "from holdfast.core.membership import dead_of",
        "membership.dead_of",
    ),
    (
        drivers_decide_nothing,
        "node/x.py",
        "x = state is not OutputState.STABLE",
        "OutputState.STABLE",
    ),
    (
        drivers_decide_nothing,
        "streams/x.py",
        "match state:\n    case OutputState.UP_FAILURE:\n        pass",
        "OutputState.UP_FAILURE",
    ),
    (
        drivers_decide_nothing,
        "verify/sim/x.py",
        "from holdfast.core.hosts import HEARTBEAT_US\nx = now - then > HEARTBEAT_US",
        "HEARTBEAT_US",
    ),
    (
        drivers_share_their_translation,
        "cluster/x.py",
        "from holdfast.core import catch_up_events as core\nx = core.FetchFailed(1)",
        "catch_up_events.FetchFailed",
    ),
    (
        drivers_share_their_translation,
        "verify/sim/x.py",
        "from holdfast.core.progress_events import Answered",
        "progress_events.Answered",
    ),
]
GOOD = [
    (
        drivers_import_no_policy,
        "node/x.py",
        "from holdfast.core import progress_events as core\n"
        "from holdfast.core.hosts import HEARTBEAT_US, Host\nx = core.Tick(1)",
    ),
    (
        drivers_import_no_policy,
        "verify/sim/oracle.py",
        "from holdfast.core.replica_selector import LAG_BUCKETS",
    ),
    (
        drivers_decide_nothing,
        "node/x.py",
        "from holdfast.core.hosts import HEARTBEAT_US\nwait(HEARTBEAT_US / 1e6)\n"
        "states['x'] = OutputState.STABLE",
    ),
    (
        drivers_share_their_translation,
        "cluster/x.py",
        "from holdfast.core import catch_up_events as core\nx: core.Event\ny = core.Hold(1)",
    ),
]


@pytest.mark.parametrize(("rule", "path", "text", "says"), BAD)
def test_every_rule_can_fail(rule: Rule, path: str, text: str, says: str) -> None:
    assert any(says in problem.what for problem in rule(snippet(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_no_rule_rejects_valid_code(rule: Rule, path: str, text: str) -> None:
    assert rule(snippet(path, text)) == []
