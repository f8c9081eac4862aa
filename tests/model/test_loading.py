"""Loading the network of an application."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from holdfast.errors import InputError, SetupError
from holdfast.model.loading import load
from holdfast.model.network import Network

NETWORK = 'import holdfast as hf\n{name} = hf.Network("one")\n'


def test_a_file_with_one_network_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(NETWORK.format(name="net"))
    assert load(str(path)).name == "one"
    assert load(f"{path}:net").name == "one"
    assert load("holdfast.examples.netmon:net").name == "netmon"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"has no hf\.Network at module level; assign one"),
        (
            NETWORK.format(name="a") + NETWORK.format(name="b"),
            r"has 2 networks \(a, b\); choose one with .*app\.py:NAME",
        ),
        ("import nope\n", "cannot be imported: ModuleNotFoundError"),
        ("def f(:\n", "cannot be imported: SyntaxError"),
    ],
)
def test_an_invalid_application_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "app.py"
    path.write_text(text)
    with pytest.raises(SetupError, match=message):
        load(str(path))


def test_errors_of_the_network_are_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "app.py"
    path.write_text('import holdfast as hf\nnet = hf.Network("n", bucket="half a second")\n')
    with pytest.raises(InputError, match="bucket: 'half a second' is not a duration"):
        load(str(path))


def test_a_missing_file_or_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"there is no application file .*; check the path"):
        load(str(tmp_path / "nope.py"))
    with pytest.raises(
        SetupError, match=r"expected 'nope' to be an hf\.Network, found no such name; .* are: net$"
    ):
        load("holdfast.examples.netmon:nope")
    with pytest.raises(SetupError, match=r"expected 'hf' to be an hf\.Network, found module; "):
        load("holdfast.examples.netmon:hf")


@pytest.mark.parametrize(
    ("code", "instead"),
    [
        ('s.groupBy("x")', r"a Stream has no 'groupBy', .* \.window\(\"10s\"\)\.group_by"),
        ('s.select("x")', r"'select', .* \.apply\(lambda df: df\.select\(\.\.\.\)\)"),
        ('s.where("x > 0")', r"'where', .* \.filter\(condition\)"),
        ('s.countWindow(3, by="x")', r"'countWindow'; write instead: \.count_window"),
        ("s.writeStream", r"'writeStream', .* net\.output\(name, stream, sink"),
        ("s.nonsense()", r"'nonsense' \(methods: apply, filter, map"),
        ('s.window("1s").groupBy("x")', r"a window has no 'groupBy'; write instead: \.group_by"),
    ],
)
def test_dataframe_methods_are_refused_with_a_replacement_and_a_location(
    tmp_path: Path, code: str, instead: str
) -> None:
    path = tmp_path / "app.py"
    source = 's = net.source("s", "ts timestamp, x long", time="ts")\n'
    path.write_text(NETWORK.format(name="net") + source + code + "\n")
    with pytest.raises(SetupError, match=f"AttributeError: .*{instead}.*, at {path}:4$"):
        load(str(path))


def test_missing_attributes_of_a_stream_raise_attribute_error() -> None:
    stream = Network("net").source("s", "ts timestamp", time="ts")
    assert not hasattr(stream, "select") and not hasattr(stream, "__arrow_array__")
    assert copy.copy(stream).op is stream.op
