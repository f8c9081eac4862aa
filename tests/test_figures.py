"""`make figures` renders the tables of the documents from stored results, and notices changed
numbers."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast.config import Options
from holdfast.core.watchdog import KILL_US
from holdfast.examples.nexmark.queries import QUERIES
from holdfast.experiments import EXPERIMENTS, spread
from holdfast.model.network import Network
from holdfast.verify.chaos import find
from holdfast.verify.sim.simulation import simulate
from tests.verify.sim.mutations import MUTATIONS

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


#: Stored from `--quick`, which has all repeats; a full run only has more and longer steps.
QUICK = {"vs-structured-streaming", "vs-peers", "growth"}


def test_stored_results_are_full_runs_or_say_that_they_are_quick() -> None:
    for name, result in figures.stored_results().items():
        assert name in EXPERIMENTS and result["experiment"] == name
        assert result["quick"] is False or name in QUICK
        assert result["quick"] == ("--quick" in result["measured"]["command"])


def test_a_spread_is_the_median_and_the_range() -> None:
    assert spread([3.0, 1_000.0, 2.0]) == "3 (2 to 1,000)"
    assert spread([0.5, 0.25], 3) == "0.375 (0.250 to 0.500)"


def texts_with_numbers() -> list[str]:
    """Every text of the README that contains a number outside code and rendered tables, with the
    number as code or configuration gives it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    java = re.search(r"^readonly MINIMUM=(\d+)$", (ROOT / "scripts/java.sh").read_text(), re.M)
    assert java is not None
    transcript = simulate(find("tentative")).world.transcript()
    healed = transcript.partition("HEALED")[2]
    first = re.search(r"([\d.]+)  main  +ran windows (\d+)\.\.", healed)
    last = re.findall(r"main  +ran windows \d+\.\.(\d+)", healed.partition("REC_DONE")[0])
    done = re.search(r"client-windows REC_DONE (\d+)", healed)
    assert first is not None and done is not None
    numbers = [str(query) for query in QUERIES]
    return [
        f"Java {java[1]}",
        f"Python {project['requires-python'].removeprefix('>=')} or newer",
        f"fixed slices of {Network('n').width_us // 1_000} ms by default",
        f"From {float(first[1]):.1f} s on, `main` corrects buckets {first[2]} to {last[-1]}",
        f"bucket {done[1]} is still TENTATIVE",
        f"`REC_DONE {done[1]}` means that all buckets up to {done[1]} are now stable",
        f"after `silence` ({Options().silence.replace('s', ' s')})",
        f"after {KILL_US // 1_000_000} s without a heartbeat the process is killed",
        f"{len(MUTATIONS)} deliberate bugs",
        f"Nexmark queries {', '.join(numbers[:-1])} and {numbers[-1]} are",
        f"{project['license']}.",
    ]


def unexplained(readme: str) -> str:
    """The README without code, links, rendered tables and the texts above."""
    for pattern in (r"```.*?```", r"\]\([^)]*\)", figures.BLOCK.pattern):
        readme = re.sub(pattern, "", readme, flags=re.DOTALL)
    for text in texts_with_numbers():
        assert text in readme, text
        readme = readme.replace(text, "")
    return re.sub(r"`[^`]*`", "", readme)


def test_every_number_in_the_readme_comes_from_code_or_a_stored_result() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r".*\d.*", unexplained(readme)) == []
    with pytest.raises(AssertionError, match="30 s without"):
        unexplained(readme.replace("30 s without", "31 s without"))
    assert re.findall(r".*\d.*", unexplained(f"{readme} It takes 4 ms.")) == [" It takes 4 ms."]


def test_every_table_has_a_stored_result() -> None:
    names = {
        name for path in figures.DOCUMENTS for _, name, _ in figures.BLOCK.findall(path.read_text())
    }
    assert names == {*EXPERIMENTS, "costs"}
    assert figures.stored_results().keys() == EXPERIMENTS.keys()
