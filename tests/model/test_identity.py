"""The parts of a run's identity: query, functions, libraries and protection. No JVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import SetupError
from holdfast.model.identity import Identity, differences, identity_of, query_differences
from holdfast.model.loading import load
from holdfast.model.partitions import physical

QUERY = """
net = hf.Network("net")
tap = net.source("tap", "ts timestamp, n long", time="ts")
net.output("out", tap.apply(fn))
"""

FUNCTION = """
import functools
import re
import holdfast as hf
from dataclasses import dataclass
from enum import Enum

LIMIT = 5
NAMES = {"a", "b", "c", "d", "e", "f"}
WORD = re.compile(r"\\w+")

class Color(Enum):
    RED = 1

@dataclass
class Rule:
    limit: int = 3
    def keeps(self, n):
        return n > self.limit

RULE = Rule(7)

def helper(df, limit=2):
    return df.filter(f"n > {limit}")

@functools.lru_cache
def cached(n):
    return n + 1

def recurse(n):
    return 0 if n <= 0 else other(n - 1)

def other(n):
    return recurse(n - 2)

def fn(df, *, more=10):
    '''A docstring.'''
    kept = helper(df).filter(f"n < {LIMIT}")  # a comment
    if cached(1) and NAMES and WORD.match("x") and Color.RED and RULE.keeps(1) or recurse(3):
        kept = kept.filter("n in (1, 2)")
    return kept
"""


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Write an application with the given code, and load it like `holdfast run`."""
    number = 0

    def make(code: str, *, name: str | None = None) -> Identity:
        nonlocal number
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        file = folder / (name or f"app{number}.py")
        file.write_text(textwrap.dedent(code) + QUERY)
        return identity_of(load(str(file)))

    return make


def test_the_identity_does_not_depend_on_the_file_name(made: Any) -> None:
    assert made(FUNCTION) == made(FUNCTION, name="moved.py")


COSMETIC = {
    "comment": ("  # a comment", ""),
    "docstring": ("'''A docstring.'''", "'''Another one.'''"),
    "no docstring": ("'''A docstring.'''", ""),
    "line": ("LIMIT = 5", "\n\n\nLIMIT = 5"),
    "quotes": ('"n in (1, 2)"', "'n in (1, 2)'"),
    "break": ("and RULE.keeps(1) or recurse(3)", "and (\n\n RULE.keeps(1)) or \\\n recurse(\n3)"),
    "order": ("LIMIT = 5", "LIMIT = 4 + 1"),
    "unused": ("LIMIT = 5", "LIMIT = 5\nUNUSED = 6\ndef unused(): pass"),
    "set": ('{"a", "b", "c", "d", "e", "f"}', '{"f", "e", "d", "c", "b", "a"}'),
}


@pytest.mark.parametrize("change", COSMETIC)
def test_cosmetic_changes_keep_the_identity(change: str, made: Any) -> None:
    old, new = COSMETIC[change]
    assert old in FUNCTION
    assert query_differences(made(FUNCTION), made(FUNCTION.replace(old, new))) == []


CODE = {
    "body": ("n in (1, 2)", "n in (1, 3)", "the code of fn changed"),
    "global": ("LIMIT = 5", "LIMIT = 6", "function's LIMIT 5 -> 6"),
    "helper": ("n > {limit}", "n >= {limit}", "the code of helper changed"),
    "default": ("more=10", "more=11", "function's default of more 10 -> 11"),
    "default of a helper": ("limit=2", "limit=1", "the code of helper changed"),
    "set": ('"f"}', '"g"}', "function's NAMES builtins.set('a', 'b', 'c', 'd', 'e', 'f') -> "),
    "pattern": ("w+", "d+", "function's WORD re.Pattern"),
    "enum": ("RED = 1", "RED = 2", "the code of Color changed"),
    "method": ("n > self.limit", "n < self.limit", "function's RULE Rule #"),
    "attribute": ("Rule(7)", "Rule(8)", "function's RULE Rule #"),
    "behind a cache": ("n + 1", "n + 2", "function's cached functools._lru_cache_wrapper(cached #"),
    "mutual recursion": ("recurse(n - 2)", "recurse(n - 1)", "the code of recurse changed"),
}


@pytest.mark.parametrize("change", CODE)
def test_the_identity_covers_everything_a_function_refers_to(change: str, made: Any) -> None:
    """B6: function bodies, and everything that they use."""
    old, new, expected = CODE[change]
    assert old in FUNCTION
    changes = query_differences(made(FUNCTION), made(FUNCTION.replace(old, new)))
    assert f"apply-1: {expected}" in changes[-1], changes


