"""The command line: results, files, and one-line errors instead of tracebacks."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from clustergym import TokenTrace, cli
from clustergym.cli import evaluate as eval_command
from clustergym.cli import trace as trace_command
from clustergym.common import files
from clustergym.moe_placement import Interval, Placement
from clustergym.moe_placement.specs import CLUSTERS, MODELS
from clustergym.planners.base import Planner
from clustergym.planners.registry import PLANNERS, Entry
from clustergym.traces import SyntheticConfig, load_traces, synthetic_trace

SMALL = ["--cluster", "h800-2x4", "--phase", "decode", "--tokens-per-rank", "4", "--passes", "2", "--intervals", "2"]
RESULT_KEYS = {
    "planner", "served_us", "migration_us", "total_us", "total_ci95_us", "balancedness", "gpus_per_token",
    "inter_node_mb", "moves", "decision_ms", "reused", "groups", "stream_totals_us", "interval_totals_us",
    "resampled",
}  # fmt: skip


def make_trace(path: Path, seed: int = 0, **options: Any) -> Path:
    config: dict[str, Any] = {
        "n_tokens": 600, "n_layers": 2, "n_experts": 8, "top_k": 2, "mean_seq_len": 20, "popularity_skew": 0.6,
        "model": "mixtral-8x7b",
    }  # fmt: skip
    return synthetic_trace(SyntheticConfig(**(config | options)), seed=seed).save(path)


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trace(tmp_path_factory.mktemp("traces") / "tiny.npz")


def evaluate(trace: Path, out: Path, *arguments: str) -> dict[str, Any]:
    assert cli.main(["eval", "--trace", str(trace), *SMALL, "--json", str(out), *arguments]) == 0
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error message of a command that must end with exit code 2 and print nothing else."""
    assert cli.main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    return " ".join(captured.err.split())


# Eval


