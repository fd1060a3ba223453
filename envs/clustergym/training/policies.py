"""Trained MoE policies as programs: exported by the trainer, run by other processes without the trainer's code.

The only definition of the network is in ``cleanrl_ppo/ppo_moe_marl.py``. ``policy.onnx`` is its compiled form, with
weights, and can also be run by an engine that is not written in Python.
"""

from __future__ import annotations

import copy
import json
import logging
import runpy
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from clustergym.common.checkpoints import CheckpointError
from clustergym.common.extras import require
from clustergym.common.files import atomic_file

FILE_NAME = "policy.onnx"
INPUTS = ("experts", "gpus", "pairs", "expert_graph", "gpu_graph", "context", "action_mask")
OUTPUTS = ("expert_logits", "gpu_logits")
Act = Callable[[Mapping[str, npt.NDArray[Any]]], npt.NDArray[np.int64]]
"""Observations of N environments → the most likely actions (N, 2)."""


class _Positional(torch.nn.Module):
    """The network with one argument per input: exported programs have no dictionaries."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.network(dict(zip(INPUTS, inputs, strict=True)))


def export_policy(
    path: Path,
    network: torch.nn.Module,
    obs: Mapping[str, torch.Tensor],
    about: Mapping[str, Any],
    any_rows: bool = False,
) -> None:
    """Write an ONNX program that computes the logits of both actors from a batch of observations of any size.

    Args:
        path: File to write.
        network: ``network(obs)`` returns the logits of the experts (B, R) and of the nodes for each expert (B, R, 3·G).
        obs: Example of a batch of observations. The numbers of experts and GPUs are fixed to those of the example.
        about: Where the policy comes from: the id and the options of the environment. Saved in the file.
        any_rows: The network takes a table of any number of experts.
    """
    require("onnxscript", "train")
    example = tuple(obs[name][:1].detach().cpu().repeat_interleave(2, 0) for name in INPUTS)
    shapes: dict[str, dict[int, Any]] = {name: {0: torch.export.Dim("batch")} for name in INPUTS}
    if any_rows:
        rows = torch.export.Dim("rows", min=2)
        shapes |= {name: {**shapes[name], 1: rows} for name in ("experts", "pairs", "action_mask")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own: deprecations inside torch
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            _Positional(copy.deepcopy(network).cpu()).eval(),
            example,
            dynamo=True,
            input_names=INPUTS,
            output_names=OUTPUTS,
            dynamic_shapes=(tuple(shapes.values()),),
            verbose=False,
        )
    assert program is not None  # with dynamo=True
    program.model.metadata_props["about"] = json.dumps(dict(about), default=str)
    with atomic_file(path) as file:
        file.write(program.model_proto.SerializeToString())


class Policy:
    """An exported policy. ``source`` is a run folder, or its file ``policy.onnx``.

    Attributes:
        about: ``env_id`` and ``env_args`` of the task that it was trained on, and ``steps``.
    """

    def __init__(self, source: str | Path) -> None:
        path = Path(source)
        self.path = path / FILE_NAME if path.is_dir() else path
        if not self.path.is_file():
            raise FileNotFoundError(f"no policy at {self.path}: train one with cleanrl_ppo/ppo_moe_marl.py")
        runtime = require("onnxruntime", "train")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            self._session = runtime.InferenceSession(self.path, options, providers=["CPUExecutionProvider"])
            self.about: dict[str, Any] = json.loads(self._session.get_modelmeta().custom_metadata_map["about"])
        except Exception as reason:  # a broken file can raise almost anything in onnxruntime
            raise CheckpointError(f"{self.path} is not a policy of ppo_moe_marl.py: {reason}") from reason
        # A part of the observation that the network does not use is no input of the program.
        self._shapes = {each.name: each.shape[1:] for each in self._session.get_inputs()}

    def logits(self, obs: Mapping[str, npt.NDArray[Any]]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Logits of the experts (B, R), and of the nodes for each expert (B, R, 3·G). Invalid actions have −1e8.

        Raises:
            ValueError: the observation is not of the task that the policy was trained on.
        """
        for name, shape in self._shapes.items():
            # A dimension that may have any size is a name.
            found = obs[name].shape[1:]
            if len(found) != len(shape) or any(n != m for n, m in zip(found, shape, strict=True) if isinstance(m, int)):
                raise ValueError(
                    f"{self.path} reads {name} of shape {tuple(shape)} per environment, not {obs[name].shape[1:]}: "
                    f"it was trained in {self.about['env_id']} with {self.about['env_args']}"
                )
        expert_logits, gpu_logits = self._session.run(OUTPUTS, {name: obs[name] for name in self._shapes})
        return expert_logits, gpu_logits

    def act(self, obs: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
        """The most likely actions (B, 2) for a batch of observations, or the action (2,) for a single one."""
        single = obs["context"].ndim == 1
        batch = {name: value[None] for name, value in obs.items()} if single else obs
        expert_logits, gpu_logits = self.logits(batch)
        expert = expert_logits.argmax(-1)
        node = gpu_logits[np.arange(len(expert)), expert].argmax(-1)
        actions = np.stack([expert, node], -1)
        return actions[0] if single else actions


def random_networks(env: gymnasium.vector.VectorEnv[Any, Any, Any], seeds: Sequence[int] = range(5)) -> list[Act]:
    """The networks of ``ppo_moe_marl.py`` without training: their most likely actions, for each seed."""
    script = Path(__file__).parents[3] / "cleanrl_ppo" / "ppo_moe_marl.py"
    if not script.is_file():
        raise ValueError(f"networks without training need the trainer: no file {script}; install from a checkout")
    trainer = runpy.run_path(str(script), run_name=script.stem)

    def network(seed: int) -> Act:
        torch.manual_seed(seed)
        agent = trainer["Agent"](env.single_observation_space, trainer["Args"]().hidden)

        def act(obs: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
            with torch.inference_mode():
                actions: npt.NDArray[np.int64] = agent.get_best_action(
                    {name: torch.as_tensor(value) for name, value in obs.items()}
                ).numpy()
            return actions

        return act

    return [network(seed) for seed in seeds]
