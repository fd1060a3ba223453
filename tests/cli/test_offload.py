"""``clustergym offload`` on a small trace, in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clustergym import SyntheticConfig, synthetic_trace
from clustergym.cli import main
from clustergym.moe_offload.predictor import Predictor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, and a predictor and a policy that were fitted on it for a few steps."""
    path = tmp_path_factory.mktemp("offload")
    config = SyntheticConfig(n_tokens=3000, n_layers=5, n_experts=16, top_k=2, mean_seq_len=60, seq_len_spread=0.3)
    synthetic_trace(config).save(path / "trace.npz")
    few = ["--steps", "30", "--hidden", "8", "--decisions", "300", "--evaluations", "1"]
    main(["offload", "fit", str(path / "trace.npz"), "-o", str(path / "predictor"), *few])
    return path


def run(*arguments: str | Path) -> int:
    return main(["offload", *map(str, arguments)])


def test_fit_writes_a_predictor_and_compares_its_recall(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit", folder / "trace.npz", "-o", folder / "again", "--steps", 2, "--hidden", 4, "--decisions", 0) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("popularity", "transitions", "predictor"))
    about = Predictor.load(folder / "again").about
    assert (about["trace"], about["steps"], len(about["recall"])) == ("trace", 2, 3)
    assert not (folder / "again" / "policy.onnx").exists()


def test_a_policy_for_another_link_uses_the_same_predictor(folder: Path) -> None:
    few = ("--decisions", 100, "--evaluations", 1, "--link", "pcie4")
    assert run("fit", folder / "trace.npz", "-o", folder / "pcie4", "--predictor", folder / "predictor", *few) == 0
    weights = [(folder / name / "predictor.safetensors").read_bytes() for name in ("predictor", "pcie4")]
    assert weights[0] == weights[1]
    policies = [(folder / name / "policy.safetensors").read_bytes() for name in ("predictor", "pcie4")]
    assert policies[0] != policies[1]
    assert sum((folder / "pcie4" / f"policy.{end}").stat().st_size for end in ("safetensors", "onnx")) < 300_000


def test_eval_writes_rows_of_all_kinds_and_a_picture(folder: Path) -> None:
    rows_file, plot = folder / "rows.json", folder / "plot.png"
    assert run(
        "eval", folder / "trace.npz", "--predictor", folder / "predictor", "--policy", "rules", "control", "bounds",
        "shipped", "random-networks", "--slots", "30%", "0.5", "--evaluations", 1, "--tune-tokens", 300,
        "--tokens", 500, "--json", rows_file, "--plot", plot,
    ) == 0  # fmt: skip
    document = json.loads(rows_file.read_text())
    assert document["complete"]
    rows = document["rows"]
    assert {row["slots"] for row in rows} == {0.3, 0.5}
    assert {row["kind"] for row in rows} == {"rule", "random", "control", "trained", "bound"}
    assert {row["policy"] for row in rows if row["kind"] == "trained"} == {"shipped"}
    for row in rows:
        assert row["ci95"][0] <= row["stall_ms_per_token"] <= row["ci95"][1]
        assert row["tokens_per_s"] > 0
        assert row["against_control_ci95"][0] <= row["against_control"] <= row["against_control_ci95"][1]
    stall = {(row["slots"], row["policy"]): row["stall_ms_per_token"] for row in rows}
    for slots in (0.3, 0.5):
        assert stall[slots, "clairvoyant"] < stall[slots, "belady"] < stall[slots, "lru"]
        assert stall[slots, "belady"] < stall[slots, "random-networks"]
    assert stall[0.5, "lru"] < stall[0.3, "lru"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_not_tested_on_what_was_fitted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", folder / "trace.npz", "--split", "all") == 2
    assert "give --fit-on" in capsys.readouterr().err
    # The same file as another trace: the sequences for fitting and tuning are left out.
    copy = folder / "copy.npz"
    copy.write_bytes((folder / "trace.npz").read_bytes())
    few = ("--policy", "lru", "--json", folder / "few.json")
    assert run("eval", copy, "--fit-on", folder / "trace.npz", *few) == 0
    n_all = json.loads((folder / "few.json").read_text())["sequences"]
    assert run("eval", folder / "trace.npz", *few) == 0
    n_test = json.loads((folder / "few.json").read_text())["sequences"]
    assert n_test < n_all < 0.6 * len(np.load(copy)["seq_lens"])


def test_export_gives_a_cache_that_runs_alone(folder: Path) -> None:
    out = folder / "cache"
    assert run("export", out, "--trace", folder / "trace.npz", "--evaluations", 1, "--slots", "0.4",
               "--predictor", folder / "predictor") == 0  # fmt: skip
    hot = json.loads((out / "hot_set.json").read_text())
    assert sum(map(len, hot["experts"])) == round(0.4 * 5 * 16)
    assert Predictor.load(out).shape == (5, 16)
    assert (out / "policy.onnx").read_bytes() == (folder / "predictor" / "policy.onnx").read_bytes()
    program = subprocess.run(
        [sys.executable, "-P", out / "cache_example.py", folder / "trace.npz"], capture_output=True, text=True,
        check=True, env={"PYTHONPATH": ""},
    )  # fmt: skip
    waited, experts = float(program.stdout.split()[0]), 5 * 2
    trace = np.load(folder / "trace.npz")["experts"][:2000]
    resident = np.zeros((5, 16), bool)
    for layer, found in enumerate(hot["experts"]):
        resident[layer, found] = True
    never_changed = sum((~resident[layer, trace[:, layer]]).sum() for layer in range(5)) / len(trace)
    assert 0 < waited < never_changed < experts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slots", "0"], "expected a share of all experts"),
        (["--slots", "12"], "expected a share of all experts"),
        (["--slots", "many"], "expected a share of all experts"),
        (["--policy", "control"], "the control needs a predictor"),
        (["--policy", "shipped"], "is the policy of clustergym offload fit, with --predictor DIR"),
        (["--policy", "fifo"], "expected rules, control, bounds, shipped, the name of a rule, random-networks"),
        (["--link", "isa"], "expected one of pcie4, pcie5"),
        (["--split", "new-domain"], "the parts of trace are fit, test, train, validation"),
        (["--predictor", "nowhere"], "is no predictor"),
        (["--plot", "x.txt"], "expected a file that ends in"),
    ],
)
def test_wrong_arguments_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run("eval", folder / "trace.npz", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_predictor_of_another_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", "tiny_decode", "--predictor", folder / "predictor", "--policy", "control") == 2
    assert "run clustergym offload fit on a trace of this model" in capsys.readouterr().err
