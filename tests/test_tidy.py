"""Rules about the code: layers, purity, names, and text that must not be committed.

A rule takes one file and returns its violations. `ALLOWED` lists justified exceptions, `KNOWN`
violations that should be repaired, both with the reason. An entry that is no longer needed fails a
test, so that no entry outlives its cause.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[1]

_ROOM = re.compile(r"`([\w/]+?)/?`")


def rooms(text: str) -> list[tuple[str, ...]]:
    """The layers in ARCHITECTURE.md, from the bottom up: the modules and packages of each layer."""
    table = text.partition("## Layers")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [tuple(name.replace("/", ".") for name in _ROOM.findall(row)) for row in rows]


#: A module may import its own layer and the layers below.
LAYERS = rooms((ROOT / "ARCHITECTURE.md").read_text())
#: Simulator, chaos and audit share the histories, which therefore import no runtime code.
NARROW = {"verify.history": {"types", "model", "verify.history"}}

#: Libraries that a layer must not import.
FORBIDDEN = {
    "model": {"py4j", "pyspark", "time"},
    "core": {
        "asyncio", "os", "pathlib", "pyarrow", "pyspark", "random", "socket", "subprocess",
        "threading", "time",
    },
}  # fmt: skip

#: The only module that may sync. Other modules may rename files, except in `storage`.
DURABLE_IN = "src/holdfast/storage/disk.py"
SYNC, RENAME = {"fsync", "fdatasync"}, {"rename", "replace"}

LINES_MAX = 500

#: Modules that no module imports, and how they are run.
ENTRY_POINTS = {
    "holdfast.cli.main": "the command `holdfast`",
    "holdfast.cluster.host_main": "the supervisor, with python -m",
    "holdfast.examples.netmon": "holdfast run",
    "holdfast.examples.nexmark.queries": "holdfast run",
    **{
        f"holdfast.experiments.{name.replace('-', '_')}": "holdfast experiment, by its name"
        for name in EXPERIMENTS
    },
    "holdfast.experiments.holdfast_windows": "vs-peers, with python -m",
    "holdfast.experiments.peers.bytewax_peer": "vs-peers, by another interpreter",
    "holdfast.experiments.peers.flink_peer": "vs-peers, by another interpreter",
    "holdfast.experiments.peers.pathway_peer": "vs-peers, by another interpreter",
    "holdfast.experiments.versus.alternatives": "python -m, see docs/experiments.md",
    "holdfast.experiments.versus.live_holdfast": "vs_structured_streaming, with python -m",
    "holdfast.experiments.versus.live_spark": "vs_structured_streaming, with python -m",
}

#: Justified exceptions, with the reason.
ALLOWED = {
    "tests/processes/cluster_main.py: main sleeps": "polls threads and failures, with a limit",
    "tests/processes/test_cluster.py: logged sleeps": "polls a log, with a limit",
    "tests/processes/test_commands.py: test_run_status_tail_restart_and_audit sleeps": "polls "
    "another process, with a limit",
    "tests/cluster/test_supervisor.py: until sleeps": "polls another process, with a limit",
    "tests/processes/broken_run.py: until sleeps": "polls another process, with a limit",
    "tests/processes/test_kill.py: wait_for sleeps": "polls another process, with a limit",
    "tests/processes/test_kill.py: test_kills_lose_duplicate_or_change_no_rows sleeps": "kills "
    "at random moments: the time is the test",
    "tests/verify/chaos/test_judging.py: _until sleeps": "polls threads, with a limit",
    "tests/spark/test_running.py: wait_for sleeps": "polls a node's own threads, with a limit",
    "tests/storage/test_log_store.py: is too long": "one short scenario after another",
    "tests/core/test_correction_leases.py: is too long": "one short scenario after another",
}

#: Violations that should be repaired, with the reason why they remain.
KNOWN = {
    "src/holdfast/model/network.py: model imports pyspark": "inside the function that `map` hands "
    "to the engine; compiling `map` belongs to the engine",
}


@dataclass(frozen=True, slots=True)
class Module:
    path: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, path: str, text: str) -> Module:
        return cls(path, text, ast.parse(text))

    @property
    def name(self) -> str:
        """`holdfast.storage.store`; empty for a module outside `src`."""
        if not self.path.startswith("src/"):
            return ""
        dotted = self.path.removeprefix("src/").removesuffix(".py").replace("/", ".")
        return dotted.removesuffix(".__init__")

    @property
    def layer(self) -> str | None:
        return layer_of(self.name) if self.name else None

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and full name of every import in the module, also imports for type checking."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = self.name.split(".")[: -node.level] if node.level else []
                start = ".".join([*above, *([node.module] if node.module else [])])
                yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


@dataclass(frozen=True, slots=True)
class Problem:
    path: str
    line: int
    what: str

    @property
    def key(self) -> str:
        return f"{self.path}: {self.what}"


Rule = Callable[[Module], list[Problem]]


def layer_of(name: str) -> str | None:
    """The layer of a module of Holdfast, or of a name in a module. A layer is identified by its
    first room. None: the module is in no layer."""
    inside = name.removeprefix("holdfast").removeprefix(".") or "__init__"
    held = [(room, layer[0]) for layer in LAYERS for room in layer]
    held = [(room, first) for room, first in held if f"{inside}.".startswith(f"{room}.")]
    return max(held, key=lambda it: len(it[0]))[1] if held else None


# -- rules about one module -----------------------------------------------------------------------


def imports_go_down(module: Module) -> list[Problem]:
    if not module.name:
        return []
    layer, order = module.layer, [rooms[0] for rooms in LAYERS]
    if layer is None:
        return [Problem(module.path, 1, "is in no layer: give it a place in ARCHITECTURE.md")]
    may = NARROW.get(layer, set(order[: order.index(layer) + 1]))
    ours = [(line, name) for line, name in module.imports() if name.split(".")[0] == "holdfast"]
    return [
        Problem(module.path, line, f"{layer} imports {name} of {target}")
        for line, name in ours
        if (target := layer_of(name) or "__init__") not in may
    ]


def layers_stay_away(module: Module) -> list[Problem]:
    layer = module.layer or ""
    found = [
        Problem(module.path, line, f"{layer} imports {name.split('.')[0]}")
        for line, name in module.imports()
        if name.split(".")[0] in FORBIDDEN.get(layer, ())
    ]
    if layer == "core":
        calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
        opens = [call for call in calls if ast.unparse(call.func) == "open"]
        found += [Problem(module.path, call.lineno, "core opens a file") for call in opens]
    return found


def one_module_syncs(module: Module) -> list[Problem]:
    if not module.name or module.path == DURABLE_IN:
        return []
    unwanted = SYNC | RENAME if module.layer == "storage" else SYNC
    attributes = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    used = [(node.lineno, ast.unparse(node)) for node in attributes]
    return [
        Problem(module.path, line, f"uses {name}")
        for line, name in [*used, *module.imports()]
        if name in {f"os.{function}" for function in unwanted}
    ]


def nobody_sleeps(module: Module) -> list[Problem]:
    """Tests wait for events: a sleep is either too long or too short."""
    found: list[Problem] = []

    def walk(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep"):
            found.append(Problem(module.path, node.lineno, f"{function} sleeps"))
        for child in ast.iter_child_nodes(node):
            walk(child, function)

    if module.path.startswith("tests/"):
        walk(module.tree, "module")
    return found


def sets_are_sorted(module: Module) -> list[Problem]:
    """The order of a set of strings differs between processes, and would change the trace."""
    if not module.name.startswith(("holdfast.core", "holdfast.verify.sim")):
        return []
    loops = (ast.For, ast.AsyncFor, ast.comprehension)
    return [
        Problem(module.path, node.iter.lineno, f"iterates over {ast.unparse(node.iter)}")
        for node in ast.walk(module.tree)
        if isinstance(node, loops) and _is_set(node.iter)
    ]


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_set(node.left) or _is_set(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("list", "tuple", "enumerate", "iter", "reversed") and node.args:
            return _is_set(node.args[0])
        return node.func.id in ("set", "frozenset")
    return isinstance(node, ast.Set | ast.SetComp)


def one_module_knows_the_time(module: Module) -> list[Problem]:
    """Only `clock` reads the wall clock. Durations may be measured anywhere except in `core`."""
    if not module.name or module.name == "holdfast.clock":
        return []
    wanted = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today")
    return [
        Problem(module.path, node.lineno, f"calls {ast.unparse(node.func)}")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(wanted)
    ]


def names_say_something(module: Module) -> list[Problem]:
    empty = {"util", "utils", "helper", "helpers", "common", "manager", "managers"}
    parts = module.path.removesuffix(".py").split("/")
    return [Problem(module.path, 1, f"is named {part}") for part in parts if part in empty]


def modules_tell_their_purpose(module: Module) -> list[Problem]:
    new = ast.get_docstring(module.tree) or not module.text.strip()
    return [] if new else [Problem(module.path, 1, "has no docstring")]


def modules_hold_one_idea(module: Module) -> list[Problem]:
    long = module.text.count("\n") > LINES_MAX
    return [Problem(module.path, LINES_MAX + 1, "is too long")] if long else []


RULES: list[Rule] = [
    imports_go_down, layers_stay_away, one_module_syncs, one_module_knows_the_time,
    nobody_sleeps, sets_are_sorted,
    names_say_something, modules_tell_their_purpose, modules_hold_one_idea,
]  # fmt: skip


# -- rules about all modules ----------------------------------------------------------------------


def orphans(modules: Sequence[Module]) -> list[Problem]:
    """Modules that no other module imports and that are no entry point; tests do not count."""
    imported = {
        (name, module.name) for module in modules if module.name for _, name in module.imports()
    }
    used = {
        name
        for full, by in imported
        for name in (full, full.rpartition(".")[0])
        if name != by
    }  # fmt: skip
    return [
        Problem(module.path, 1, "is imported by nobody")
        for module in modules
        if module.name and not module.path.endswith("__init__.py")
        if module.name not in used and module.name not in ENTRY_POINTS
    ]


def names_used_twice(modules: Sequence[Module]) -> list[Problem]:
    """A file name in a message or a conversation identifies one file."""
    first: dict[str, str] = {}
    return [
        Problem(module.path, 1, f"has the name of {other}")
        for module in modules
        if module.name and not module.path.endswith("__init__.py")
        if (other := first.setdefault(module.path.rpartition("/")[2], module.path)) != module.path
    ]


PLACES = re.compile(r"(?<![\w.-])/(?:work|root|tmp|home)(?![\w-])")
REGISTRIES = re.compile(
    r"pypi\.org|pythonhosted\.org|anaconda\.org|artifactor[y]|ghcr\.io|docker\.io"
    r"|--(?:extra-)?index-url|--find-link[s]"
)


def places(path: str, text: str) -> list[Problem]:
    """Paths of a particular machine, and hosts that not everyone can reach."""
    return [
        Problem(path, number, f"names {found[0]}")
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in (PLACES, REGISTRIES)
        if (found := pattern.search(line))
    ]


#: Words that have been replaced by the terms of the glossary (ARCHITECTURE.md), also as parts of
#: identifiers. This file may contain them.
_RETIRED = (
    "anew", "guess", "guessed", "guesses", "happening", "hardships", "lacked", "lacks", "maker",
    "makers", "partner", "partners", "stand[-_ ]ins?", "told", "whoever",
)  # fmt: skip
RETIRED = re.compile(
    rf"(?<![A-Za-z])(?:{'|'.join(_RETIRED)})(?![a-z])"
    rf"|(?<![A-Z])(?:{'|'.join(word.capitalize() for word in _RETIRED)})(?![a-z])"
    r"|\bby lot\b|signs? of life|brought back|how it stands"
)
THIS_FILE = "tests/test_tidy.py"


def retired_words(path: str, text: str) -> list[Problem]:
    if path == THIS_FILE or not path.endswith((".py", ".md", ".toml", ".sh", "Makefile")):
        return []
    return [
        Problem(path, number, f"uses the retired word {word[0]!r}; see the glossary")
        for number, line in enumerate(text.splitlines(), 1)
        if (word := RETIRED.search(line))
    ]


# -- the source tree ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    paths = sorted(path for top in ("src", "tests") for path in (ROOT / top).rglob("*.py"))
    found = [Module.of(str(path.relative_to(ROOT)), path.read_text()) for path in paths]
    assert len(found) > 80
    return found


def judge(problems: Iterable[Problem]) -> None:
    new = [p for p in problems if p.key not in ALLOWED and p.key not in KNOWN]
    if new:
        pytest.fail("\n".join(f"{p.path}:{p.line}: {p.what}" for p in new), pytrace=False)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_complies_with_the_rule(rule: Rule, modules: list[Module]) -> None:
    judge(problem for module in modules for problem in rule(module))


def test_every_module_is_used(modules: list[Module]) -> None:
    judge(orphans(modules))


def test_every_module_name_is_unique(modules: list[Module]) -> None:
    judge(names_used_twice(modules))


@pytest.mark.parametrize("rule", [places, retired_words], ids=lambda rule: rule.__name__)
def test_every_committed_file_complies_with_the_rule(
    rule: Callable[[str, str], list[Problem]],
) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("which files are committed is known to git alone")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    problems: list[Problem] = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            problems += rule(name, (ROOT / name).read_text())
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # an image, or a deleted file that is still in the index
    judge(problems)


def test_exceptions_do_not_outlive_their_violation(modules: list[Module]) -> None:
    problems = [problem for module in modules for rule in RULES for problem in rule(module)]
    found = {problem.key for problem in [*problems, *orphans(modules)]}
    assert sorted({*ALLOWED, *KNOWN} - found) == []
    assert sorted(set(ENTRY_POINTS) - {module.name for module in modules}) == []


# -- every rule can fail --------------------------------------------------------------------------

CHECKED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
BAD = [
    (imports_go_down, "model/x.py", "from holdfast.core import progress", "of core"),
    (imports_go_down, "types.py", "import holdfast.storage.store", "of storage"),
    (imports_go_down, "engine/x.py", "from holdfast.transport.wire import f", "of transport"),
    (imports_go_down, "storage/x.py", "def f():\n    import holdfast", "of __init__"),
    (imports_go_down, "node/x.py", "from holdfast import Network", "of __init__"),
    (imports_go_down, "core/x.py", "from ..storage import store", "of storage"),
    (imports_go_down, "core/x.py", CHECKED + "from holdfast.node.node import Node", "of node"),
    (imports_go_down, "edge/x.py", "from holdfast.verify.sim import world", "of verify"),
    (imports_go_down, "verify/checkers/x.py", "from holdfast.edge.client import Client", "of edge"),
    (imports_go_down, "novel.py", "", "is in no layer"),
    (layers_stay_away, "model/x.py", "def f():\n    import pyspark.sql", "pyspark"),
    (layers_stay_away, "model/x.py", "from time import monotonic", "time"),
    (layers_stay_away, "core/x.py", "import os.path", "imports os"),
    (layers_stay_away, "core/x.py", "from random import Random", "random"),
    (layers_stay_away, "core/x.py", "text = open('x').read()", "opens a file"),
    (one_module_syncs, "storage/store.py", "import os\nos.replace('a', 'b')", "os.replace"),
    (one_module_syncs, "storage/store.py", "from os import fdatasync", "os.fdatasync"),
    (one_module_syncs, "node/x.py", "import os\nos.fsync(3)", "os.fsync"),
    (one_module_knows_the_time, "edge/x.py", "import time\nat = time.time_ns()", "time.time_ns"),
    (nobody_sleeps, "tests/x.py", "import time\ndef test_x():\n    time.sleep(1)", "test_x"),
    (nobody_sleeps, "tests/x.py", "from time import sleep\nsleep(1)", "module sleeps"),
    (sets_are_sorted, "core/x.py", "for x in {'a', 'b'}: pass", "{'a', 'b'}"),
    (sets_are_sorted, "verify/sim/x.py", "y = [x for x in set(names)]", "set(names)"),
    (sets_are_sorted, "verify/sim/x.py", "for x in list(set(a) - set(b)): pass", "set(a)"),
    (names_say_something, "storage/utils.py", "", "utils"),
    (names_say_something, "common/x.py", "", "common"),
    (modules_tell_their_purpose, "storage/x.py", "import os", "docstring"),
    (modules_hold_one_idea, "storage/x.py", "x = 1\n" * (LINES_MAX + 1), "too long"),
]
GOOD = [
    (imports_go_down, "node/x.py", "from holdfast.core import progress\nimport holdfast.storage"),
    (imports_go_down, "experiments/x.py", "import holdfast as hf"),
    (layers_stay_away, "storage/x.py", "import os, time"),
    (one_module_syncs, "storage/disk.py", "import os\nos.fsync(3)"),
    (one_module_syncs, "runtime/x.py", "import os\nos.replace('a', 'b')"),
    (nobody_sleeps, "tests/x.py", "import threading\nthreading.Event().wait(1)"),
    (sets_are_sorted, "core/x.py", "for x in sorted({'a', 'b'}): pass"),
    (sets_are_sorted, "storage/x.py", "for x in {'a', 'b'}: pass"),
    (names_say_something, "storage/commonplace.py", ""),
    (modules_tell_their_purpose, "storage/__init__.py", ""),
    (modules_hold_one_idea, "storage/x.py", "x = 1\n" * LINES_MAX),
]


def snippet(path: str, text: str) -> Module:
    return Module.of(path if path.startswith("tests/") else f"src/holdfast/{path}", text)


@pytest.mark.parametrize(("rule", "path", "text", "says"), BAD)
def test_every_rule_can_fail(rule: Rule, path: str, text: str, says: str) -> None:
    (problem,) = rule(snippet(path, text))
    assert says in problem.what


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_no_rule_rejects_valid_code(rule: Rule, path: str, text: str) -> None:
    assert rule(snippet(path, text)) == []


def test_an_orphaned_module_is_found() -> None:
    tree = {
        "cli/main.py": "from holdfast.storage import store",
        "storage/store.py": "from holdfast.storage.files import f",
        "storage/files.py": "",
        "storage/forgotten.py": "from holdfast.storage import forgotten, store",
        "tests/x.py": "from holdfast.storage import forgotten",
    }
    found = orphans([snippet(path, text) for path, text in tree.items()])
    assert [problem.path for problem in found] == ["src/holdfast/storage/forgotten.py"]


def test_a_duplicate_module_name_is_found() -> None:
    tree = [snippet(path, "") for path in ("model/x.py", "core/x.py", "core/__init__.py")]
    assert [problem.path for problem in names_used_twice(tree)] == ["src/holdfast/core/x.py"]


@pytest.mark.parametrize("place", ["work/main", "root", "tmp/x", "home/me"])
def test_a_machine_specific_path_is_found(place: str) -> None:
    assert len(places("x.md", f"see /{place} for more")) == 1
    assert places("x.md", f"see docs/{place} or https://example.org/{place}") == []


@pytest.mark.parametrize("host", ["https://pypi" + ".org/simple", "--index" + "-url x"])
def test_a_package_registry_is_found(host: str) -> None:
    assert len(places("requirements.lock", host)) == 1
    assert places("Makefile", "--no-emit-index-url") == []


@pytest.mark.parametrize(
    "text",
    ["def _told(self)", "class DigestsTold:", "a partner of s", "faults by lot", "stand_ins("],
)
def test_a_retired_word_is_found(text: str) -> None:
    assert len(retired_words("docs/x.md", text)) == 1
    assert retired_words("docs/x.md", "a threshold, a standing order, an untold story") == []
