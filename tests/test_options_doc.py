"""docs/options.md lists every option, flag and metric."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from holdfast.cli.main import _parser
from holdfast.config import Options

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "options.md").read_text()
NAMED = set(re.findall(r"`(?:--)?([\w-]+)", TEXT))


def test_every_option_is_listed_with_its_default() -> None:
    assert {field.name for field in fields(Options)} - NAMED == set()
    for field in fields(Options):
        if isinstance(field.default, str):
            assert f'`"{field.default}"`' in TEXT, field.name


def test_every_flag_of_run_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["run", "--help"])
    flags = set(re.findall(r"--([a-z-]+)", capsys.readouterr().out.partition("positional")[0]))
    assert len(flags) > 15
    assert flags - NAMED - {"debug"} == set()


def test_every_metric_is_listed() -> None:
    code = (ROOT / "src" / "holdfast" / "runtime" / "metrics.py").read_text()
    metrics = {
        f"holdfast_{name}{'_total' if kind == 'counter' else ''}"
        for kind, name in re.findall(r'_(gauge|counter)\(\s*"(\w+)"', code)
    }
    assert len(metrics) > 15
    assert metrics - NAMED == set()
