"""The command `clustergym plan`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustergym import cli
from clustergym.cli import plan as plan_command
from clustergym.moe_placement.profiles import phases_of
from clustergym.moe_placement.specs import get_model
from clustergym.planners.anneal import Anneal
from clustergym.planners.registry import PLANNERS, Entry
from clustergym.plans.engines import ENGINES, compare_plans, load_plan, read_plan
from clustergym.traces import LoadTrace, TokenTrace
from plans import CLUSTER, SUFFIX, counts_trace, small_trace


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_trace().save(tmp_path_factory.mktemp("traces") / "tiny.npz")


SMALL = ["--cluster", "h800-2x4", "--tokens-per-rank", "8", "--passes", "8", "--plan-passes", "4", "--seconds", "0.3"]


@pytest.mark.parametrize("engine", list(ENGINES))
def test_command_writes_what_the_engine_reads(
    engine: str, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, results = tmp_path / "new" / f"plan{SUFFIX[engine]}", tmp_path / "new" / "results.json"
    arguments = ["plan", str(trace_file), *SMALL, "--planner", "anneal", "--engine", engine]
    arguments += ["-o", str(out), "--json", str(results)]
    assert cli.main(arguments) == 0
    rows = read_plan(out, engine)
    assert len(rows) == 32
    for row in rows.values():
        assert set(row) == set(range(8))
        gpus = np.array(row).reshape(8, -1)
        assert all(len(set(gpu)) == len(gpu) for gpu in gpus.tolist())
    document = json.loads(results.read_text())
    assert [p["planner"] for p in document["planners"]] == ["static", "eplb", "anneal"]
    phases = [profile.name for profile in phases_of(engine)]
    assert document["profile"] == phases[0]
    assert list(document["other_profiles"])[:2] == phases
    assert document["written"] == ("anneal" if document["gain_shown"] else "eplb")
    shown = " ".join(capsys.readouterr().out.split())
    mean = document["versus"]["eplb"]["mean"]
    said = f"anneal against EPLB (flat, as {engine} runs it here) on held-out traffic:"
    assert any(f"{said} {100 * mean:+.{digits}f}" in shown for digits in (1, 2))
    assert f"% time (sampling only), {document['served_as']}" in shown
    assert ("no gain over EPLB is shown: EPLB's plan is written" in shown) == (not document["gain_shown"])
    assert str(out) in shown.replace(" ", "")
    assert sorted(p.name for p in out.parent.iterdir()) == sorted(["results.json", out.name, out.name + ".meta.json"])


def test_command_without_a_gain_writes_the_plan_of_eplb(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The static placement of a skewed trace is slower than EPLB's on all-gather, where only balance matters."""
    maps = {}
    for name, flags in {"eplb": ["--planner", "eplb"], "static": ["--planner", "static"]}.items():
        for force in ([], ["--force"]):
            command = ["plan", str(trace_file), *SMALL, "--engine", "vllm", *flags, *force]
            assert cli.main([*command, "-o", str(tmp_path / "p.json")]) == 0
            maps[name, bool(force)] = json.loads((tmp_path / "p.json").read_text())
            said = " ".join(capsys.readouterr().out.split())
            assert ("no gain over EPLB is shown" in said) == (name == "static")
            assert ("is written anyway (--force)" in said) == (name == "static" and bool(force))
    assert maps["static", False] == maps["eplb", False] == maps["eplb", True]
    assert maps["static", True] != maps["eplb", True]


