"""What is part of the identity of a run, and what is not. No JVM."""

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
    """An application of some code, loaded as `holdfast run` does."""
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


def test_the_same_code_is_the_same_in_another_file(made: Any) -> None:
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
def test_what_changes_nothing_does_not_count(change: str, made: Any) -> None:
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
def test_all_that_a_function_refers_to_counts(change: str, made: Any) -> None:
    """B6: function bodies, and everything they use."""
    old, new, told = CODE[change]
    assert old in FUNCTION
    found = query_differences(made(FUNCTION), made(FUNCTION.replace(old, new)))
    assert f"apply-1: {told}" in found[-1], found


def test_functions_of_the_applications_modules_count(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "rules_of_test_identity.py"

    def at(body: str, use: str) -> Identity:
        module.write_text(f"def keep(df):\n    {body}\n\ndef drop(df):\n    return df\n")
        sys.modules.pop(module.stem, None)
        made_by: Identity = made(f"import holdfast as hf\n{use}\n")
        return made_by

    for use, told in (
        (f"import {module.stem} as m\ndef fn(df): return m.keep(df)", "m.keep"),
        (f"from {module.stem} import keep\ndef fn(df): return keep(df)", "keep"),
        (f"def fn(df):\n from {module.stem} import keep\n return keep(df)", "keep"),
        (f"def fn(df):\n import {module.stem} as m\n return m.keep(df)", module.stem),
    ):
        before = at("return df.distinct()", use)
        assert at("return  df.distinct() # the same", use) == before
        (found,) = query_differences(before, at("return df.limit(1)", use))
        assert found.startswith("apply-1: the code of ") and told in found


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


def test_every_process_finds_the_same(tmp_path: Path) -> None:
    """Whatever the hash seed, and whether the code was compiled now or is cached."""
    (tmp_path / "lib_of_test_identity.py").write_text(FUNCTION)
    app = tmp_path / "app.py"
    app.write_text("import holdfast as hf\nfrom lib_of_test_identity import fn\n" + QUERY)
    found = set()
    for seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PRINT, str(app), str(tmp_path)], capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed}, timeout=60, check=True,
        )  # fmt: skip
        found.add(done.stdout)
    app.write_text(FUNCTION + QUERY)  # now all of it in the file that is run
    loaded = identity_of(load(str(app))).body()
    app.write_text(f"{FUNCTION}{QUERY}\n{PRINTS_ITSELF}")
    done = subprocess.run(
        [sys.executable, str(app)], capture_output=True, text=True, timeout=60, check=True
    )
    assert len(found) == 1 and json.loads(done.stdout) == json.loads(found.pop()) == loaded


def test_code_without_a_source_counts_too() -> None:
    def at(text: str) -> Identity:
        space: dict[str, Any] = {"hf": hf}
        exec(f"{text}\n{QUERY}", space)
        return identity_of(space["net"])

    one = at("def fn(df):\n    'a'\n    return df.filter('n > 0') if df else None")
    assert at("\n\ndef fn(df):\n    'b'\n    return df.filter('n > 0') if df else None") == one
    (found,) = query_differences(one, at("def fn(df):\n    return df.filter('n > 1')"))
    assert found == "apply-1: the code of fn changed"


def test_lambdas_on_one_line_are_told_apart() -> None:
    def at(fn: Any) -> Identity:
        net = hf.Network("net")
        net.output("out", net.source("tap", "ts timestamp", time="ts").apply(fn))
        return identity_of(net)

    one, two, three = (lambda df: df.a), (lambda df: df.b), (lambda df: lambda df: df.a)
    assert len({at(fn).digest for fn in (one, two, three, three(None))}) == 3
    assert at(one) == at(three(None))


def test_a_cache_that_fills_is_not_another_function() -> None:
    cache: dict[str, int] = {}
    net = hf.Network("net")
    tap = net.source("tap", "ts timestamp", time="ts")
    net.output("out", tap.apply(lambda df: cache or df))
    before = identity_of(net)
    cache["x"] = 1
    assert identity_of(net) == before
    assert identity_of(physical(net)) == before


def test_a_network_that_grows_is_another_query() -> None:
    net = hf.Network("net")
    tap = net.source("tap", "ts timestamp", time="ts")
    net.output("out", tap.filter("true"))
    before = identity_of(net)
    net.output("more", tap.filter("false"))
    assert query_differences(before, identity_of(net)) == ["filter-3: added", "more: added"]


def test_versions_of_the_libraries_are_part_of_it() -> None:
    import psutil

    net = hf.Network("net")
    tap = net.source("tap", "ts timestamp", time="ts")
    net.output("out", tap.apply(lambda df: df.limit(psutil.cpu_count())))
    libraries = identity_of(net).libraries
    assert {"python", "holdfast", "numpy", "pandas", "pyarrow", "pyspark", "psutil"} == {*libraries}
    assert libraries["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert libraries["psutil"] == psutil.__version__


def test_protection_is_equal_in_a_run_but_no_part_of_the_query() -> None:
    def at(**how: Any) -> Identity:
        net = hf.Network("net")
        net.output("out", net.source("tap", "ts timestamp", time="ts").filter("true"))
        net.protect(**how)
        return identity_of(net)

    one, two = at(replicas=2), at(replicas=3)
    assert one.digest == two.digest
    assert differences(one, two) == ["main: replicas 2 -> 3"]


def test_what_others_wrote_is_checked() -> None:
    net = hf.Network("net")
    net.output("out", net.source("tap", "ts timestamp", time="ts").filter("true"))
    body = identity_of(net).body()
    assert Identity.of(json.loads(json.dumps(body)), "here") == identity_of(net)
    for wrong in ({}, None, {**body, "more": {}}, {**body, "query": {"x": 1}}):
        with pytest.raises(SetupError, match="here: expected an identity"):
            Identity.of(wrong, "here")
