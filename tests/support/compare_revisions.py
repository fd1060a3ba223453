"""Compare this checkout with another revision: same seeds must give the same numbers, bit for bit.

    python tests/support/compare_revisions.py c5aa54c  # environments, planners and one short run of every trainer
    python tests/support/compare_revisions.py HEAD~3 --only env  # only the parts whose name contains "env"

Both sides run on this machine, because floating-point results differ between machines. Only the public API and the
command line are used, so the script works across a change of the inside. Exit code 1 means that something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]

TRAINERS: dict[str, tuple[str, ...]] = {
    "ppo": ("--total-timesteps", "1024", "--num-envs", "4", "--num-steps", "64"),
    "ppo_lstm": ("--total-timesteps", "4096",),
    "ppo_gpu_alloc": ("--total-timesteps", "16384",),
    "ppo_atari": ("--total-timesteps", "128", "--num-envs", "2", "--num-steps", "32"),
    "ppo_federated": ("--total-timesteps", "1024",),
    "ppo_llm": (
        "--pretrain-steps", "4", "--total-timesteps", "160", "--batch-size", "8", "--prompt-tokens", "8",
        "--response-tokens", "10", "--eval-episodes", "16",
    ),
    "ppo_moe_marl": ("--total-timesteps", "8192", "--env-args", "tokens_per_rank=32"),
}  # fmt: skip
"""Flags of a short run."""
NEW_FLAGS: dict[str, dict[str, str]] = {}
"""Flags of a trainer that were renamed: old name to new name, used on the newer side only."""
TIMES = ("seconds", "steps_per_s", "per_s", "time", "_ms", "checkpoint", "run_dir", "policy_file", "model")


# What runs on one side


def digest(*parts: Any) -> str:
    """A short hash of arrays, numbers and dicts of them."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, dict):
            for key in sorted(part, key=str):
                found.update(str(key).encode())
                add(part[key])
        elif isinstance(part, (list, tuple)):
            for each in part:
                add(each)
        else:
            array = np.asarray(part)
            found.update(
                str(array.dtype).encode() + (repr(part).encode() if array.dtype == object else array.tobytes())
            )

    for part in parts:
        add(part)
    return found.hexdigest()[:16]


def rollout(env: Any, steps: int, rng: np.random.Generator) -> str:
    """Random legal actions in a Gymnasium environment."""
    seen = [env.reset(seed=3)[0]]
    for _ in range(steps):
        obs = seen[-1]
        if isinstance(obs, dict):
            action = rng.choice(np.argwhere(obs["action_mask"]))
        else:
            action = rng.random(env.action_space.shape).astype(np.float32)
        found = env.step(action)
        seen.extend([found[0], {"reward": found[1], "done": found[2], "info": found[4]}])
        last = found[0]
        if found[2] or found[3]:
            last = env.reset()[0]
        seen.append(last)
    return digest(seen)


def environments() -> dict[str, str]:
    import gymnasium

    import clustergym  # registers the ids
    from clustergym import gpu_allocation_v0, moe_placement_v0

    assert clustergym
    found = {}
    for key, name, steps, options in (
        ("MoEPlacement-v0", "MoEPlacement-v0", 80, {}),
        ("MoEPlacement-v0 token hash", "MoEPlacement-v0", 60, {"profile": "vllm-deepep"}),
        ("MoEPlacement-v0 decode", "MoEPlacement-v0", 60, {"profile": "sglang-decode"}),
        ("MoEPlacement-v0 lookahead", "MoEPlacement-v0", 20, {"lookahead": True, "tokens_per_rank": 32}),
        ("MoEPlacementDrift-v0", "MoEPlacementDrift-v0", 300, {"tokens_per_rank": 32, "ops_per_layer": 4}),
        ("MoEPlacementDrift-v0 stream", "MoEPlacementDrift-v0", 300,
         {"tokens_per_rank": 32, "ops_per_layer": 2, "schedule": "switch"}),
        ("MoEPlacement-v0 synthetic", "MoEPlacement-v0", 60, {"trace": "synthetic", "cluster": "h800-2x8"}),
        ("GPUAllocation-v0", "GPUAllocation-v0", 300, {}),
        ("GPUAllocationHistory-v0", "GPUAllocationHistory-v0", 300, {}),
    ):  # fmt: skip
        found[f"env {key}"] = rollout(gymnasium.make(name, **options), steps, np.random.default_rng(5))
    for name, options in (
        ("MoEPlacementDrift-v0", {"tokens_per_rank": 32, "ops_per_layer": 2}),
        ("GPUAllocation-v0", {}),
    ):
        env = gymnasium.make_vec(name, num_envs=8, vectorization_mode="vector_entry_point", **options)
        env.action_space.seed(7)
        seen = [env.reset(seed=3)[0]]
        for _ in range(100):
            obs, reward, done, _, _ = env.step(env.action_space.sample())
            seen.append({"obs": dict(obs) if isinstance(obs, dict) else obs, "reward": reward, "done": done})
        found[f"env vector {name}"] = digest(json.loads(json.dumps(seen, default=lambda x: x.tolist())))
    for name, module, options in (
        ("moe_placement_v0", moe_placement_v0, {"tokens_per_rank": 32}),
        ("gpu_allocation_v0", gpu_allocation_v0, {}),
    ):
        env = module.parallel_env(**options)
        observations, _ = env.reset(seed=3)
        for agent in env.possible_agents:
            env.action_space(agent).seed(11)
        seen = [dict(observations)]
        for _ in range(60):
            actions = {
                agent: env.action_space(agent).sample(
                    observations[agent].get("action_mask") if isinstance(observations[agent], dict) else None
                )
                for agent in env.agents
            }
            observations, rewards, terminations, _, _ = env.step(actions)
            seen.append({"obs": dict(observations), "rewards": rewards, "ends": terminations})
            if not env.agents:
                break
        found[f"env parallel {name}"] = digest(seen)
    return found