def test_the_identity_covers_functions_of_application_modules(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "rules_of_test_identity.py"

    def identity_with(body: str, use: str) -> Identity:
        module.write_text(f"def keep(df):\n    {body}\n\ndef drop(df):\n    return df\n")
        sys.modules.pop(module.stem, None)
        identity: Identity = made(f"import holdfast as hf\n{use}\n")
        return identity

    for use, name in (
        (f"import {module.stem} as m\ndef fn(df): return m.keep(df)", "m.keep"),
        (f"from {module.stem} import keep\ndef fn(df): return keep(df)", "keep"),
        (f"def fn(df):\n from {module.stem} import keep\n return keep(df)", "keep"),
        (f"def fn(df):\n import {module.stem} as m\n return m.keep(df)", module.stem),
    ):
        before = identity_with("return df.distinct()", use)
        assert identity_with("return  df.distinct() # the same", use) == before
        (change,) = query_differences(before, identity_with("return df.limit(1)", use))
        assert change.startswith("apply-1: the code of ") and name in change


PRINT = """
import json, sys
sys.path.insert(0, sys.argv[2])
from holdfast.model.identity import identity_of
from holdfast.model.loading import load
print(json.dumps(identity_of(load(sys.argv[1])).body()))
"""


PRINTS_ITSELF = """
if __name__ == "__main__":
    import json
    from holdfast.model.identity import identity_of
    print(json.dumps(identity_of(net).body()))
"""


def test_every_process_computes_the_same_identity(tmp_path: Path) -> None:
    """For any hash seed, and for code that is compiled now or cached."""
    (tmp_path / "lib_of_test_identity.py").write_text(FUNCTION)
    app = tmp_path / "app.py"
    app.write_text("import holdfast as hf\nfrom lib_of_test_identity import fn\n" + QUERY)
    printed = set()
    for seed in ("0", "1", "2"):
        process = subprocess.run(
            [sys.executable, "-c", PRINT, str(app), str(tmp_path)], capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed}, timeout=60, check=True,
        )  # fmt: skip
        printed.add(process.stdout)
    app.write_text(FUNCTION + QUERY)  # now all code is in the file that is run
    loaded = identity_of(load(str(app))).body()
    app.write_text(f"{FUNCTION}{QUERY}\n{PRINTS_ITSELF}")
    process = subprocess.run(
        [sys.executable, str(app)], capture_output=True, text=True, timeout=60, check=True
    )
    assert len(printed) == 1 and json.loads(process.stdout) == json.loads(printed.pop()) == loaded


def test_the_identity_covers_code_without_source() -> None:
    def identity_with(text: str) -> Identity:
        space: dict[str, Any] = {"hf": hf}
        exec(f"{text}\n{QUERY}", space)
        return identity_of(space["net"])

    identity = identity_with("def fn(df):\n    'a'\n    return df.filter('n > 0') if df else None")
    assert (
        identity_with("\n\ndef fn(df):\n    'b'\n    return df.filter('n > 0') if df else None")
        == identity
    )
    (change,) = query_differences(
        identity, identity_with("def fn(df):\n    return df.filter('n > 1')")
    )
    assert change == "apply-1: the code of fn changed"


def test_lambdas_on_one_line_have_different_identities() -> None:
    def identity_with(fn: Any) -> Identity:
        net = hf.Network("net")
        net.output("out", net.source("tap", "ts timestamp", time="ts").apply(fn))
        return identity_of(net)

    one, two, three = (lambda df: df.a), (lambda df: df.b), (lambda df: lambda df: df.a)
    assert len({identity_with(fn).digest for fn in (one, two, three, three(None))}) == 3
    assert identity_with(one) == identity_with(three(None))


def test_a_filled_cache_keeps_the_identity_of_its_function() -> None:
    cache: dict[str, int] = {}
    net = hf.Network("net")
    tap = net.source("tap", "ts timestamp", time="ts")
    net.output("out", tap.apply(lambda df: cache or df))
    before = identity_of(net)
    cache["x"] = 1
    assert identity_of(net) == before
    assert identity_of(physical(net)) == before


def test_an_added_output_changes_the_query() -> None:
    net = hf.Network("net")
    tap = net.source("tap", "ts timestamp", time="ts")
    net.output("out", tap.filter("true"))
    before = identity_of(net)
    net.output("more", tap.filter("false"))
    assert query_differences(before, identity_of(net)) == ["filter-3: added", "more: added"]


def test_the_identity_contains_library_versions() -> None:
    import psutil

    net = hf.Network("net")
    tap = net.source("tap", "ts timestamp", time="ts")
    net.output("out", tap.apply(lambda df: df.limit(psutil.cpu_count())))
    libraries = identity_of(net).libraries
    assert {"python", "holdfast", "numpy", "pandas", "pyarrow", "pyspark", "psutil"} == {*libraries}
    assert libraries["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert libraries["psutil"] == psutil.__version__


def test_protection_is_part_of_the_identity_but_not_of_the_query() -> None:
    def identity_with(**protection: Any) -> Identity:
        net = hf.Network("net")
        net.output("out", net.source("tap", "ts timestamp", time="ts").filter("true"))
        net.protect(**protection)
        return identity_of(net)

    one, two = identity_with(replicas=2), identity_with(replicas=3)
    assert one.digest == two.digest
    assert differences(one, two) == ["main: replicas 2 -> 3"]


def test_a_malformed_identity_is_refused() -> None:
    net = hf.Network("net")
    net.output("out", net.source("tap", "ts timestamp", time="ts").filter("true"))
    body = identity_of(net).body()
    assert Identity.of(json.loads(json.dumps(body)), "here") == identity_of(net)
    for wrong in ({}, None, {**body, "more": {}}, {**body, "query": {"x": 1}}):
        with pytest.raises(SetupError, match="here: expected an identity"):
            Identity.of(wrong, "here")
