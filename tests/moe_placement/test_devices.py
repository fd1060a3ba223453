"""Every trainer on a second device: train, save, resume and evaluate without a mix of CPU and device.

The second device is a stand-in that needs no GPU (``second_device.py``). Its results must equal those on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from clustergym.training import runs
from clustergym.training.distributed import World
from second_device import DEVICE, DeviceError, second_device
from slow_training import BOX, MASKED, games, scripted_environments
from trainers import load_trainer

CPU = torch.device("cpu")


# torch takes the stand-in for a device without numbers.
pytestmark = [
    pytest.mark.usefixtures("reproducible"),
    pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter"),
]

TASKS = {
    "ppo": MASKED, "ppo_kl": MASKED, "ppo_lstm": MASKED, "ppo_continuous_action": BOX, "ppo_atari": "",
    "ppo_gpu_alloc": "GPUAllocation-v0", "ppo_gpu_alloc_lstm": "GPUAllocation-v0",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _environments() -> Iterator[None]:
    with scripted_environments():
        yield


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Places where two nested states differ."""
    if isinstance(a, torch.Tensor):
        # The sums of a language model are added in another order on a device.
        a, b = a.cpu().double(), b.cpu().double()
        same = a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
        return [] if same else [where]
    if isinstance(a, Mapping):
        assert a.keys() == b.keys(), where
        return [each for key in a for each in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list | tuple):
        assert len(a) == len(b), where
        return [each for i in range(len(a)) for each in differences(a[i], b[i], f"{where}/{i}")]
    return [] if a == b or (isinstance(a, float) and a == pytest.approx(b, rel=1e-4, nan_ok=True)) else [where]


RESULTS = ("mean_return", "mean_return_ci95", "train_return_100", "reward", "qos", "efficiency", "steps")


class Crash(BaseException):
    """Stands for a process that dies."""


@pytest.mark.parametrize("name", TASKS)
def test_run_on_a_device_equals_the_run_on_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, save and crash on the device; then resume, finish, evaluate and export the model there."""
    trainer = load_trainer(name)
    known = {field.name for field in fields(trainer.Args)}
    if name == "ppo_atari":
        monkeypatch.setattr(trainer, "make_envs", games)

    def train(folder: Path, device: torch.device, **changes: Any) -> dict[str, Any]:
        flags = {
            "env_id": TASKS[name], "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "hidden": 8,
            "total_timesteps": 96, "eval_episodes": 2, "eval_streams": 2, "checkpoint_interval": 1, "run_dir": folder,
        }  # fmt: skip
        args = trainer.Args(**{key: value for key, value in (flags | changes).items() if key in known})
        with monkeypatch.context() as patch:
            patch.setattr(runs, "choose_device", lambda *_, **__: device)
            patch.setattr(trainer, "init_distributed", lambda *_: World(device=device), raising=False)
            found: dict[str, Any] = trainer.train(args)
        return found

    def final(folder: Path) -> Any:
        state = torch.load(folder / "checkpoint.pt", weights_only=True)["state"]
        return {key: value for key, value in state.items() if key != "args"}

    expected = train(tmp_path / "cpu", CPU)
    log = runs.Run.log

    def deadly(self: Any, *given: Any, **shown: Any) -> None:
        if self.iteration == 3:
            raise Crash
        log(self, *given, **shown)

    # Other environments than ours would begin new episodes.
    resumes = "gpu_alloc" in name
    if resumes:
        with monkeypatch.context() as patch, second_device() as device:
            patch.setattr(runs.Run, "log", deadly)
            with pytest.raises(Crash):
                train(tmp_path / "device", device)
    with second_device() as device:
        found = train(tmp_path / "device", device, resume=resumes, save_model=True)
    results = [{key: each[key] for key in RESULTS if key in expected} for each in (found, expected)]
    assert not differences(*results)
    assert not differences(final(tmp_path / "device"), final(tmp_path / "cpu"))


# The stand-in itself


def mixes() -> list[Any]:
    def weights(device: torch.device) -> torch.nn.Module:
        return torch.nn.Linear(3, 2).to(device)

    return [
        lambda d: torch.ones(3, device=d) + torch.ones(3),
        lambda d: weights(d)(torch.ones(1, 3)),
        lambda d: torch.zeros(3)[torch.tensor([0, 1], device=d)],
        lambda d: torch.stack([torch.ones((), device=d), torch.ones(())]),
        lambda d: torch.where(torch.ones(2, dtype=torch.bool), torch.ones(2, device=d), torch.ones(2, device=d)),
        lambda d: torch.rand(3, device=d, generator=torch.Generator()),
        lambda d: torch.rand(3, generator=torch.Generator(d)),
        lambda d: torch.multinomial(torch.ones(3, device=d), 1, generator=torch.Generator()),
        lambda d: torch.ones(3, device=d).numpy(),
        lambda d: torch.ones(3, device=d).mul_(torch.ones(3)),
        lambda d: torch.nn.LSTM(2, 2).to(d)(torch.ones(1, 1, 2, device=d), (torch.ones(1, 1, 2), torch.ones(1, 1, 2))),
    ]


@pytest.mark.parametrize("number", range(len(mixes())))
def test_mix_of_cpu_and_device_fails(number: int) -> None:
    with second_device() as device, pytest.raises((DeviceError, RuntimeError, TypeError)):
        mixes()[number](device)


def test_allowed_transfers_work() -> None:
    with second_device() as device:
        x = torch.arange(6.0).view(2, 3).to(device)
        assert x.device == DEVICE
        assert (x * torch.tensor(2.0) + 1).cpu().numpy().tolist() == [[1, 3, 5], [7, 9, 11]]
        x[:, 0] = torch.tensor([8.0, 9.0])
        assert x[torch.tensor([1])].tolist() == [[9, 4, 5]]
        host = torch.zeros(2, 3)
        host[1] = x[1]
        host.copy_(x)
        assert host.tolist() == x.tolist()
        assert torch.tensor([1.0], device=device).device == DEVICE
