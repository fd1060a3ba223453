"""Every command and every program of the README runs, with smaller numbers where it would take long.

A command that is not in the table below fails the test, so a new one needs an entry.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustergym import cli
from doc_commands import ROOT, blocks, commands, words_of

README = ROOT / "README.md"
DATA = ROOT / "docs" / "results" / "data"
SMALL = ["--tokens-per-rank", "8", "--passes", "1"]
SHORT_TRAINING = (
    "--total-timesteps 128 --num-envs 8 --num-steps 8 --num-minibatches 2 --eval-interval 1 --eval-episodes 2 "
    "--env-args max_tokens=4"
)
QUICK: dict[str, list[str]] = {
    "clustergym plan tiny_moe --cluster h800-4x4 --engine sglang --seconds 10 -o plan.json --report report.html": [
        "--seconds", "0.2", "--plan-passes", "4", *SMALL,
    ],
    "clustergym verify plan.json --model tiny-moe --cluster h800-4x4": [],
    "clustergym offload eval tiny_decode --policy rules bounds --plot memory.png": [
        "--tokens", "200", "--tune-tokens", "300", "--evaluations", "1",
    ],
    "clustergym bench run placement-v2 --planner eplb anneal --quick": ["--task", "small-2x8-decode-drift"],
}  # fmt: skip
"""Commands that run in this process, and the flags that make them short."""
ELSEWHERE = {
    'pip install ".[train]"': "test_pip_resolves_the_extras",
    "make train": "test_make_train",
    "make test": "test_make_test_runs_all_linters_and_the_suite",
    "python cleanrl_ppo/ppo.py --env-id CartPole-v1 --seed 1": "test_ppo_trains",
    "python cleanrl_ppo/ppo_moe_marl.py --total-timesteps 100000": "test_make_train",
    'pip install ".[render]"': "test_pip_resolves_the_extras",
    'pip install ".[agent]"': "test_pip_resolves_the_extras",
    "clustergym agent quickstart": "test_the_quickstart_runs_agent_pods_and_page",
}
"""Commands that other tests run."""


installed = pytest.mark.skipif(
    not (ROOT / ".venv" / ".installed").exists(), reason="without .venv of `make test`, make would install it first"
)


def run(command: str, folder: Path, timeout: float = 300) -> str:
    """The output of a shell command, with the Python of this environment first in PATH."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the checkout, so that results do not go there."""
    made = tmp_path_factory.mktemp("readme")
    for name in ("cleanrl_ppo", "sweeps", "examples", "deploy"):
        (made / name).symlink_to(ROOT / name)
    return made


def test_every_command_has_a_test() -> None:
    assert set(commands(README)) == QUICK.keys() | ELSEWHERE.keys()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert all(f"def {name}(" in tests for name in ELSEWHERE.values())


