"""The allocation task: errors, workload files, rules and the command line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from clustergym import gpu_allocation_v0
from clustergym.cli import main
from clustergym.gpu_allocation import (
    AllocationBatch,
    AllocationConfig,
    NodeMix,
    Workload,
    edge_mixes,
    fitted,
    read_openb,
    state,
    synthetic_workload,
)
from clustergym.gpu_allocation.environment import GPUAllocationEnv
from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, gap_closed, play, play_rules
from clustergym.gpu_allocation.rules import RULES, VPA, Proportional

IDS = ("GPUAllocation-v0", "GPUAllocationHistory-v0")
HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"


# Errors


def test_invalid_actions_raise() -> None:
    env = GPUAllocationEnv()
    env.reset(seed=1)
    with pytest.raises(ValueError, match=r"action of environment 0 is \[nan, 0.5\]: expected two finite numbers"):
        env.step(np.array([np.nan, 0.5], np.float32))
    with pytest.raises(ValueError, match=r"actions have shape \(1, 3\): expected \(1, 2\)"):
        env.step(np.zeros(3, np.float32))
    parallel = gpu_allocation_v0.parallel_env(n_nodes=2)
    parallel.reset(seed=1)
    with pytest.raises(ValueError, match="no action for 'node_1'"):
        parallel.step({"node_0": np.zeros(2, np.float32)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrivals": 0}, "arrivals is 0: expected 1"),
        ({"load": 0.0}, "load is 0.0: expected more than 0"),
        ({"owners": 65}, "owners is 65"),
        ({"unit_percent": -1.0}, "unit_percent is -1.0"),
        ({"pod_spread": math.nan}, "pod_spread is nan"),
        ({"idle_share": 1.5}, "idle_share is 1.5: expected 0 … 1"),
        ({"reward": "profit"}, "reward is 'profit': expected 'room' or 'seed'"),
        ({"render_mode": "ansi"}, "unknown render_mode 'ansi'"),
    ],
)
def test_invalid_options_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPUAllocationEnv(**options)  # type: ignore[arg-type]


def test_unknown_options_raise_a_type_error() -> None:
    message = "unexpected keyword argument 'speed'; the environment takes: arrivals,"
    vector = {"num_envs": 2, "vectorization_mode": "vector_entry_point"}
    for make in (
        GPUAllocationEnv,
        partial(gymnasium.make, IDS[0]),
        partial(gymnasium.make_vec, IDS[0], **vector),
        gpu_allocation_v0.parallel_env,
    ):
        with pytest.raises(TypeError, match=message):
            make(speed=3)


def test_invalid_mixes_and_workloads_raise() -> None:
    with pytest.raises(ValueError, match="expected 4 weights"):
        NodeMix(0.0, (1.0, 2.0))
    with pytest.raises(ValueError, match="n_nodes is 0"):
        edge_mixes(0)
    with pytest.raises(ValueError, match=r"pod 1 asks for 5.0 % of the GPU: expected 10 … 100"):
        Workload(np.array([50.0, 5.0]), np.ones(2), np.zeros(2, bool))
    with pytest.raises(ValueError, match=r"pod 0 lives -1.0 s"):
        Workload(np.array([50.0]), np.array([-1.0]), np.zeros(1, bool))
    with pytest.raises(ValueError, match="mixes has 2 entries for 3 environments"):
        AllocationBatch(num_envs=3, mixes=edge_mixes(2))


def openb_file(path: Path, *rows: str) -> Path:
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def test_read_openb(tmp_path: Path) -> None:
    rows = [
        "a,12000,16384,1,1000,,LS,Running,0,100,0",  # a whole GPU: skipped
        "b,6000,12288,1,460,,LS,Running,10,70,10",
        "c,6000,12288,0,0,,BE,Running,10,70,10",  # no GPU: skipped
        "d,6000,12288,1,50,,BE,Failed,0,30,1",  # raised to 10 %
        "e,6000,12288,1,810,,Burstable,Pending,5,5,",  # no lifetime: skipped
        "f,6000,12288,1,320,V100M16|V100M32,Guaranteed,Running,0,1e9,0",
    ]
    workload = read_openb(openb_file(tmp_path / "pods.csv", *rows))
    assert workload.cores.tolist() == [46.0, 10.0, 32.0]
    assert workload.life_s.tolist() == [60.0, 30.0, 1e9]
    assert workload.latency_sensitive.tolist() == [True, False, True]
    assert workload.jobs()[2, state.JOB_LIFE] == 4 * 3600, "lives are cut to four hours"
    env = gymnasium.make("GPUAllocation-v0", workload=tmp_path / "pods.csv")
    obs, _ = env.reset(seed=1)
    assert round(100 * float(obs[0])) in (46, 10, 32)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("b,6000,12288,1,lots,,LS,Running,10,70,10", "line 3: gpu_milli is 'lots': expected a number"),
        ("b,6000,12288,1,1200,,LS,Running,10,70,10", "line 3: gpu_milli is 1200: expected 0 … 1000"),
        ("b,6000,12288,-1,460,,LS,Running,10,70,10", "line 3: num_gpu is -1: expected 0 or more"),
        ("b,6000,12288,1,460,,Best,Running,10,70,10", "line 3: qos is 'Best': expected LS, Guaranteed, BE, Burstable"),
        ("b,6000,12288,1,460,,LS,Running,70,10,10", "line 3: deletion_time 10 is before creation_time 70"),
        ("b,6000,12288,1", "line 3: gpu_milli is None: expected a number"),
        ("b,6000,12288,1,460,,LS,Running,,70,10", "line 3: creation_time is '': expected a number"),
        ("b,6000,12288,1,nan,,LS,Running,10,70,10", "line 3: gpu_milli is nan: expected 0 … 1000"),
    ],
)
def test_errors_in_openb_files_name_the_line(tmp_path: Path, row: str, message: str) -> None:
    path = openb_file(tmp_path / "pods.csv", "a,12000,16384,1,470,,LS,Running,0,100,0", row)
    with pytest.raises(ValueError, match=message):
        read_openb(path)


def test_openb_files_without_columns_or_pods_raise(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("name,gpu\na,1\n")
    with pytest.raises(ValueError, match="line 1: no column 'num_gpu'"):
        read_openb(tmp_path / "x.csv")
    with pytest.raises(ValueError, match="no pod with a part of one GPU"):
        read_openb(openb_file(tmp_path / "y.csv", "a,12000,16384,1,1000,,LS,Running,0,100,0"))
    with pytest.raises(FileNotFoundError):
        AllocationBatch(AllocationConfig(workload=tmp_path / "none.csv"))


def test_distribution_of_the_synthetic_workload() -> None:
    workload = synthetic_workload()
    assert len(workload.cores) == 3077
    assert np.median(workload.cores) == 47.0
    assert workload.latency_sensitive.sum() == 759
    for kind in (False, True):
        life = workload.life_s[workload.latency_sensitive == kind]
        assert np.median(life) == pytest.approx(fitted.MEDIAN_LIFE_S[kind], rel=0.01)
        assert np.log(life).std() == pytest.approx(fitted.LIFE_SPREAD[kind], abs=0.01)
    jobs = workload.jobs()
    assert (np.diff(jobs[:, state.JOB_SENSITIVE]) >= 0).all(), "best-effort pods first"


# Rules


def test_no_action_has_a_higher_reward_than_the_oracle() -> None:
    """Tries every unit of cores in copies of the same state."""
    config = AllocationConfig(history=True, load=5.0, reward="seed")
    batch = AllocationBatch(config, 16)
    batch.seed(np.arange(16))
    batch.reset()
    for _ in range(12):
        batch.step(batch.oracle())
    saved, memory = batch.get_state(), batch.oracle()[:, 1]
    best = np.full(16, -np.inf)
    for level in range(10, 101):
        batch.set_state(saved)
        action = np.stack([np.full(16, (level - 10) / 90), np.ones(16)], 1)
        best = np.maximum(best, batch.step(action)[1])
    batch.set_state(saved)
    np.testing.assert_allclose(batch.step(batch.oracle())[1], best, atol=1e-6)
    assert (memory < 1).all()


@pytest.mark.parametrize(("name", "share"), [("cut-0.9", 0.9), ("cut-0.8", 0.8)])
def test_a_cut_grants_a_share_of_the_cores_and_all_of_the_memory(name: str, share: float) -> None:
    batch = AllocationBatch(AllocationConfig(), 64)
    batch.reset()
    cores, memory = (batch.state.ask[:, column].copy() for column in (state.ASK_CORES, state.ASK_MEMORY))
    batch.step(RULES[name](batch).act())
    # Whole percents, rounded up; nobody gets less than 10 %.
    expected = np.maximum(np.ceil(share * cores.astype(float) - 1e-6), 10.0)
    np.testing.assert_allclose(batch.outcome[:, state.OUTCOME_CORES], expected)
    np.testing.assert_array_equal(batch.outcome[:, state.OUTCOME_MEMORY], memory)


def test_vpa_recommends_the_percentile_plus_margin() -> None:
    """Ten samples, 5 % … 50 %: P90 is the upper end of the bucket of 45 %, plus 15 %. OOM kills raise the memory."""
    batch = AllocationBatch(AllocationConfig(history=True, owners=2), 1)
    batch.reset()
    rule = VPA(batch)
    batch.state.ask[0, state.ASK_CORES], batch.state.ask[0, state.ASK_MEMORY] = 100.0, 32768.0
    batch.state.ask[0, state.ASK_OWNER] = 1
    assert rule.decide()[0][0] == 100, "the request of a new owner is granted"
    out = batch.outcome[0]
    out[state.OUTCOME_OWNER], out[state.OUTCOME_USED_MB] = 1, 1000.0
    for usage in range(5, 51, 5):
        out[state.OUTCOME_USAGE] = usage
        rule.learn()
    cores, memory = rule.decide()
    assert 1.15 * 45 <= cores[0] <= 1.15 * 45 * 1.05
    assert 1150 <= memory[0] <= 1150 * 1.05 + 1
    batch.state.ask[0, state.ASK_OWNER] = 0
    assert rule.decide()[0][0] == 100, "each owner has a histogram"
    killed = VPA(batch)
    out[state.OUTCOME_OWNER], out[state.OUTCOME_OOM] = 0, 1.0
    killed.learn()
    assert 1.15 * 1200 <= killed.decide()[1][0] <= 1.15 * 1200 * 1.05 + 1
    assert killed.decide()[0][0] == 100, "a killed pod adds no sample of cores"


def test_vpa_weights_halve_per_day() -> None:
    batch = AllocationBatch(AllocationConfig(), 1)
    batch.reset()
    rule, out = VPA(batch), batch.outcome[0]
    out[state.OUTCOME_USAGE], out[state.OUTCOME_TIME] = 80.0, 0.0
    rule.learn()
    out[state.OUTCOME_USAGE], out[state.OUTCOME_TIME] = 20.0, 4 * 24 * 3600.0  # four half-lives: 16 times the weight
    rule.learn()
    batch.state.ask[0, state.ASK_CORES] = 100.0
    assert 1.15 * 20 <= rule.decide()[0][0] <= 1.15 * 20 * 1.05


def test_proportional_controller_and_its_dead_band() -> None:
    batch = AllocationBatch(AllocationConfig(), 1)
    batch.reset()
    rule, out = Proportional(batch), batch.outcome[0]
    batch.state.ask[0, state.ASK_CORES] = 100.0
    # 42 of 50 are 84 %, within 10 % of 90 %: no change.
    for usage, met, expected in ((42.0, 1.0, 50.0), (28.0, 1.0, 28 / 0.9), (50.0, 0.0, 50 / 0.9)):
        out[state.OUTCOME_CORES], out[state.OUTCOME_USAGE], out[state.OUTCOME_MET] = 50.0, usage, met
        rule.learn()
        assert rule.decide()[0][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", IDS)
def test_ranking_of_the_rules(name: str) -> None:
    """The oracle is best, grant rarely misses, and rules that measure usage are more efficient."""
    batch = AllocationBatch(AllocationConfig(history=name == IDS[1]), 64)
    results = play_rules(batch)
    assert set(results) == set(RULES)
    assert max(results, key=lambda rule: results[rule]["reward"]) == "oracle"
    assert results["grant"]["qos"] > 0.99
    assert results["cut-0.8"]["efficiency"] > results["grant"]["efficiency"] + 0.03
    assert results["vpa-fraction"]["efficiency"] > results["cut-0.8"]["efficiency"]
    assert max(gap_closed(results[rule]["reward"], results) for rule in RULES if rule != "oracle") == 0
    assert results["oracle"]["wait_s"] < results["vpa-fraction"]["wait_s"] < results["grant"]["wait_s"]
    assert gap_closed(results["oracle"]["reward"], results) == 1
    again = play(batch, RULES["grant"](batch).act)
    assert again == results["grant"], "all rules see the same streams"


# Command line


def test_eval_writes_a_table_figures_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    command = ["eval", "--task", "gpu-allocation", "--env-id", IDS[0], "--streams", "16", "--seed", "3"]
    assert main([*command, "--json", str(out), "--plot", str(tmp_path / "bars.png")]) == 0
    document = json.loads(out.read_text())
    assert {row["policy"] for row in document["policies"]} == set(RULES)
    for row in document["policies"]:
        assert {"reward", "qos", "efficiency", "oom", "monopoly", "wait_s", "reward_ci95", "gap_closed"} <= row.keys()
    assert (document["env_id"], document["streams"], document["seed"]) == (IDS[0], 16, 3)
    assert (tmp_path / "bars.png").stat().st_size > 5000
    assert "oracle" in capsys.readouterr().out
    direct = play_rules(AllocationBatch(num_envs=16), ["grant"], HELD_OUT_SEED + 3 * 2**20)["grant"]
    assert next(r for r in document["policies"] if r["policy"] == "grant")["reward"] == direct["reward"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env-id", "CartPole-v1"], "unknown --env-id 'CartPole-v1'"),
        (["--policy", "luck"], "unknown policy 'luck'; the rules are: grant"),
        (["--streams", "0"], "--streams is 0"),
        (["--checkpoint", "nowhere.pt"], "no checkpoint at"),
        (["--plot", "bars.txt"], "expected a file that ends in .png"),
    ],
)
def test_eval_reports_invalid_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--task", "gpu-allocation", "--streams", "2", *flags]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_reward_and_history_import_no_heavy_package() -> None:
    """An agent on a node imports them without torch and numba."""
    code = (
        "import sys; from clustergym.gpu_allocation import compute_reward, history, transform_action; "
        "heavy = {'torch', 'numba', 'pygame', 'scipy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
