"""The wheel works from an empty folder, in an environment without the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import clustergym
from clustergym import TokenTrace
from doc_commands import blocks

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, warnings
warnings.simplefilter("error")
import gymnasium
env = gymnasium.make("clustergym:MoEPlacement-v0", tokens_per_rank=4, ops_per_layer=1)
obs, _ = env.reset(seed=1)
total = 0.0
for _ in range(3):
    obs, reward, *_ , info = env.step([0, 15])
    total += reward
import clustergym
from clustergym import TokenTrace
print(clustergym.__file__)
print(TokenTrace.load("synthetic"))
print(obs["expert_graph"].shape, total != 0, bool(info["legal"]))
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    found = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, f"{command}\n{found.stdout}\n{found.stderr}"
    return found.stdout


UNTRACKED = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", "runs", "dist", "*.egg-info", ".*_cache", ".hypothesis"
)


def build_wheel(tree: Path, out: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tree, cwd=tree.parent)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy without untracked folders, so that nothing is written to the checkout."""
    tree = tmp_path_factory.mktemp("tree") / "clustergym"
    shutil.copytree(ROOT, tree, ignore=UNTRACKED)
    return build_wheel(tree, tmp_path_factory.mktemp("dist"))


def copy_as_docker(instruction: str, context: Path, image: Path) -> None:
    """``COPY source … target``: a folder gives its content, and a target that ends with / is a folder."""
    *sources, target = instruction.split()
    for source in sources:
        if (context / source).is_dir():
            shutil.copytree(context / source, image / target, ignore=UNTRACKED, dirs_exist_ok=True)
            continue
        file = image / target / Path(source).name if target.endswith("/") else image / target
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(context / source, file)


def test_the_first_stage_of_the_image_copies_all_that_the_wheel_needs(wheel: Path, tmp_path: Path) -> None:
    first_stage = re.split("^FROM ", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.MULTILINE)[1]
    copies = re.findall("^COPY (.+)$", first_stage, re.MULTILINE)
    assert copies
    for instruction in copies:
        copy_as_docker(instruction, ROOT, tmp_path / "src")
    in_image = build_wheel(tmp_path / "src", tmp_path / "dist")
    assert set(zipfile.ZipFile(in_image).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_contains_only_the_package_and_its_traces(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"clustergym/__init__.py", "clustergym/py.typed", "clustergym/traces/bundled/synthetic.npz"} <= set(names)
    bundled = {f"clustergym/traces/bundled/{path.name}" for path in (ROOT / "traces").glob("*.npz")}
    assert {
        name for name in names if name.startswith("clustergym/traces/bundled/") and name.endswith(".npz")
    } == bundled
    assert not [name for name in names if "/bundled/" in name and name.endswith(".py")]
    modules = {f"clustergym/{path.relative_to(ROOT / 'envs/clustergym')}" for path in (ROOT / "envs").rglob("*.py")}
    assert modules <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"clustergym"}
    assert not [
        name for name in names if "test" in name or "benchmark" in name or name.endswith((".nbi", ".nbc", ".pyc"))
    ]


def test_the_wheel_works_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    venv, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=empty).strip())
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=empty)
    # Use the dependencies of this environment without its editable install: nested .pth files are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # Compiling takes a minute and is tested elsewhere.
    lines = run(python, "-c", PROGRAM, cwd=empty, NUMBA_DISABLE_JIT="1", OMP_NUM_THREADS="1").splitlines()
    assert Path(lines[0]) == site / "clustergym" / "__init__.py"
    assert lines[1] == repr(TokenTrace.load("synthetic"))
    assert lines[2] == "(64, 64) True True"
    quickstart = blocks(ROOT / "README.md", "python")[0]
    small = quickstart.replace('Flat-v0"', 'Flat-v0", max_tokens=1')
    assert small != quickstart
    output = run(python, "-c", small, cwd=empty, NUMBA_DISABLE_JIT="1", OMP_NUM_THREADS="1")
    assert "ms per token of waiting for experts" in output
    assert not list(empty.iterdir())


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert clustergym.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} - 20" in (ROOT / "CHANGELOG.md").read_text()
    images = re.findall(
        r"clustergym/clustergym:(\S+)", "".join(p.read_text() for p in (ROOT / "deploy").rglob("*.yaml"))
    )
    assert set(images) == {version}
    assert f"newTag: {version}\n" in (ROOT / "deploy" / "base" / "kustomization.yaml").read_text()


@pytest.mark.parametrize("name", ["ci", "release"])
def test_the_workflows_call_what_exists(name: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    commands = "\n".join(step.get("run", "") for job in workflow["jobs"].values() for step in job.get("steps", []))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([\w-]+)$", commands, re.MULTILINE)) <= set(targets)
    assert {job["needs"] for job in workflow["jobs"].values() if "needs" in job} <= set(workflow["jobs"])
