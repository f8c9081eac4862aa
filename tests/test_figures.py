"""`make figures` renders the tables of the documents from stored results, and notices changed
numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast.experiments import EXPERIMENTS, spread

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


figures = load()
#: An invented result, as `holdfast experiment serialization --json` writes it.
RESULT: dict[str, Any] = {
    "measured": {
        "command": "holdfast experiment serialization", "on": "2026-01-31", "minutes": 4.2,
        "cores": 2, "busy": 0.43,
    },
    "rows": [
        {"interval_ms": 100, "mean_ms": 98.76, "stddev_ms": 2.5, "paper_ms": 120,
         "paper_stddev_ms": 4, "bound_ms": 250},
    ],
}  # fmt: skip
DOCUMENT = """# Experiments
<!-- table: serialization -->
| old |
<!-- end of table -->
Text with 98.7 is not touched.
"""


def test_a_table_is_rendered_with_its_command_and_date() -> None:
    text = figures.render(DOCUMENT, {"serialization": RESULT})
    assert "| 100 | 98.8 | 2.5 | 120 | 4 | 250 |" in text
    assert "`holdfast experiment serialization`, measured on 2026-01-31 in 4 minutes; " in text
    assert "2 cores, 43% busy on average." in text and "| old |" not in text
    assert text.endswith("Text with 98.7 is not touched.\n")
    assert figures.render(text, {"serialization": RESULT}) == text


def test_a_changed_number_in_a_table_is_noticed() -> None:
    text = figures.render(DOCUMENT, {"serialization": RESULT})
    changed = text.replace("98.8", "89.8")
    assert changed != text and figures.render(changed, {"serialization": RESULT}) == text


@pytest.mark.parametrize("document", figures.DOCUMENTS, ids=lambda path: path.name)
def test_the_documents_equal_the_stored_results(document: Path) -> None:
    text = document.read_text()
    assert figures.render(text, figures.stored_results()) == text


def test_stored_results_are_full_runs() -> None:
    for name, result in figures.stored_results().items():
        assert name in EXPERIMENTS and result["experiment"] == name and result["quick"] is False


def test_a_spread_is_the_median_and_the_range() -> None:
    assert spread([3.0, 1_000.0, 2.0]) == "3 (2 to 1,000)"
    assert spread([0.5, 0.25], 3) == "0.375 (0.250 to 0.500)"