def planners(folder: Path) -> dict[str, str]:
    """The table of ``clustergym eval`` without its times."""
    out = folder / "eval.json"
    names = ("static", "eplb", "eplb-hierarchical", "flashlb", "swift", "affinity-groups", "greedy", "anneal", "oracle")
    command = [
        sys.executable, "-c", "from clustergym.cli import main; main()", "eval", "--trace", "tiny_moe",
        "--layers", "0", "1", "--streams", "2", "--intervals", "3", "--tokens-per-rank", "32", "--schedule", "drift",
        "--planner", *names, "--json", out,
    ]  # fmt: skip
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    rows = json.loads(out.read_text())["planners"]
    return {f"planner {row['planner']}": digest(row["stream_totals_us"], row["interval_totals_us"]) for row in rows}


def trainer(name: str, flags: tuple[str, ...], tree: Path, folder: Path) -> dict[str, str]:
    """Weights in the checkpoint, and the result line."""
    import torch

    run = folder / name
    command = [sys.executable, tree / "cleanrl_ppo" / f"{name}.py", *flags, "--run-dir", run, "--seed", "3"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    tensors: list[str] = []

    def collect(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            tensors.append(digest(part.cpu().numpy()))
        elif isinstance(part, (dict, list, tuple)):
            for each in part.values() if isinstance(part, dict) else part:
                collect(each)

    for path in sorted(run.rglob("checkpoint*.pt")):
        collect(torch.load(path, weights_only=True)["state"])
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("result "))
    kept = {key: value for key, value in result.items() if not any(word in key for word in TIMES)}
    kept = {key: value for key, value in kept.items() if "/" not in str(value)}
    return {
        f"trainer {name} weights": digest(sorted(tensors)),
        f"trainer {name} result": json.dumps(kept, sort_keys=True),
    }


def one_side(tree: Path, only: str, renamed: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if not only or only in "environments":
            found |= environments()
        if not only or only in "planners":
            found |= planners(Path(scratch))
        for name, flags in TRAINERS.items():
            if only == name if only in TRAINERS else only in f"trainer {name}":
                new = NEW_FLAGS.get(name, {}) if renamed else {}
                found |= trainer(name, tuple(new.get(flag, flag) for flag in flags), tree, Path(scratch))
    return found


# Both sides


def run_side(tree: Path, only: str, renamed: bool) -> dict[str, str]:
    command = [sys.executable, __file__, "--side", str(tree), "--only", only, *(["--renamed"] if renamed else [])]
    environment = os.environ | {"PYTHONPATH": str(tree / "envs"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="the other revision, or a folder that holds a checkout of it")
    parser.add_argument("--only", default="", help="part: environments, planners, or a trainer's name")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--renamed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        print(json.dumps(one_side(args.side, args.only, args.renamed)))
        return
    if args.revision is None:
        parser.error("name the other revision")
    with tempfile.TemporaryDirectory() as scratch:
        other = Path(args.revision)
        if not (other / "envs").is_dir():
            other = Path(scratch) / "other"
            subprocess.run(["git", "worktree", "add", "--detach", str(other), args.revision], cwd=ROOT, check=True)
        try:
            before, after = run_side(other, args.only, False), run_side(ROOT, args.only, True)
        finally:
            if other.is_relative_to(scratch):
                subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)
    for key in sorted(before | after):
        same = before.get(key) == after.get(key)
        print(
            f"{'same' if same else 'DIFFERS'}  {key}" + ("" if same else f"\n  {before.get(key)}\n  {after.get(key)}")
        )
    sys.exit(before != after)


if __name__ == "__main__":
    main()
