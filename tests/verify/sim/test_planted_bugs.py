"""Planted bugs: one of the checkers named with the bug reports it, in a run that the unchanged code
passes.

Nothing is searched or shrunk here: every bug has its scenario or seed. Long runs, most of them with
pairs, are left to `make soak`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verify.sim.mutations import MUTATIONS, Mutation
from tests.verify.sim.mutations.harmless import HARMLESS, Harmless
from tests.verify.sim.mutations.scenes import SCENES

ROOT = Path(__file__).parents[3]

QUICK = [mutation for mutation in MUTATIONS if not mutation.slow]
SLOW = [mutation for mutation in MUTATIONS if mutation.slow]


def once(mutations: list[Mutation]) -> list[Mutation]:
    """One mutation for each run."""
    return list({mutation.run_key: mutation for mutation in mutations}.values())


def is_caught(mutation: Mutation, patch: pytest.MonkeyPatch) -> None:
    mutation.plant(patch)
    failed = mutation.run(patch)
    assert failed & set(mutation.caught_by), f"reported only by {sorted(failed) or 'no checker'}"


@pytest.mark.parametrize("mutation", QUICK, ids=lambda mutation: mutation.name)
def test_a_planted_bug_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    is_caught(mutation, monkeypatch)


@pytest.mark.parametrize("mutation", once(QUICK), ids=lambda mutation: mutation.name)
def test_without_the_planted_bug_the_same_run_passes(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mutation.run(monkeypatch) == set()


@pytest.mark.soak
@pytest.mark.parametrize("mutation", SLOW, ids=lambda mutation: mutation.name)
def test_a_planted_bug_that_takes_long_is_caught(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_caught(mutation, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("mutation", once(SLOW), ids=lambda mutation: mutation.name)
def test_without_the_planted_bug_the_same_long_run_passes(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mutation.run(monkeypatch) == set()


def test_the_documents_state_the_number_of_planted_bugs() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
    by_seed = len([mutation for mutation in MUTATIONS if mutation.seed])
    shared = len([m for m in MUTATIONS if not m.seed and m.scene in SCENES.values()])
    own = len(names) - by_seed - shared
    assert f"{len(names)} deliberate bugs" in (ROOT / "README.md").read_text()
    report = (ROOT / "docs" / "proving-ground.md").read_text()
    assert (
        f"all {len(names)} in the list: {shared} by a shared scenario, {own} by a scenario of "
        f"their own, {by_seed} by a seed;"
    ) in report
    assert f"({len(QUICK)} of them)" in report


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(it, id=it.name, marks=[pytest.mark.soak] if it.is_long else [])
        for it in HARMLESS
    ],
)
def test_a_harmless_mistake_is_compensated_by_another_safeguard(
    mistake: Harmless, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake.plant(monkeypatch)
    assert mistake.seen_by(monkeypatch) == {}, mistake.why