def test_eval_writes_results_as_they_come(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third planner fails: the results of the first two are in the file and on the screen."""
    out = tmp_path / "o.json"

    class Broken(Planner):
        def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
            raise ValueError("broken")

    monkeypatch.setitem(PLANNERS, "swift", Entry(Broken))
    command = ["eval", "--trace", str(trace_file), *SMALL, "--planner", "static", "eplb", "swift", "--json", str(out)]
    assert cli.main(command) == 2
    document = json.loads(out.read_text())
    assert [planner["planner"] for planner in document["planners"]] == ["static", "eplb"]
    assert not document["complete"]
    assert "[2/3] eplb: " in capsys.readouterr().out


def test_eval_writes_consistent_results(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "new" / "out.json", tmp_path / "new" / "out.png"
    arguments = ["eval", "--trace", str(trace_file), *SMALL, "--planner", "static", "eplb", "anneal"]
    arguments += ["--seed", "7", "--streams", "2", "--json", str(out), "--plot", str(picture)]
    assert cli.main(arguments) == 0
    document = json.loads(out.read_text())
    assert set(document) == {
        "planners", "trace", "model", "cluster", "profile", "phase", "schedule", "migration", "tokens_per_rank",
        "sampled_passes", "passes_per_interval", "observe_tokens", "intervals", "streams", "groups", "reused", "split",
        "seed", "command", "complete",
    }  # fmt: skip
    assert (document["trace"], document["cluster"], document["seed"]) == ("tiny", "h800-2x4", 7)
    assert (document["model"], document["schedule"]) == ("mixtral-8x7b", "drift")
    assert (document["tokens_per_rank"], document["sampled_passes"], document["intervals"]) == (4, 2, 2)
    assert (document["profile"], document["streams"], document["groups"], document["reused"]) == (
        "sglang-decode", 2, 2, 0.0,
    )  # fmt: skip
    assert shlex.split(document["command"]) == ["clustergym", *arguments]
    assert [p["planner"] for p in document["planners"]] == ["static", "eplb", "anneal"]
    for p in document["planners"]:
        assert set(p) == RESULT_KEYS
        assert p["total_us"] == pytest.approx(p["served_us"] + p["migration_us"])
        assert p["total_us"] == pytest.approx(np.mean(p["stream_totals_us"]))
        assert (len(p["stream_totals_us"]), len(p["interval_totals_us"])) == (2, 2)
        assert 0 < p["balancedness"] <= 1
    static, eplb, anneal = document["planners"]
    assert (static["moves"], static["migration_us"]) == (0, 0)
    assert eplb["moves"] > 0
    assert anneal["moves"] > 0

    image = matplotlib.image.imread(picture)
    assert image.shape[0] > 200
    assert image.shape[1] > 800
    assert image.std() > 0.01  # not an empty picture
    # No temporary file is left.
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.json", "out.png"]
    shown = capsys.readouterr().out
    for p in document["planners"]:
        row = next(line for line in shown.splitlines() if line.startswith(f"│ {p['planner']} "))
        assert f"{p['served_us']:.1f}" in row
        assert f"{p['total_us']:.1f} ± {p['total_ci95_us']:.1f}" in row
    assert str(out) in shown.replace("\n", "")


def test_annealing_beats_static_and_eplb(tmp_path: Path) -> None:
    """With enough tokens that it is no chance. Mixtral's two slots per GPU leave nothing to gain over static."""
    larger: dict[str, Any] = {"n_tokens": 6000, "n_experts": 32, "top_k": 4, "model": "gpt-oss-20b"}
    trace, out = make_trace(tmp_path / "larger.npz", **larger), tmp_path / "o.json"
    flags = ["--tokens-per-rank", "16", "--schedule", "stationary", "--streams", "2"]
    document = evaluate(trace, out, *flags, "--planner", "static", "eplb", "anneal")
    static, eplb, anneal = (p["served_us"] for p in document["planners"])
    assert anneal < 0.995 * min(static, eplb)


@pytest.mark.parametrize("schedule", ["stationary", "drift", "switch", "replay"])
def test_every_schedule_runs(schedule: str, trace_file: Path, tmp_path: Path) -> None:
    document = evaluate(trace_file, tmp_path / "o.json", "--schedule", schedule, "--planner", "eplb")
    assert document["schedule"] == schedule
    assert (document["planners"][0]["moves"] == 0) == (schedule == "stationary")


def test_all_means_every_planner_but_exact(trace_file: Path, tmp_path: Path) -> None:
    document = evaluate(trace_file, tmp_path / "o.json", "--planner", "all", "--layers", "0")
    assert [p["planner"] for p in document["planners"]] == [name for name in PLANNERS if name != "exact"]
    served = {p["planner"]: p["served_us"] for p in document["planners"]}
    assert min(served, key=lambda name: served[name]) == "oracle"


def test_results_depend_on_the_seed(trace_file: Path, tmp_path: Path) -> None:
    runs = [
        evaluate(trace_file, tmp_path / "o.json", "--planner", "eplb", "anneal", "--seed", seed)["planners"]
        for seed in ("1", "1", "2")
    ]
    for run in runs:
        for p in run:
            del p["decision_ms"]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_options_reach_the_simulator(trace_file: Path, tmp_path: Path) -> None:
    def eplb(*arguments: str) -> dict[str, Any]:
        planner: dict[str, Any] = evaluate(trace_file, tmp_path / "o.json", "--planner", "eplb", *arguments)[
            "planners"
        ][0]
        return planner

    base = eplb()
    assert eplb("--passes-per-interval", "10000")["migration_us"] == pytest.approx(base["migration_us"] / 10)
    assert eplb("--migration", "async")["migration_us"] < base["migration_us"]
    assert eplb("--profile", "vllm")["inter_node_mb"] > base["inter_node_mb"]
    assert eplb("--engine", "tensorrt-llm")["served_us"] != base["served_us"]
    assert eplb("--allow-reuse", "--intervals", "20")["reused"] > 0.5
    assert eplb("--split", "test")["served_us"] != base["served_us"]
    assert eplb("--rank-imbalance", "1.0")["served_us"] > base["served_us"]
    assert eplb("--slots", "1")["gpus_per_token"] == pytest.approx(2.0)  # eight experts, one on each GPU
    assert eplb("--layers", "1")["served_us"] != base["served_us"]


def test_several_traces_become_domains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [make_trace(tmp_path / f"part{i}.npz", seed=i) for i in range(2)]
    joined = load_traces([str(path) for path in paths])
    assert joined.domain_names == ["part0", "part1"]
    assert joined.n_tokens == 1200
    np.testing.assert_array_equal(joined.experts[600:], TokenTrace.load(paths[1]).experts)
    out = tmp_path / "o.json"
    command = ["eval", "--trace", *map(str, paths), *SMALL, "--planner", "static", "--json", str(out)]
    assert cli.main(command) == 0
    assert json.loads(out.read_text())["trace"] == "part0+part1"
    # Two files of the same name are two domains. The same file twice would leak held-out sequences.
    (tmp_path / "other").mkdir()
    twin = make_trace(tmp_path / "other" / "part0.npz", seed=5)
    assert len(load_traces([str(paths[0]), str(twin)]).domain_names) == 2
    assert "is given twice" in refused(capsys_cleared(capsys), "eval", "--trace", str(twin), str(twin))
    smaller = make_trace(tmp_path / "other" / "one.npz", n_layers=1)
    assert "only traces of the same model and layers" in refused(capsys, "eval", "--trace", str(twin), str(smaller))


def capsys_cleared(capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    capsys.readouterr()
    return capsys


# Refusals


def test_missing_model_is_an_error_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    array = np.random.default_rng(0).permuted(np.tile(np.arange(8), (400, 2, 1)), axis=2)[:, :, :2]
    path = TokenTrace(array, n_experts=8, seq_lens=[10] * 40, name="bare").save(tmp_path / "bare.npz")  # type: ignore[arg-type]
    outputs = ["--json", str(tmp_path / "sub" / "o.json"), "--plot", str(tmp_path / "sub" / "o.png")]
    said = refused(capsys, "eval", "--trace", str(path), *SMALL, "--planner", "static", *outputs)
    assert "bare: the trace does not say which model it is from: give a model (--model on the command line)" in said
    assert "mixtral-8x7b, mixtral-8x22b has the trace's 8 experts and top-2" in said
    assert all(name in said for name in MODELS)
    assert [p.name for p in tmp_path.iterdir()] == ["bare.npz"]
    arguments = ["eval", "--trace", str(path), *SMALL, "--planner", "static", *outputs, "--model", "mixtral-8x7b"]
    assert cli.main(arguments) == 0
    assert (tmp_path / "sub" / "o.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--planner", "eplb", "magic"], ["unknown planner 'magic'", "anneal", *PLANNERS]),
        (["--cluster", "h900-4x4"], ["unknown cluster 'h900-4x4'", *CLUSTERS]),
        (["--schedule", "often"], ["unknown schedule 'often'", "stationary, drift, switch, replay"]),
        (["--profile", "pigeon"], ["unknown profile 'pigeon'", "sglang-prefill, sglang-decode"]),
        (["--engine", "tgi"], ["unknown engine 'tgi'", "sglang, tensorrt-llm"]),
        (["--intervals", "20"], ["fills 0 intervals", "21 are needed", "allow_reuse"]),
        (["--model", "gpt-9"], ["unknown model 'gpt-9'", *MODELS]),
        (["--model", "deepseek-v3"], ["top-2 of 8 experts", "top-8 of 256"]),
        (["--trace", "nosuch"], ["unknown trace 'nosuch'", "synthetic"]),
        (["--trace", "nosuch.npz"], ["no trace file at nosuch.npz", "synthetic"]),
        (["--cluster", "h800-2x4", "--slots", "0"], ["slots_per_gpu is 0: expected at least 1"]),
        (["--layers", "0", "2"], ["layers [0, 2] asked for, but the positions are 0 … 1"]),
        (["--layers", "1", "1"], ["layer_ids must be distinct"]),
        (["--intervals", "0"], ["intervals is 0: expected at least 1"]),
        (["--holdout", "1"], ["holdout is 1.0"]),
        (["--passes-per-interval", "0"], ["passes_per_interval is 0: expected at least 1"]),
        ([*SMALL, "--plot", "picture.docx"], ["picture.docx", ".png, .svg, .pdf"]),
        (["--planner", "exact"], ["the exact planner tries at most"]),
    ],
)
def test_wrong_input_is_a_one_line_error_and_leaves_no_file(
    arguments: list[str], expected: list[str], trace_file: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    base = ["eval", *([] if "--trace" in arguments else ["--trace", str(trace_file)])]
    base += ["--planner", "static"] if "--planner" not in arguments else []
    if arguments[:2] == ["--planner", "exact"]:  # raised by the planner, after the heading is printed
        assert cli.main([*base, *SMALL, *arguments, "--json", "o.json"]) == 2
        said = " ".join(capsys.readouterr().err.split())
    else:
        said = refused(capsys, *base, *arguments, "--json", "o.json")
    for words in expected:
        assert words in said
    assert list(tmp_path.iterdir()) == []


def test_too_few_slots_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "eval", "--trace", "synthetic", "--cluster", "h800-4x4", "--slots", "3")
    assert "too few slots: 16 GPUs × 3 slots = 48 for 64 experts; at least 4 slots per GPU are needed" in said


