"""Every trainer on a second device: train, save, resume and evaluate without a mix of CPU and device.

The second device is a stand-in that needs no GPU (``second_device.py``). Its results must equal those on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clustergym.agent.learner import Experiences
from second_device import DEVICE, DeviceError, DeviceTensor, second_device
from short_runs import TRAINERS, Trainer
from trainers import load_trainer

CPU = torch.device("cpu")


class Crash(Exception):
    """Stands for a process that dies."""


# torch takes the stand-in for a device without numbers.
pytestmark = [
    pytest.mark.usefixtures("scripted", "reproducible"),
    pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter"),
]
each_trainer = pytest.mark.parametrize("trainer", TRAINERS, ids=lambda each: f"{each}-{TRAINERS.index(each)}")


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


RESULTS = ("mean_return", "mean_return_ci95", "train_return_100", "reward", "qos", "efficiency", "steps", "kl", "gain")


def same_results(a: dict[str, Any], b: dict[str, Any]) -> None:
    found = {key: a[key] for key in RESULTS if key in a}
    assert "mean_return" in found
    assert found["mean_return"] is not None
    assert not differences(found, {key: b[key] for key in found})


@each_trainer
def test_run_on_a_device_equals_the_run_on_the_cpu(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train, save and crash on the device; then resume, finish, evaluate and export the model there."""
    expected = trainer.train(tmp_path / "cpu", CPU)
    owner, name = trainer.update()
    update, calls = getattr(owner, name), []

    def crashing(*args: Any) -> Any:
        calls.append(name)
        if len(calls) == trainer.crash_in:
            raise Crash
        return update(*args)

    monkeypatch.setattr(owner, name, crashing)
    with pytest.raises(Crash), second_device() as device:
        trainer.train(tmp_path / "cut", device)
    with second_device() as device:
        same_results(trainer.train(tmp_path / "cut", device, resume=True, save_model=True), expected)
    assert not differences(trainer.final(tmp_path / "cut"), trainer.final(tmp_path / "cpu"))


def test_run_can_move_from_a_device_to_the_cpu(tmp_path: Path) -> None:
    trainer = next(each for each in TRAINERS if each.name == "ppo_lstm")
    with second_device() as device:
        expected = trainer.train(tmp_path, device)
    same_results(trainer.train(tmp_path, CPU, resume=True), expected)


def test_online_update_on_a_device_equals_the_update_on_the_cpu(tmp_path: Path) -> None:
    """The agent of a node learns on the device; the server keeps its state on the CPU."""
    online = load_trainer("ppo_gpu_alloc_online")
    args = online.Args()
    state = online.initial_state(args)
    size = len(state["statistics"]["mean"])
    rng = np.random.default_rng(0)
    policy = online.Policy(state)
    obs = torch.from_numpy(rng.uniform(0, 1, (40, size))).float()
    acted = [policy.choose(policy.logits(each.numpy()), rng) for each in obs]
    batch = Experiences(
        obs, torch.tensor(np.array([action for action, _ in acted])).float(),
        torch.tensor([logprob for _, logprob in acted]), torch.rand(40), torch.zeros(40), obs.flip(0),
        torch.zeros(40, dtype=torch.bool), 40,
    )  # fmt: skip
    on_cpu = on_device = state
    for _ in range(2):
        on_cpu, expected = online.learn_once(on_cpu, batch, args, CPU)
        with second_device() as device:
            on_device, found = online.learn_once(on_device, batch, args, device)
            assert not any(isinstance(each, DeviceTensor) for each in on_device["agent"].values())
        assert not differences(found, expected)
        assert not differences(
            {key: on_device[key] for key in ("agent", "optimizer", "statistics", "version")},
            {key: on_cpu[key] for key in ("agent", "optimizer", "statistics", "version")},
        )
    assert on_device["version"] == 2
    online.Policy(on_device)


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
