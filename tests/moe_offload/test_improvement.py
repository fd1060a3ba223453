"""Trials of prefetches have known results, and the policy that learns from them acts in the environment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from clustergym import SyntheticConfig, TokenTrace, synthetic_trace
from clustergym.moe_offload.evaluation import make_environment
from clustergym.moe_offload.improvement import ImprovedPolicy, gather_trials, learn
from clustergym.moe_offload.kernels.observation import _DISTANCE
from clustergym.moe_offload.kernels.rules import N_PARAMETERS, THRESHOLD, WEIGHT
from clustergym.moe_offload.kernels.trials import EMPTY, NO_OP, Trials
from clustergym.moe_offload.predictor import NextUseNet, Predictor
from clustergym.moe_offload.rules import OFF
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables

LAYERS, EXPERTS, TOKENS = 4, 4, 1600
LOAD_MS, COMPUTE_MS = 0.3, 0.14


@pytest.fixture(scope="module")
def trace() -> TokenTrace:
    """Expert 0 of each layer, but every eighth token needs expert 3 of layer 2."""
    experts = np.zeros((TOKENS, LAYERS, 1), np.int16)
    experts[7::8, 2] = 3
    return TokenTrace(experts, EXPERTS, seq_lens=np.array([TOKENS]))


@pytest.fixture(scope="module")
def predictor(trace: TokenTrace) -> Predictor:
    torch.manual_seed(0)
    return Predictor(NextUseNet(LAYERS, EXPERTS, 4), np.full((LAYERS, EXPERTS), 0.25, np.float32))


@pytest.fixture(scope="module")
def z() -> np.ndarray:
    """A control that prefetches nothing. It keeps what is popular."""
    values = np.zeros(N_PARAMETERS)
    values[THRESHOLD : THRESHOLD + 3] = OFF
    values[WEIGHT] = 1.0
    return values


@pytest.fixture(scope="module")
def config(trace: TokenTrace) -> OffloadConfig:
    # All but expert 3 of layer 2 and two others fit. Tables say that expert 0 is the most popular.
    return OffloadConfig(trace, "all", Tables.count(trace), slots=4 / 16, link=1 / LOAD_MS, expert_mb=1.0)


def sure_of_expert_0(predictor: Predictor) -> Predictor:
    """A predictor that is sure of expert 0: the control keeps it."""
    with torch.no_grad():
        for value in predictor.net.parameters():
            value.zero_()
        bias = predictor.net.out_bias.view(LAYERS, 1, -1, EXPERTS)
        bias.fill_(-4.0)
        bias[..., 0] = 4.0
    return predictor


def test_what_a_prefetch_saves_is_the_time_the_link_had(
    trace: TokenTrace, predictor: Predictor, z: np.ndarray, config: OffloadConfig
) -> None:
    """Expert 3 of layer 2 is missing when it is needed: a load. h visits before, a prefetch saves h computing times.

    The expert of the layer at hand makes room for it, and is loaded again one token later.
    """
    trials = gather_trials(config, config.fit_on, sure_of_expert_0(predictor), z, decisions=500)
    visits = np.rint(trials.context[:, 2] * LAYERS).astype(int)  # the layer at hand
    token = np.rint(np.expm1(5 * trials.context[:, 7])).astype(int)
    assert (trials.rows[:, 0] == NO_OP).all()
    differences: list[float] = []
    for i in range(len(token)):
        distance = 2 - visits[i]
        if token[i] % 8 != 7 or distance not in (1, 2):
            continue
        assert trials.stall[i, 0] >= 0.8
        backlog = trials.gpu[i, 3] * LOAD_MS
        for k, row in enumerate(trials.rows[i]):
            if row < 0:
                continue
            features = trials.experts[i, row]
            in_time = min(LOAD_MS, max(0.0, distance * COMPUTE_MS - max(backlog, 0.0)))
            weight = 0.8 ** ((distance - 1) / LAYERS)
            saved = (trials.stall[i, 0] - trials.stall[i, k]) / weight
            popularity = features[7]  # 0.3 · log-odds; expert 3 of layer 2 has 1/8, experts 1 and 2 have none
            if features[_DISTANCE + distance] == 1 and -1.5 < popularity < 0:
                again = 0.8 ** ((LAYERS - distance) / LAYERS)
                differences.append(saved - (in_time / LOAD_MS - again))
            elif popularity < -1.5:  # it may delay the load
                assert saved < 0.1
    # Random loads before have put some memories into disorder.
    assert np.median(np.abs(differences)) < 1e-4
    assert len(differences) >= 20
    assert set(np.unique(trials.rows[trials.rows < 0])) <= {NO_OP, EMPTY}


def test_it_learns_which_prefetches_save_time() -> None:
    """Made-up trials: loading saves as much as the expert is likely, less half a load."""
    rng = np.random.default_rng(0)
    n, rows, trials = 3000, 8, 4
    experts = rng.normal(size=(n, rows, 30)).astype(np.float32)
    experts[..., _DISTANCE + 1 : _DISTANCE + 4] = [1, 0, 0]
    experts[..., 0] = 1
    tried = np.tile(np.array([NO_OP, 0, 1, EMPTY], np.int16), (n, 1))
    saved = 1 / (1 + np.exp(-4 * experts[:, :, -3])) - 0.5
    stall = np.zeros((n, trials), np.float32)
    stall[:, 1:3] = -saved[:, :2]
    stall += rng.normal(size=(n, 1))  # the same for all trials of a decision: no difference
    gpu, context = rng.normal(size=(n, 10)), rng.normal(size=(n, 10))
    found = Trials(experts, *(x.astype(np.float32) for x in (gpu, context)), tried, stall, np.zeros(n, np.int32))
    torch.manual_seed(0)
    policy = ImprovedPolicy(np.zeros(N_PARAMETERS))
    assert learn(policy, found, epochs=80) > 0.95
    with torch.inference_mode():
        predicted = policy.saved(*(torch.from_numpy(x) for x in found[:3])).numpy()
    assert np.abs(predicted - saved).mean() < 0.1


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_exported_policy_plays_tables_of_any_size(tmp_path: Path, gpus: int) -> None:
    from clustergym.training.policies import Policy, export_policy

    trace = synthetic_trace(SyntheticConfig(n_tokens=300, n_layers=6, n_experts=16, top_k=2, mean_seq_len=60))
    predictor = Predictor(NextUseNet(6, 16, 4), np.full((6, 16), 0.1, np.float32))
    torch.manual_seed(1)
    policy = ImprovedPolicy(np.linspace(0.1, 1, N_PARAMETERS))
    torch.nn.init.normal_(policy.out.weight)
    for rows in (6, 12):
        options = {"trace": trace, "split": "all", "fit_on": Tables.count(trace), "predictor": predictor, "slots": 0.5}
        env = make_environment("MoEOffload-v0", 3, **options, load_rows=rows, gpus=gpus)
        obs, _ = env.reset(seed=0)
        if rows == 6:
            example = {name: torch.from_numpy(value) for name, value in obs.items()}
            export_policy(tmp_path / "policy.onnx", policy.eval(), example, {"env_id": "x", "env_args": {}}, True)
        exported = Policy(tmp_path)
        loads = 0
        for _ in range(60):
            actions = exported.act(obs)
            with torch.inference_mode():
                logits, nodes = policy({name: torch.from_numpy(value) for name, value in obs.items()})
            best = logits.argmax(-1)
            assert actions.tolist() == [[int(r), int(nodes[b, r].argmax())] for b, r in enumerate(best)]
            assert (obs["action_mask"][np.arange(3), actions[:, 0], actions[:, 1]] == 1).all()
            loads += int((actions[:, 1] // gpus == 1).sum())
            obs = env.step(actions)[0]
        assert loads > 0
        env.close()