def test_brackets_in_names_are_not_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would read [b] as a style and drop it."""
    assert "no trace file at run[b].npz;" in refused(capsys, "eval", "--trace", "run[b].npz")
    path = make_trace(tmp_path / "run[b].npz")
    assert cli.main(["eval", "--trace", str(path), *SMALL, "--planner", "static"]) == 0
    out = capsys.readouterr().out
    assert "run[b]: 600 tokens" in out
    assert "run[b] on h800-2x4" in out


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_unwritable_outputs_are_refused_before_planning(
    flag: str, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_command, "compare", lambda *_, **__: pytest.fail("the planners ran anyway"))
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "file" / "o.png", tmp_path / "folder.png"):
        said = refused(capsys, "eval", "--trace", str(trace_file), *SMALL, "--planner", "static", flag, str(path))
        assert str(path) in said or str(path.parent) in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.png"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "o.json"
    files.write_atomically(path, "old")

    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["o.json"]
    monkeypatch.undo()
    files.write_atomically(path, "new")
    assert path.read_text() == "new"


# Trace


def test_trace_synth_and_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.npz"
    sizes = ["--n-tokens", "300", "--n-layers", "2", "--n-experts", "16", "--top-k", "3", "--n-domains", "2"]
    assert cli.main(["trace", "synth", str(path), *sizes, "--seed", "4"]) == 0
    made = TokenTrace.load(path)
    expected = synthetic_trace(SyntheticConfig(n_tokens=300, n_layers=2, n_experts=16, top_k=3, n_domains=2), seed=4)
    np.testing.assert_array_equal(made.experts, expected.experts)
    np.testing.assert_array_equal(made.seq_lens, expected.seq_lens)
    assert made.domain_names == ["domain0", "domain1"]
    assert "300 tokens" in capsys.readouterr().out
    assert cli.main(["trace", "info", str(path), "--gpus", "4"]) == 0
    shown = capsys.readouterr().out
    assert "top-3 of 16 experts" in shown
    assert "for 4 GPUs" in shown
    for name, value in made.statistics(4).items():
        row = next(line for line in shown.splitlines() if line.startswith(f"│ {name} "))
        assert f"{value:.3f}" in row


def test_trace_commands_refuse_invalid_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "top_k must be at most n_experts = 4, found 5" in refused(
        capsys, "trace", "synth", str(tmp_path / "t.npz"), "--n-experts", "4", "--top-k", "5"
    )
    said = refused(capsys, "trace", "synth", str(tmp_path / "t.npz"), "--n-tokens", "99999999999")
    assert "more than 2,000,000,000: at most 12,820,512 tokens for 26 layers and top-6" in said
    for seed in (["--seed", "-1"], ["--seed=-1"]):
        assert "--seed is -1: expected 0 or more" in refused(capsys, "trace", "synth", str(tmp_path / "t.npz"), *seed)
    assert "traces are saved as .npz" in refused(capsys, "trace", "synth", str(tmp_path / "t.csv"), "--n-tokens", "50")
    nowhere = tmp_path / "nowhere"
    assert str(nowhere) in refused(capsys, "trace", "synth", str(nowhere / "t.npz"), "--n-tokens", "50")
    assert "unknown trace 'nosuch'" in refused(capsys, "trace", "info", "nosuch")
    assert list(tmp_path.iterdir()) == []


# Help


def documented_fields(cls: type) -> dict[str, str]:
    """Field → the docstring under it, or an empty string."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            has = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[node.target.id] = " ".join(str(after.value.value).split()) if has else ""  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(
    ("command", "classes"),
    [
        (["eval"], [eval_command.Command]),
        (["trace", "info"], [trace_command.Info]),
        (["trace", "synth"], [trace_command.Synth, SyntheticConfig]),
    ],
)
def test_help_explains_every_flag(
    command: list[str], classes: list[type], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for cls in classes:
        for name, sentence in documented_fields(cls).items():
            if name == "config":  # its fields are the flags
                continue
            flag = (
                name.upper()
                if (cls, name) in [(trace_command.Info, "trace"), (trace_command.Synth, "output")]
                else f"--{name.replace('_', '-')}"
            )
            assert flag in text
            assert len(sentence.split()) > 2, f"{flag} is not explained"
            assert " ".join(sentence.replace("``", "").split()[:4]) in text.replace("``", ""), flag


def test_help_of_eval_lists_every_planner() -> None:
    assert set(PLANNERS) <= set(re.findall(r"[\w-]+", documented_fields(eval_command.Command)["planner"]))


# The installed script


def test_smoke_console_script(trace_file: Path, tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("clustergym")
    command = [str(script), "eval", "--trace", str(trace_file), *SMALL, "--planner", "static", "eplb"]
    command += ["--json", "o.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "o.json").read_text())
    assert shlex.split(document["command"]) == ["clustergym", *command[1:]]
    assert [p["planner"] for p in document["planners"]] == ["static", "eplb"]
    wrong = subprocess.run(
        [*command, "--schedule", "often"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert wrong.returncode == 2
    assert "unknown schedule 'often'" in wrong.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "nope.npz", "-o", "plan.json"],
        ["plan", "nope", "-o", "plan.json"],
        ["trace", "info", "nope.npz"],
        ["verify", "nope.json", "--model", "deepseek-v3", "--cluster", "h800-4x8"],
        ["diff", "nope.json", "nope.json", "--model", "deepseek-v3", "--cluster", "h800-4x8"],
        ["models", "nope"],
        ["clusters", "nope"],
    ],
)
def test_a_missing_file_is_reported_before_slow_imports(command: list[str]) -> None:
    """torch, numba and scipy take seconds to import."""
    code = (
        "import sys; from clustergym import cli; status = cli.main(sys.argv[1:]); "
        "print(sorted({'torch', 'numba', 'scipy', 'matplotlib'} & set(sys.modules))); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.strip() == "[]"
    assert re.search("nope", done.stderr)