@pytest.mark.parametrize(
    ("flags", "profile"),
    [
        ([], "sglang-prefill-start"),
        (["--phase", "decode"], "sglang-decode-start"),
        (["--profile", "sglang-decode"], "sglang-decode"),
        (["--profile", "sglang-decode", "--phase", "prefill"], "sglang-decode (prefill)"),
        (["--engine", "vllm", "--phase", "prefill"], "vllm (prefill)"),
    ],
)
def test_profile_follows_engine_and_phase(flags: list[str], profile: str, trace_file: Path, tmp_path: Path) -> None:
    command = ["plan", str(trace_file), *SMALL, "--planner", "eplb", *flags, "--json", str(tmp_path / "r.json")]
    assert cli.main([*command, "-o", str(tmp_path / "p.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["profile"] == profile


def test_planners_and_plans_do_without_torch(tmp_path: Path) -> None:
    """torch and scipy.stats take seconds to import. Only environments and torch files need torch."""
    code = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Block())
import clustergym.cli.demo, clustergym.cli.evaluate, clustergym.cli.plan
assert "scipy.stats" not in sys.modules
from clustergym.cli import main
small = ["--tokens-per-rank", "16", "--cluster", "h800-1x4", "--slots", "20"]
names = ["static", "round-robin", "eplb", "flashlb", "swift", "hot-everywhere", "co-occurrence", "affinity-groups"]
assert main(["eval", *small, "--layers", "0", "--intervals", "1", "--planner", *names, "greedy", "anneal"]) == 0
assert main(["plan", "tiny_moe", *small, "--iterations", "10", "--planner", "anneal", "-o", "p.json"]) == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_same_seed_and_iterations_give_the_same_bytes(trace_file: Path, tmp_path: Path) -> None:
    plans = []
    for _ in range(2):
        command = ["plan", str(trace_file), *SMALL, "--planner", "anneal", "--iterations", "200", "--force"]
        assert cli.main([*command, "-o", str(tmp_path / "p.json")]) == 0
        plans.append((tmp_path / "p.json").read_bytes())
    assert plans[0] == plans[1]


def test_both_phases_give_two_plans(trace_file: Path, tmp_path: Path) -> None:
    command = ["plan", str(trace_file), *SMALL, "--planner", "eplb", "--phase", "both", "-o", str(tmp_path / "p.json")]
    assert cli.main([*command, "--json", str(tmp_path / "r.json"), "--report", str(tmp_path / "r.html")]) == 0
    for phase in ("prefill", "decode"):
        assert len(read_plan(tmp_path / f"p-{phase}.json", "sglang")) == 32
        assert json.loads((tmp_path / f"r-{phase}.json").read_text())["profile"] == f"sglang-{phase}-start"
        assert (tmp_path / f"r-{phase}.html").exists()
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.parametrize("planner", ["eplb", "anneal"])
def test_live_plan_is_changed_within_the_limit(
    planner: str,
    trace_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The static placement is live: much can be gained, more with more moves.

    Loads matter if they are larger than a block of 64 rows. With 64 tokens per rank, experts have 128 in the mean.
    """
    monkeypatch.setitem(PLANNERS, "anneal", Entry(Anneal, {"estimate_steps": 2000}))  # quick
    live, out, results = tmp_path / "live.json", tmp_path / "p.json", tmp_path / "r.json"
    base = ["plan", str(trace_file), *SMALL, "--tokens-per-rank", "64", "--profile", "sglang-decode"]
    assert cli.main([*base, "--planner", "static", "--force", "-o", str(live)]) == 0
    base += ["--planner", planner, "--iterations", "100", "--from", str(live), "-o", str(out), "--json", str(results)]
    model, times = get_model("mixtral-8x7b"), []
    limits = [["--max-moves", "0"], ["--max-moves", "40"], ["--migration-budget", "0.02"], []]
    for flags in limits[1:2] if planner == "eplb" else limits:
        assert cli.main([*base, *flags]) == 0
        document, said = json.loads(results.read_text()), " ".join(capsys.readouterr().out.split())
        plans = [load_plan(path, "sglang", model, 8) for path in (live, out)]
        change = compare_plans(*plans, CLUSTER)
        assert document["change"] == dataclasses.asdict(change)
        assert [p["planner"] for p in document["planners"]] == list(dict.fromkeys(["live", "eplb", planner]))
        assert change.describe() in said
        assert "vs live" in said
        if "--max-moves" in flags:
            assert change.moves <= int(flags[1])
        if "--migration-budget" in flags:
            assert 0 < change.seconds <= 0.02
        assert document["written"] == (planner if document["gain_shown"] else "live")
        if document["gain_shown"]:
            assert change.moves > 0
            assert "is paid back after" in said
        else:
            assert "no gain over the live plan is shown: the live plan is kept" in said
            assert out.read_bytes() == live.read_bytes()
        times.append(next(p["served_us"] for p in document["planners"] if p["planner"] == planner))
    if planner == "anneal":
        assert times[0] > times[1] > times[3]


def test_ctrl_c_writes_the_best_plan_so_far(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search would take ten minutes."""
    begin = plan_command.ProgressBar.begin

    def interrupted(self: plan_command.ProgressBar, step: str, seconds: float | None) -> None:
        begin(self, step, seconds)
        if step == "anneal":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(plan_command.ProgressBar, "begin", interrupted)
    before = signal.getsignal(signal.SIGINT)
    command = ["plan", str(trace_file), *SMALL[:-1], "600", "--planner", "anneal", "--json", str(tmp_path / "r.json")]
    assert cli.main([*command, "-o", str(tmp_path / "p.json")]) == 0
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["stopped"]
    assert [p["planner"] for p in document["planners"]] == ["static", "eplb", "anneal"]
    assert len(read_plan(tmp_path / "p.json", "sglang")) == 32
    assert "stopped by Ctrl-C: this is the best plan so far" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before


def test_command_plans_on_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = counts_trace().save(tmp_path / "counts.npz")
    report = tmp_path / "report.html"
    arguments = ["plan", str(source), *SMALL, "--planner", "eplb", "--report", str(report)]
    arguments += ["-o", str(tmp_path / "p.json")]
    assert cli.main(arguments) == 0
    assert "counts do not show the traffic" in " ".join(capsys.readouterr().out.split())
    assert '"exact":false' in report.read_text()
    assert cli.main(["plan", str(source), *SMALL, "--planner", "anneal", "-o", str(tmp_path / "q.json")]) == 2
    assert "counts only" in capsys.readouterr().err
    assert not (tmp_path / "q.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--planner", "magic"], "unknown planner 'magic'"),
        (["--planner", "oracle"], "makes no plan to load"),
        (["--engine", "tgi"], "unknown engine 'tgi'"),
        (["--engine", "tensorrt-llm"], r"tensorrt-llm reads a plan from \.yaml or \.yml"),
        (["--planner", "anneal-max"], "'anneal-max' was removed: use 'anneal'"),
        (["--report", "r.pdf"], r"expected a file that ends in \.html"),
        (["--model", "deepseek-v3"], "top-8 of 256"),
        (["--share", "1"], "share is 1.0"),
        (["--passes", "0"], "passes is 0"),
        (["--observe-tokens", "0"], "observe_tokens is 0"),
        (["--profile", "sglang"], "unknown profile 'sglang'; the profiles are: sglang-prefill"),
        (["--profile", "vllm"], "profile 'vllm' is of engine 'vllm', not of 'sglang'"),
        (["--slots", "0"], "slots_per_gpu is 0"),
        (["--max-moves", "3"], "--max-moves and --migration-budget need the live plan: give --from PLAN"),
        (["--from", "absent.json"], "no plan at absent.json"),
        (["--iterations", "0"], "--iterations is 0"),
        (["--seed", "-1"], "--seed is -1: expected 0 or more"),
        (["--seconds", "nan"], "--seconds is nan: expected more than 0"),
        (["--tokens-per-rank", "1000000"], "--tokens-per-rank is 1000000: expected 1 … 32768"),
        (["--slots", "100000"], "--slots is 100000, but mixtral-8x7b has 8 experts"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str], message: str, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    base = [] if "--planner" in arguments else ["--planner", "eplb"]
    assert cli.main(["plan", str(trace_file), *SMALL, *base, *arguments, "-o", "plan.json"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said
    assert not list(tmp_path.iterdir())


def test_few_tokens_with_the_loads_of_much_traffic(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = TokenTrace.load(trace_file), tmp_path / "plan.json"
    loads = LoadTrace(trace.loads(), trace.layer_ids, name="counts").save(tmp_path / "loads.npz")
    few = trace.split(0.5)[0].save(tmp_path / "few.npz")
    arguments = ["plan", "--loads", str(loads), "--tokens", str(few), *SMALL, "--planner", "eplb", "-o", str(out)]
    results = tmp_path / "r.json"
    assert cli.main([*arguments, "--json", str(results)]) == 0
    assert json.loads(results.read_text())["planned_on"].endswith("with the loads of loads")
    capsys.readouterr()
    assert cli.main([*arguments, str(trace_file)]) == 2
    assert "give one trace: TRACE, or --tokens TRACE" in capsys.readouterr().err
    assert cli.main(["plan", str(loads), "--loads", str(loads), *SMALL, "-o", str(out), "--model", "mixtral-8x7b"]) == 2
    assert "--loads needs tokens, but" in capsys.readouterr().err


def test_a_failing_report_says_that_the_plan_is_complete(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, report = tmp_path / "plan.json", tmp_path / "reports" / "r.html"
    shown = plan_command.explain

    def and_remove_the_folder(*args: Any) -> None:
        report.parent.rmdir()
        shown(*args)

    monkeypatch.setattr(plan_command, "explain", and_remove_the_folder)
    arguments = ["plan", str(trace_file), *SMALL, "--planner", "eplb", "-o", str(out), "--report", str(report)]
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert f"{out} is written and complete, but not its report: " in said
    assert str(report) in said
    assert len(read_plan(out, "sglang")) == 32


def test_trace_without_all_layers_is_refused_before_planning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clustergym.cli.plan.make_plan", lambda *_, **__: pytest.fail("planned anyway"))
    path = small_trace(n_layers=4).save(tmp_path / "t.npz")
    assert cli.main(["plan", str(path), *SMALL, "--planner", "eplb", "-o", str(tmp_path / "plan.json")]) == 2
    assert "rule 'every MoE layer': layer 4 has no placement (28 of 32" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "plan.json").exists()


def test_one_plan_for_both_phases_is_the_default(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 100 tokens 60 are decoded: 2 per rank and pass, and 8 in prefill."""
    out, results = tmp_path / "p.json", tmp_path / "r.json"
    command = ["plan", str(trace_file), *SMALL, "--decode-share", "0.6", "--iterations", "50", "-o", str(out)]
    assert cli.main([*command, "--json", str(results)]) == 0
    document = json.loads(results.read_text())
    assert document["served_as"] == "40 % sglang-prefill-start + 60 % sglang-decode-start"
    passes = {"sglang-prefill-start": 40 / 8, "sglang-decode-start": 60 / 2}
    for planner in document["planners"]:
        phases = planner["other_profiles_us"]
        mean = sum(n * phases[name] for name, n in passes.items()) / sum(passes.values())
        assert planner["served_us"] == pytest.approx(mean)
    assert "--deepep-mode auto" in " ".join(capsys.readouterr().out.split())
    assert cli.main([*command[:2], "--profile", "sglang-prefill", "--phase", "mixed", "-o", str(out)]) == 2


def test_verify_knows_what_a_plan_was_made_for(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    assert cli.main(["plan", str(trace_file), *SMALL, "--planner", "eplb", "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert cli.main(["verify", str(out)]) == 0
    again = capsys.readouterr().out
    load = next(line for line in said.splitlines() if line.startswith("load it with"))
    assert load in again
    assert "profile: 80 % sglang-prefill-start + 20 % sglang-decode-start" in again
    assert "mixtral-8x7b on h800-2x4" in again
    assert cli.main(["diff", str(out), str(out)]) == 0
    # Without --cluster, the plan that follows a live plan is for its cluster.
    follow = [flag for flag in SMALL if flag not in ("--cluster", "h800-2x4")]
    assert cli.main(["plan", str(trace_file), *follow, "--from", str(out), "-o", str(tmp_path / "n.json")]) == 0
    assert cli.main(["verify", str(tmp_path / "n.json")]) == 0
    out.write_text(out.read_text() + " ")
    assert cli.main(["verify", str(out)]) == 2
    assert "which has changed since" in " ".join(capsys.readouterr().err.split())
    Path(f"{out}.meta.json").unlink()
    assert cli.main(["verify", str(out)]) == 2
    assert "give --model and --cluster" in " ".join(capsys.readouterr().err.split())


def test_plan_for_lost_ranks_and_one_that_survives(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live, left, safe = (tmp_path / f"{name}.json" for name in ("live", "left", "safe"))
    small = [*SMALL, "--planner", "anneal", "--iterations", "10"]
    command = ["plan", str(trace_file), *small, "--slots", "4", "--survive", "1", "-o", str(safe)]
    assert cli.main(command) == 0
    assert "whatever single rank is lost. It costs" in " ".join(capsys.readouterr().out.split())
    for row in read_plan(safe, "sglang").values():
        slots = np.array(row).reshape(8, 4)
        assert all(set(np.delete(slots, gpu, 0).ravel().tolist()) == set(range(8)) for gpu in range(8))
    assert cli.main(["plan", str(trace_file), *small, "-o", str(live)]) == 0
    lost = ["plan", str(trace_file), *SMALL, "--from", str(live), "--without-ranks", "2,7", "-o", str(left)]
    assert cli.main(lost) == 0
    before = np.array(list(read_plan(live, "sglang").values())).reshape(32, 8, -1)
    after = np.array(list(read_plan(left, "sglang").values())).reshape(32, 6, -1)
    kept = np.delete(before, [2, 7], axis=1)
    missing = sum(8 - len(set(row.ravel().tolist())) for row in kept)
    assert int((after != kept).sum()) == missing
    assert f"{missing} experts have no copy on the 6 ranks" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["verify", str(left)]) == 0
    assert cli.main([*lost[:-4], "--without-ranks", "9", "-o", str(left)]) == 2
