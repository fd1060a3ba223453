"""The benchmark of expert offloading: what is served, and who takes part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clustergym.bench.entries import Entry, named_entries, parse_entries, sees_the_future
from clustergym.bench.run_task import TaskResult, run_task
from clustergym.bench.suites import OffloadTask, load_suite
from clustergym.moe_offload.evaluation import make_environment, play
from clustergym.moe_offload.rules import RULES, Workload, start_values
from clustergym.moe_offload.simulator import build_task, parts_of
from clustergym.training.policies import export_policy

LIGHT = str(Path(__file__).parents[1] / "support" / "bench_limits.py")
SECRET = b"a secret of the tests"
OPTIONS = {"slots": 0.375, "per_layer": False, "gpus": 1, "batch": 1, "link": "pcie5", "expert_mb": 13.2}
TASK = OffloadTask("t", "MoEOffload-v0", "tiny_decode", "", 2, 3, options=OPTIONS, evaluations=1)


def result(kind: str, target: str, task: OffloadTask = TASK, env_id: str = "MoEOffload-v0") -> TaskResult:
    return run_task(task, Entry(kind, target, env_id))  # type: ignore[arg-type]


def test_scores_are_the_share_of_the_stall_of_lru_on_the_same_sequence() -> None:
    found = result("named", "static-popular")
    config = TASK.config
    workload = Workload(build_task(config), config.trace, config.fit_on)
    stalls = {name: workload.run(RULES[name], start_values(RULES[name])).stall_ms for name in ("lru", "static-popular")}
    assert found.scores == pytest.approx((1 - stalls["static-popular"] / stalls["lru"]).tolist())
    assert found.reference["lru_ms"] == pytest.approx(stalls["lru"].tolist())
    assert result("named", "lru").scores == [0.0, 0.0]
    assert found.metrics["stall_ms_per_token"] == pytest.approx(stalls["static-popular"].sum() / 6)
    belady = Entry("named", "belady")
    assert min(run_task(TASK, belady).scores) > 0
    assert sees_the_future(belady, "offload")
    assert not sees_the_future(Entry("policy", "runs/x"), "offload")


def test_tracks_serve_sequences_of_their_splits() -> None:
    """The secret decides which test sequences are served."""
    tasks = [TASK, TASK.on_track(None), *(TASK.on_track(s) for s in (SECRET, SECRET, b"another secret, long"))]
    served = [task.config.trace.experts.tobytes() for task in tasks]
    assert served[0] == served[1]
    assert served[2] == served[3]
    assert len(set(served)) == 3
    parts = parts_of(TASK.load())
    for task, split in zip(tasks, ("validation", "validation", "test", "test", "test"), strict=True):
        own = {x.tobytes() for x in np.split(parts[split].experts, parts[split].seq_starts[1:])}
        trace = task.config.trace
        assert {x.tobytes() for x in np.split(trace.experts, trace.seq_starts[1:])} <= own
    for secret in (None, SECRET):
        for task in load_suite("offload-v1").on_track(secret).tasks:
            assert isinstance(task, OffloadTask)
            assert task.config.trace.n_sequences == task.streams * task.options["batch"]
    with pytest.raises(ValueError, match="task t needs 999 sequences, but validation has 89"):
        _ = replace(TASK, streams=999).config


def first_legal_stalls(env_id: str) -> list[float]:
    """The stall of the first legal action, played without the benchmark."""
    config = TASK.config
    workload = Workload(build_task(config), config.trace, config.fit_on)
    options = OPTIONS | {"trace": config.trace, "split": "all", "fit_on": config.fit_on, "max_tokens": 3}
    env = make_environment(env_id, 1, **options)

    def act(obs: dict[str, np.ndarray]) -> np.ndarray:
        return np.argwhere(obs["action_mask"][0])[:1]

    return play(env, act, workload).stall_ms.tolist()


def test_submitted_agents_act_in_any_form_of_the_environment() -> None:
    """Their failures end the visit or evict the first row, and are counted."""
    found = result("agent", f"{LIGHT}:first_legal")
    assert found.reference["entry_ms"] == pytest.approx(first_legal_stalls("MoEOffload-v0"))
    assert not found.failures
    # The number 0 is legal when a visit can be ended, and refused by the environment when an eviction is due.
    flat = result("agent", f"{LIGHT}:always_zero", replace(TASK, streams=1, max_tokens=1), "MoEOffloadFlat-v0")
    assert len(flat.scores) == 1
    assert not flat.failures
    with pytest.raises(ValueError, match="most actions fail, the last one: KeyError: 'no such key'"):
        result("agent", f"{LIGHT}:no_such_key")


class LeastUsed(torch.nn.Module):
    """Evicts the row with the lowest count; never prefetches."""

    def forward(self, obs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        mask = obs["action_mask"] == 1
        rows = torch.where(mask.any(-1), -obs["experts"][..., 10], -1e8)
        return rows, torch.where(mask, torch.tensor([1.0, 0.0, 2.0]), -1e8)


def test_policies_of_run_folders_and_random_networks(tmp_path: Path) -> None:
    env = make_environment("MoEOffload-v0", 2)
    obs = {name: torch.from_numpy(array) for name, array in env.reset(seed=0)[0].items()}
    export_policy(tmp_path / "policy.onnx", LeastUsed(), obs, {"env_id": "MoEOffload-v0", "env_args": {}})
    (entry,) = parse_entries("offload", [], [str(tmp_path)])
    assert (entry.kind, entry.env_id) == ("policy", "MoEOffload-v0")
    found, hashed = run_task(TASK, entry), entry.code_sha256
    assert min(found.scores) > min(result("named", "random-networks").scores)
    assert found.metrics["prefetches_per_token"] == 0
    (tmp_path / "policy.onnx").write_bytes(b"another policy")
    assert entry.code_sha256 != hashed


def test_entries_of_the_command_line() -> None:
    names = {entry.target for entry in parse_entries("offload", ["all"], [])}
    assert {"lru", "belady", "random-networks"} <= names
    assert not names & {"next-use", "shipped"}
    assert set(named_entries("offload")) >= names | {"next-use", "shipped"}
    with pytest.raises(ValueError, match="--planner next-use: give --predictor DIR"):
        parse_entries("offload", ["next-use"], [])
    with pytest.raises(ValueError, match="unknown rule 'best'; the rules are: "):
        parse_entries("offload", ["best"], [])
