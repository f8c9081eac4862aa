"""`holdfast reliability LAYOUT`: the table, the JSON, and a message for every invalid file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.main import main

GOOD = 'nodes = 8\nnode_mttf = "30d"\nrepair = "10s"\n'
QUICK = ("--runs", "2000")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "layout.toml"
    path.write_text(GOOD)
    return path


def test_the_table_has_three_results_for_each_scheme(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reliability", str(file), *QUICK]) == 0
    output = capsys.readouterr().out
    for word in ("paper", "exact", "simulated", "8 nodes, chained"):
        assert word in output
    (cluster,) = [line for line in output.splitlines() if "cluster pairs" in line]
    (partition,) = [line for line in output.splitlines() if "partition pairs" in line]
    assert "333 years" in cluster and "166 years" in cluster
    assert "5,322 years" in partition and "1,331 years" in partition
    assert "fails first: either node of a pair" in output
    assert "repair of a replica set 40 s; the paper: 10 s to 1.33 min" in output


def test_the_figures_are_written_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reliability", str(file), "--json", "-", "--seed", "3", *QUICK]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layout"]["repair_cluster_s"] == 40.0
    assert (report["both_fail"], report["seed"], report["runs"]) == (True, 3, 2000)
    cluster, partition = report["schemes"]
    assert (cluster["scheme"], partition["scheme"]) == ("cluster pairs", "partition pairs")
    for row in (cluster, partition):
        assert row["mttf_simulated_s"] == pytest.approx(row["mttf_exact_s"], abs=3 * row["ci95_s"])
    month = 30 * 86_400
    assert partition["mttf_paper_s"] == pytest.approx(2 * month**2 / (8 * 10))
    assert cluster["mttf_paper_s"] == pytest.approx(4 * month**2 / (64 * 40))


def test_every_key_of_the_layout_file_has_an_effect(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(GOOD + 'repair_cluster = "20s"\nplacement = "mirrored"\n')
    to = file.with_name("out.json")
    assert main(["reliability", str(file), "--as-paper", "--json", str(to), *QUICK]) == 0
    assert "mirrored" in capsys.readouterr().out
    report = json.loads(to.read_text())
    assert report["layout"]["repair_cluster_s"] == 20.0 and report["both_fail"] is False
    for row in report["schemes"]:
        assert row["mttf_exact_s"] == pytest.approx(row["mttf_paper_s"], rel=0.01)


def test_a_missing_exact_result_is_explained(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text('nodes = 64\nnode_mttf = "1d"\nrepair = "5h"\n')
    assert main(["reliability", str(file), "--constant-repair", *QUICK]) == 0
    assert "too many nodes are down at once" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes = ", "layout.toml: not TOML"),
        (GOOD + "standby = 2", "layout.toml: unknown keys standby; expected nodes, node_mttf"),
        ("nodes = 8", "layout.toml: missing keys node_mttf, repair"),
        (GOOD.replace("8", "7"), "layout.toml: nodes = 7: pairs need an even number"),
        (GOOD.replace("8", "true"), "nodes = True is not a whole number"),
        (GOOD.replace("8", "8.0"), "nodes = 8.0 is not a whole number"),
        (GOOD.replace('"30d"', "30"), "node_mttf: 30 is not a duration"),
        (GOOD.replace("10s", "10 parsecs"), "repair: '10 parsecs' is not a duration"),
        (GOOD.replace("10s", "0s"), "repair: '0s' must be a positive"),
        (GOOD + 'placement = "ring"', "placement = 'ring' is not one of mirrored, chained"),
        (GOOD + "placement = [1]", "placement = [1] is not one of"),
        (GOOD + 'repair_cluster = "5s"', "repair_cluster is shorter than repair"),
    ],
)
def test_an_invalid_layout_file_is_reported_in_one_line(
    text: str, says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert main(["reliability", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


def test_unreadable_and_unwritable_files_are_reported(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reliability", str(file.with_name("none.toml"))]) == 2
    assert "none.toml cannot be read: No such file" in capsys.readouterr().err
    assert main(["reliability", str(file), "--json", str(file / "x"), *QUICK]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err
    assert main(["reliability", str(file), "--runs", "5"]) == 2
    assert "at least 100 runs" in capsys.readouterr().err
