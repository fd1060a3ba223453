"""A policy exported to ONNX gives the same scores in onnxruntime, for models and clusters of other sizes too."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy
import torch

from clustergym.cli import main
from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig
from clustergym.moe_placement.presets.clusters import get_cluster
from clustergym.planners.policy.export import load_policy
from clustergym.planners.policy.inputs import PER_CENT, policy_inputs, same_node_weights, similar_experts
from clustergym.planners.policy.network import MASKED_LOGIT
from clustergym.planners.policy.onnx import shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("onnx") / "policy"
    assert main(["export", "--out", str(path)]) == 0
    return path


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal to 1e-5 of the largest score. Masked scores are equal."""
    legal = expected > MASKED_LOGIT
    np.testing.assert_array_equal(found[~legal], expected[~legal])
    np.testing.assert_allclose(found[legal], expected[legal], rtol=0, atol=1e-5 * np.abs(expected[legal]).max())


@pytest.mark.parametrize(
    ("trace", "cluster", "layers"),
    [("tiny_moe", "h800-2x2", 3), ("synthetic", "h800-4x4", 1), ("synthetic", "h800-2x8", 4)],
)
@torch.no_grad()
def test_scores_equal_those_of_torch(folder: Path, trace: str, cluster: str, layers: int) -> None:
    network, _ = load_policy()
    batch = PlacementBatch(
        PlacementConfig(trace=trace, cluster=cluster, tokens_per_rank=4, memory=True, compare_eplb=False), layers
    )
    batch.reset()
    same_node = same_node_weights(get_cluster(cluster))
    inputs = policy_inputs(batch.obs, similar_experts(batch.obs["affinity"]), same_node)
    encoded = network.encode(inputs)
    expected = network.expert_logits(inputs, encoded)
    expert = expected.argmax(-1)
    parts = batch.lookahead(expert[:, None])[:, 0] * PER_CENT
    legal = batch.obs["joint_mask"][torch.arange(layers), expert].bool()
    expected_nodes = network.node_logits(inputs, encoded, expert, parts, legal)

    given = {name: value.numpy() for name, value in inputs.items()}
    first, second = session(folder / "expert_actor.onnx"), session(folder / "gpu_actor.onnx")
    found = dict(
        zip(
            [output.name for output in first.get_outputs()],
            first.run(None, {one.name: given[one.name] for one in first.get_inputs()}),
            strict=True,
        )
    )
    assert_close(found["logits"], expected.numpy())
    given |= found | {"expert": found["logits"].argmax(-1), "parts": parts.numpy(), "legal": legal.numpy()}
    (nodes,) = second.run(None, {one.name: given[one.name] for one in second.get_inputs()})
    assert_close(nodes, expected_nodes.numpy())


def test_weights_and_description_are_complete(folder: Path) -> None:
    network, settings = load_policy()
    weights = safetensors.numpy.load_file(folder / "policy.safetensors")
    assert weights.keys() == network.state_dict().keys()
    for name, value in network.state_dict().items():
        np.testing.assert_array_equal(weights[name], value)
    text = json.loads((folder / "policy.json").read_text())
    assert text["settings"] == vars(settings)
    for name, actor in text["actors"].items():
        found = session(folder / f"{name}.onnx")
        assert [one.name for one in found.get_inputs()] == list(actor["inputs"])
        assert [one.name for one in found.get_outputs()] == actor["outputs"]
        for one in found.get_inputs():
            expected = shapes(network.config.hidden)[one.name]
            assert len(one.shape) == len(expected)
            for given, size in zip(one.shape, expected, strict=True):
                assert isinstance(given, str) == isinstance(size, str), f"{one.name}: {one.shape}"


def test_a_missing_file_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "none.pt"), "--out", str(tmp_path / "out")]) == 2
    assert "none.pt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
