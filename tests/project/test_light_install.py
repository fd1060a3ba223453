"""The core works without any extra, and whatever needs one says which in one line.

Each test runs a subprocess in which the optional packages cannot be imported, as if they were not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = (
    "cryptography", "fastapi", "httpx", "matplotlib", "moviepy", "numba_cuda", "optuna", "prometheus_client",
    "pygame", "pynvml", "ray", "safetensors", "stable_baselines3", "tensorboard", "torch", "torch_geometric",
    "transformers", "uvicorn", "wandb", "yaml",
)  # fmt: skip

BLOCK = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""

SMALL = ["--trace", "synthetic", "--cluster", "h800-1x8", "--layers", "0", "--tokens-per-rank", "8", "--intervals", "2"]


def run(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def run_command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run("import clustergym.cli\nsys.exit(clustergym.cli.main())\n", *arguments, folder=folder)


def test_the_core_dependencies_are_few() -> None:
    names = {requirement.partition(">=")[0] for requirement in PROJECT["dependencies"]}
    assert names == {"gymnasium", "pettingzoo", "numpy", "numba", "scipy", "tyro", "rich"}


def test_dev_installs_every_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    (own,) = [requirement for requirement in extras["dev"] if requirement.startswith("clustergym[")]
    assert set(own.removeprefix("clustergym[").removesuffix("]").split(",")) == set(extras) - {"dev"}


def test_the_blocker_blocks(tmp_path: Path) -> None:
    code = f"""
for name in {OPTIONAL!r}:
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error)
"""
    result = run(code, folder=tmp_path)
    assert result.stdout.splitlines() == [f"No module named {name!r}" for name in OPTIONAL]


def test_every_kind_of_environment_runs_without_extras(tmp_path: Path) -> None:
    """One id of each class: tests/moe_placement/test_ids.py runs all of them."""
    code = """
import gymnasium, clustergym
specs = [spec for spec in gymnasium.registry.values() if str(spec.entry_point).startswith("clustergym.")]
ids = {(spec.entry_point, "history" in spec.kwargs): spec.id for spec in reversed(specs)}.values()  # the first of each
for name in ids:
    small = {"tokens_per_rank": 4, "ops_per_layer": 1} if name.startswith("MoEPlacement") else {}
    if name.startswith("MoEOffload"):
        small = {"max_tokens": 1}
    env = gymnasium.make(name, **small)
    env.reset(seed=0)
    env.step(env.action_space.sample())
    envs = gymnasium.make_vec(name, 2, **small)
    envs.reset(seed=0)
    envs.step(envs.action_space.sample())
for module in (clustergym.moe_placement_v0, clustergym.moe_offload_v0, clustergym.gpu_allocation_v0):
    env = module.parallel_env()
    env.reset(seed=0)
print(len(ids))
"""
    result = run(code, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 6


def test_only_modules_that_train_or_serve_a_network_need_torch(tmp_path: Path) -> None:
    code = """
import importlib, pkgutil, clustergym
for found in pkgutil.walk_packages(clustergym.__path__, "clustergym."):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            print(found.name.removeprefix("clustergym."))
    except ImportError:
        pass
"""
    found = run(code, folder=tmp_path).stdout.split()
    may = ("agent.", "common.checkpoints", "common.cuda_grid", "gpu_allocation.policy", "moe_offload.improvement",
           "moe_offload.predictor", "plans.integrations.", "sb3", "traces.readers.torch_files", "traces.record",
           "training.")  # fmt: skip
    assert [name for name in found if not name.startswith(may) and not name.endswith("launchers.cuda")] == []
    assert "moe_offload.predictor" in found


def test_planners_run_without_extras(tmp_path: Path) -> None:
    result = run_command("eval", *SMALL, "--planner", "static", "eplb", "anneal", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "eplb" in result.stdout


def test_offloading_rules_run_without_extras(tmp_path: Path) -> None:
    small = ["--tune-tokens", "200", "--tokens", "100", "--evaluations", "2"]
    result = run_command("offload", "eval", "--policy", "lru", *small, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "lru" in result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["eval", "--help"], ["trace", "info", "synthetic"]])
def test_commands_run_without_extras(arguments: list[str], tmp_path: Path) -> None:
    result = run_command(*arguments, folder=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (["eval", *SMALL, "--plot", "a.png"], "matplotlib", "render"),
        (["eval", "--task", "gpu-allocation", "--plot", "a.png"], "matplotlib", "render"),
        (["webhook"], "cryptography", "agent"),
        (["sweep", "run", str(ROOT / "sweeps" / "ppo.yaml")], "ray.tune", "sweep"),
        (["trace", "record", "--model", "m", "--text", "a.txt", "-o", "a.npz"], "transformers", "record"),
        (["offload", "fit"], "torch", "train"),
        (["offload", "eval", "--policy", "random-networks"], "torch", "train"),
        (["trace", "import", "dump.pt", "-o", "a.npz"], "torch", "engines"),
        (["trace", "import", "rank0.safetensors", "--n-experts", "8", "-o", "a.npz"], "safetensors", "engines"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_a_command_names_the_extra_that_it_needs(arguments: list[str], module: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / "rank0.safetensors").touch()
    (tmp_path / "dump.pt").touch()
    result = run_command(*arguments, folder=tmp_path)
    assert result.stderr == f"error: {module} is not installed: pip install 'clustergym[{extra}]'\n"
    assert result.returncode == 2


@pytest.mark.parametrize("name", ["MoEPlacement-v0", "GPUAllocation-v0"])
def test_rendering_names_its_extra(name: str, tmp_path: Path) -> None:
    code = f"""
import gymnasium
env = gymnasium.make("clustergym:{name}", render_mode="rgb_array")
env.reset(seed=0)
env.render()
"""
    result = run(code, folder=tmp_path)
    assert result.stderr.splitlines()[-1].endswith("pygame is not installed: pip install 'clustergym[render]'")