@pytest.mark.parametrize("command", [c for c in commands(README) if c in QUICK])
def test_a_command_runs(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    program, *words = words_of(command)
    assert program == "clustergym"
    assert cli.main([*words, *QUICK[command]]) == 0
    for file in re.findall(r"(?:-o|--report|--plot) (\S+)", command):
        assert (folder / file).stat().st_size > 1000


def test_pip_resolves_the_extras() -> None:
    flags = "--dry-run --no-deps --no-index --no-build-isolation --ignore-installed"
    targets = [shlex.split(c)[-1] for c in commands(README) if c.startswith("pip")]
    for target in targets:
        output = run(f"{shlex.quote(sys.executable)} -m pip install {flags} '{target}'", ROOT)
        assert "Would install clustergym" in output
        assert "does not provide the extra" not in output


@installed
def test_make_train(folder: Path) -> None:
    """``make train`` with a short training ends in an exported policy, a table of rules, and the learning curve."""
    short = "--policy lru decayed-lfu belady --evaluations 1 --tune-tokens 300"
    flags = f"TRAIN_RUN={folder / 'train'} TRAIN_FLAGS='{SHORT_TRAINING}' CURVE_FLAGS='{short}'"
    output = run(f"make -C {ROOT} train {flags}", folder)
    assert '"mean_return"' in output
    assert all(name in output for name in ("lru", "decayed-lfu", "belady", "trained"))
    assert (folder / "train" / "policy.onnx").stat().st_size > 10_000
    assert (folder / "train" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_make_test_runs_all_linters_and_the_suite() -> None:
    output = run(f"make -C {ROOT} -n test", ROOT)
    for program in ("ruff check", "ruff format --check", "codespell", "mypy", "lint-imports", "pytest -n 2"):
        assert program in output


@installed
def test_make_demo(folder: Path) -> None:
    assert "`make demo`" in (ROOT / "docs" / "get-started.md").read_text()
    flags = f"-o {folder / 'demo.html'} --planners static --seconds 0.2 --tokens-per-rank 8"
    run(f"make -C {ROOT} demo DEMO_FLAGS='{flags}'", folder)
    page = (folder / "demo.html").read_text()
    for words in ("What the traffic looks like", "Better plans take longer to find", '"pareto":[', '"domains":{'):
        assert words in page


def test_ppo_trains(folder: Path) -> None:
    (command,) = [c for c in commands(README) if "ppo.py" in c]
    output = run(f"{command} --total-timesteps 512 --num-envs 2 --num-steps 64 --run-dir {folder / 'ppo'}", folder)
    assert "result {" in output


# Readers

QUESTIONS = {
    # RL researcher
    "What are the observations, actions and rewards of offloading?": (
        "docs/reference/moe-offload.md",
        "::: clustergym.moe_offload.environment.MoEOffloadEnv",
    ),
    "Can I train with Stable-Baselines3?": ("docs/guides/libraries.md", "MaskablePPO"),
    "What must a learned policy beat, and does it?": ("docs/results/offload.md", "best rule"),
    # serving engineer
    "How many experts do I keep on my GPU?": ("docs/guides/offload.md", "clustergym offload eval"),
    "How do I get a placement file into SGLang?": ("docs/guides/plan.md", "--init-expert-location"),
    "How do I record the traffic of my own model?": ("docs/guides/traces.md", "clustergym trace record"),
    # operator of GPU pods
    "How do I try the agent in Kubernetes without risk?": ("docs/guides/agent.md", "shadow mode"),
    "Is the learned policy better than VPA?": ("docs/results/agent.md", "VPA rule"),
    "Has this run on a GPU or in a real engine?": ("docs/results/index.md", "What has not been measured"),
    # the code
    "Where is what, and which package may import which?": ("docs/development/architecture.md", "import-linter"),
    "Which of the 37 details of PPO are where?": ("docs/reference/37-details.md", "ppo_atari.py"),
    "What do rank, slot, replica and profile mean?": ("docs/concepts.md", "**Replica**"),
}
"""What a newcomer asks → the page with the answer, and words on it."""


def linked_pages(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_two_clicks_away(question: str) -> None:
    name, words = QUESTIONS[question]
    first = linked_pages(README)
    second = set().union(*(linked_pages(page) for page in first))
    assert ROOT / name in first | second
    assert words in (ROOT / name).read_text()


def cell(entry: dict[str, Any]) -> float:
    """The value of the only cell that an entry of readme.yml names."""
    with (DATA / entry["file"]).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if entry["row"].items() <= row.items()]
    assert len(rows) == 1, f"{len(rows)} rows of {entry['file']} have {entry['row']}"
    value = float(rows[0][entry["column"]])
    return 100 * value if entry.get("unit") == "percent" else value


def test_figures_are_those_of_the_data_files() -> None:
    """Every figure of the results table, in its order, is the rounded value of a cell."""
    (table,) = re.findall(r"^\| what \| result \| caveat \|\n.*?\n\n", README.read_text(), flags=re.M | re.S)
    rows = [row.strip("| ").split(" | ") for row in table.strip().splitlines()[2:]]
    sources = yaml.safe_load((DATA / "readme.yml").read_text())
    assert len(rows) == len(sources) <= 6
    for (what, result, caveat), entries in zip(rows, sources, strict=True):
        assert re.findall(r"−?\d+(?:\.\d+)?", f"{result} | {caveat}") == [entry["figure"] for entry in entries], what
        for entry in entries:
            shown = entry["figure"].replace("−", "-")
            digits = len(shown.partition(".")[2])
            value = cell(entry)
            # "6–18 % faster" leaves out the minus sign of a difference.
            rounded = {f"{value:.{digits}f}", f"{abs(value):.{digits}f}"}
            assert shown in rounded, f"{what}: {shown} is {value} in {entry}"


def test_every_data_file_is_named_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "results").glob("*.md"))
    assert [file.name for file in DATA.glob("*.csv") if f"(data/{file.name})" not in pages] == []


# The researcher


def test_program_of_the_researcher(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(README, "python")
    assert len(code.splitlines()) <= 8
    exec(compile(code, "<README, researcher>", "exec"), {})
    assert re.fullmatch(r"\d+\.\d ms per token of waiting for experts\n", capsys.readouterr().out)
