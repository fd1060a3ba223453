"""Features that users of CleanRL expect, in every trainer: the flags of ``--help``, and runs that use them."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.numpy
import torch
import yaml

from clustergym.training import choose_device, load_checkpoint, logger, parse_args, read_scalars
from clustergym.training.arguments import _flags
from short_runs import TRAINERS, Trainer
from trainers import FOLDER, load_trainer

CPU = torch.device("cpu")
PAGE = FOLDER.parent / "docs" / "reference" / "trainers.md"
FLAGS = (
    "config", "resume", "total-timesteps", "save-model", "eval-interval", "capture-video", "torch-deterministic",
    "track", "wandb-project-name", "wandb-entity",
)  # fmt: skip
INSTEAD = {
    "ppo_llm": {"total-timesteps": "`--iterations`", "capture-video": "prints samples"},
    "ppo_gpu_alloc_online": {
        "total-timesteps": "runs until stopped",
        "eval-interval": "`/metrics`",
        "capture-video": "real pods",
    },
}
"""What a trainer has in place of a flag."""


pytestmark = pytest.mark.usefixtures("scripted", "reproducible")


def flags_of(trainer: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Flags in the output of ``--help``."""
    with pytest.raises(SystemExit) as stop:
        parse_args(load_trainer(trainer).Args, argv=["--help"])
    assert stop.value.code == 0
    return set(re.findall(r"--([a-z][a-z.-]+)", capsys.readouterr().out))


def test_table_of_flags_is_what_the_trainers_show(capsys: pytest.CaptureFixture[str]) -> None:
    """Print the table with ``pytest -s`` after a change, and copy it to the page."""
    names = sorted(path.stem for path in FOLDER.glob("ppo*.py"))
    rows = [["trainer", *(f"`--{flag}`" for flag in FLAGS)], ["---"] * (len(FLAGS) + 1)]
    for name in names:
        shown, instead = flags_of(name, capsys), INSTEAD.get(name, {})
        assert not shown & instead.keys()
        rows.append([f"`{name}.py`", *("yes" if flag in shown else instead[flag] for flag in FLAGS)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    with capsys.disabled():
        if table not in PAGE.read_text():
            print(table)
    assert table in PAGE.read_text()


ONCE = list({each.name: each for each in reversed(TRAINERS)}.values())


def plain(value: Any) -> Any:
    """A value as YAML has it."""
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def by_flag(args: object) -> dict[str, Any]:
    """Values by the names that a config file gives them."""
    return {name.replace("-", "_"): plain(value) for name, value in _flags(args)}


@pytest.mark.parametrize("trainer", ONCE, ids=str)
def test_run_with_a_config_file_evaluates_exports_films_and_is_extended(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    projects: list[tuple[Any, Any]] = []

    def init_wandb(folder: Path, config: Any, project: str, name: str | None, entity: str | None) -> Any:
        projects.append((project, entity))
        return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setattr(logger, "_init_wandb", init_wandb)
    defaults = by_flag(trainer.module.Args())
    given = by_flag(trainer.args(tmp_path / "run"))
    changed = {key: value for key, value in given.items() if value != defaults[key]}
    long, length = changed.get("total_timesteps"), "total_timesteps"
    if long is None:
        long, length = changed["iterations"], "iterations"
    videos = "capture_video" in {each.name for each in fields(trainer.module.Args)} and trainer.can_render
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(changed | {length: 2 * long // 3, "eval_interval": 1, "save_model": True}))

    def start(*flags: str) -> dict[str, Any]:
        words = ["--config", str(file), *flags, "--track", "--wandb-project-name", "mine", "--wandb-entity=team"]
        return trainer.start(parse_args(trainer.module.Args, argv=words), CPU)

    start(*(["--capture-video"] if videos else []))
    before = trainer.iterations(tmp_path / "run")
    result = start(f"--{length.replace('_', '-')}", str(long), "--resume")
    assert [after - first for after, first in zip(trainer.iterations(tmp_path / "run"), before, strict=True)] == [
        1 for _ in before
    ]
    assert result["mean_return"] is not None
    assert set(projects) == {("mine", "team")}
    for checkpoint in trainer.checkpoints(tmp_path / "run"):
        folder = checkpoint.parent
        assert safetensors.numpy.load_file(folder / "model.safetensors")
        model = load_checkpoint(folder / "model.pt", f"{trainer.name}-model")
        assert model["args"][length] == long
        assert str(long) in (folder / "model.json").read_text()
        metric, number = ("eval/mean_return", 3) if trainer.name in WITH_RETURNS else trainer.evaluation
        steps, _ = read_scalars(folder, metric)
        assert len(steps) == number, "evaluations after iterations 1 and 2, the last one of each run included"
        assert bool(list(folder.rglob("*.mp4"))) == videos


WITH_RETURNS = {"ppo", "ppo_continuous_action", "ppo_recurrent", "ppo_atari", "ppo_federated"}


def test_deterministic_kernels_are_chosen_with_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        assert choose_device(True, 1) == torch.device("cuda", 1)
        assert not torch.are_deterministic_algorithms_enabled()
        choose_device(False, 1, deterministic=True)
        assert not torch.are_deterministic_algorithms_enabled()
        choose_device(True, 1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
