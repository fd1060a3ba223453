"""Multi-agent PPO for placement: it finds a known optimum, but not with a wrong reward, mask or advantage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from clustergym.planners.policy import task as task_module
from clustergym.planners.policy.export import read_policy
from clustergym.planners.policy.network import PolicyNetwork
from clustergym.planners.policy.planner import Policy

from clustergym import TokenTrace
from clustergym.moe_placement import ClusterSpec, IntervalStream, ModelSpec, Simulator, Traffic
from clustergym.moe_placement.kernels.state import LAST_KIND, OP_ILLEGAL
from clustergym.planners.evaluation import Protocol, evaluate_planner
from clustergym.planners.exact import Exact
from clustergym.training import CHECKPOINT_NAME, CheckpointError, World, load_checkpoint
from trainers import FOLDER, load_trainer

marl = load_trainer("ppo_moe_marl")
MODEL = ModelSpec("pairs", 1, 4, 2, 16384, 64)
CLUSTER = ClusterSpec("2x1", 2, 1, 2)
SMALL: dict[str, Any] = {
    "ops_per_layer": 2, "intervals": 1, "tokens_per_rank": 32, "num_envs": 16, "num_steps": 8, "hidden": 16,
    "pretrain_states": 0, "num_minibatches": 2, "update_epochs": 4, "learning_rate": 5e-3, "layers": 0,
    "ent_coef": 0.01, "envs_per_stream": 4, "pretrain_sharpen": 1.0, "norm": 0,
}  # fmt: skip


def make_args(**changes: Any) -> Any:
    """Arguments by the name of their flag, in whichever group they are."""
    args = marl.Args()
    groups = [args, *(value for value in vars(args).values() if is_dataclass(value))]
    for name, value in changes.items():
        (group,) = (group for group in groups if name in vars(group))
        setattr(group, name, value)
    return args


def exported(agent: Any, args: Any) -> PolicyNetwork:
    return PolicyNetwork.from_state(marl.network_options(args), agent.state_dict())


def pairs_trace(tokens: int = 512) -> TokenTrace:
    """Experts 0 and 2 are always used together, and 1 and 3. The static placement {0, 1}, {2, 3} separates them."""
    kinds = np.array([[0, 2], [1, 3]], np.int16)
    experts = kinds[np.random.default_rng(0).integers(0, 2, tokens)][:, None]
    return TokenTrace(experts, n_experts=4, seq_lens=np.full(tokens // 8, 8), name="pairs")


TRAFFIC = Traffic("prefill", 32, 1, schedule="drift", allow_reuse=True)


def tiny_task(args: Any) -> Any:
    trace = pairs_trace()
    return marl.Task(trace, trace, trace, Simulator(MODEL, CLUSTER), TRAFFIC, args.task.settings)


def rollouts_from_static(args: Any, agent: Any) -> Any:
    """Rollouts whose episodes start with the static placement, which separates the pairs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_module, "START", "static")
        return marl.Rollouts(args, agent, tiny_task(args), torch.device("cpu"))


def learn(iterations: int) -> tuple[PolicyNetwork, Any, Any, int]:
    """(policy, task, rollouts, number of illegal operations) after some training iterations without look-ahead."""
    args = make_args(**SMALL, ablate=("no-lookahead",))
    torch.manual_seed(args.seed)
    world, task, agent = World(), tiny_task(args), marl.make_agent(args)
    optimizer, statistics = marl.make_optimizer(agent, args.ppo.learning_rate), marl.ReturnStatistics()
    rollouts = rollouts_from_static(args, agent)
    rollouts.restart(args.seed)
    illegal = 0
    step = rollouts.step

    def counted(expert: torch.Tensor, node: torch.Tensor) -> Any:
        nonlocal illegal
        result = step(expert, node)
        illegal += int((rollouts.batch.episode["last_operation"][:, LAST_KIND] == OP_ILLEGAL).sum())
        return result

    rollouts.step = counted
    for iteration in range(1, iterations + 1):
        optimizer.param_groups[0]["lr"] = marl.anneal(args.ppo.learning_rate, iteration, iterations)
        marl.iterate(agent, optimizer, rollouts, statistics, args, world)
    return exported(agent, args), task, rollouts, illegal


def reached(network: PolicyNetwork, task: Any) -> tuple[set[frozenset[int]], float, float]:
    """(experts that share a GPU in the plan of the agents, its time, the proven optimum) for a new interval, µs.

    The best assignment of the two groups to the two GPUs depends on the tokens of the two ranks. The time is therefore
    the better one of the plan and its mirror image.
    """
    sim = task.simulator
    free = Simulator(sim.model, sim.cluster, passes_per_interval=10**12)
    interval = next(IntervalStream(task.test, sim.n_gpus, task.traffic, seed=12345))
    exact = Exact(free)
    static = sim.static(1)
    exact.plan([interval], static)
    plan = Policy(sim, policy=(network, task.settings), estimate=False).plan([interval], static)
    shared = {frozenset(int(expert) for expert in gpu if expert >= 0) for gpu in plan[0]}
    images = plan, np.ascontiguousarray(plan[:, ::-1])
    times = [float(free.evaluate(interval, image).time_us.sum()) for image in images]
    return shared, min(times), float(exact.optimum_us.sum())


ITERATIONS = 25
TOGETHER = {frozenset({0, 2}), frozenset({1, 3})}


def test_training_finds_the_known_optimum() -> None:
    network, task, rollouts, illegal = learn(ITERATIONS)
    shared, time_us, optimum_us = reached(network, task)
    assert shared == TOGETHER
    assert time_us == pytest.approx(optimum_us)
    assert rollouts.episodic_return > 0
    assert illegal == 0


def test_training_with_a_negated_reward_misses_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    right = marl.Rollouts.step

    def wrong(self: Any, expert: torch.Tensor, node: torch.Tensor) -> Any:
        reward, layer_end, done = right(self, expert, node)
        return -reward, layer_end, done

    monkeypatch.setattr(marl.Rollouts, "step", wrong)
    shared, time_us, optimum_us = reached(*learn(ITERATIONS)[:2])
    assert shared != TOGETHER
    assert time_us > 1.05 * optimum_us


def test_training_with_negated_advantages_misses_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    right = marl.compute_gae

    def wrong(*arguments: Any) -> Any:
        """Value minus return instead of return minus value."""
        advantages, returns = right(*arguments)
        return -advantages, returns

    monkeypatch.setattr(marl, "compute_gae", wrong)
    shared, time_us, optimum_us = reached(*learn(ITERATIONS)[:2])
    assert shared != TOGETHER
    assert time_us > 1.05 * optimum_us


def test_without_the_mask_illegal_operations_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = marl.Agent.node_logits

    def wrong(self: Any, inputs: Any, encoded: Any, expert: Any, parts: Any, legal: Any) -> Any:
        return right(self, inputs, encoded, expert, parts, torch.ones_like(legal))

    monkeypatch.setattr(marl.Agent, "node_logits", wrong)
    assert learn(1)[3] > 0


def test_an_untrained_policy_with_look_ahead_finds_the_optimum() -> None:
    """The look-ahead is a term of a node's score, so it works before training."""
    args = make_args(**SMALL)
    torch.manual_seed(0)
    shared, time_us, optimum_us = reached(exported(marl.make_agent(args), args), tiny_task(args))
    assert shared == TOGETHER
    assert time_us == pytest.approx(optimum_us)


def test_pretraining_prefers_the_best_simulated_operation() -> None:
    args = make_args(**(SMALL | {"pretrain_states": 1024}))
    torch.manual_seed(1)
    world, agent = World(), marl.make_agent(args)
    rollouts = rollouts_from_static(args, agent)
    rollouts.restart(1)
    inputs = {key: each.clone() for key, each in rollouts.inputs().items()}
    experts = torch.arange(4).expand(16, 4)
    parts, legal = rollouts.look(experts), rollouts.legal(experts)

    def cross_entropy() -> float:
        with torch.no_grad():
            encoded = agent.encode(inputs)
            nodes = agent.node_logits(inputs, encoded, experts[:, 0], parts[:, 0], legal[:, 0])
            best = torch.where(legal[:, 0], marl.gains(parts[:, 0]), -torch.inf).argmax(-1)
            return float(-nodes.log_softmax(-1).gather(-1, best[:, None]).mean())

    before = cross_entropy()
    marl.supervised_phase(agent, [rollouts], args, world)
    assert cross_entropy() < 0.5 * before


# Details


def rollout(**changes: Any) -> tuple[Any, Any, Any]:
    args = make_args(**(SMALL | changes))
    torch.manual_seed(3)
    agent = marl.make_agent(args)
    rollouts = marl.Rollouts(args, agent, tiny_task(args), torch.device("cpu"))
    rollouts.restart(5)
    return args, agent, rollouts


@pytest.mark.parametrize("ablate", [(), ("simultaneous",), ("mlp-encoder",), ("two-critics",)], ids=str)
def test_log_probabilities_of_a_rollout_are_those_of_the_update(ablate: tuple[str, ...]) -> None:
    _, agent, rollouts = rollout(ablate=ablate)
    batch = rollouts.collect()
    rows, visits = torch.arange(len(batch)), torch.arange(batch.visits)
    assert torch.equal(batch.rows(visits), rows)
    inputs = batch.inputs(visits, rows)
    experts, nodes, values = agent(inputs, batch.expert, batch.parts, batch.legal)
    logprobs = torch.stack([experts.log_softmax(-1)[rows, batch.expert], nodes.log_softmax(-1)[rows, batch.node]], -1)
    torch.testing.assert_close(logprobs, batch.logprobs, atol=1e-5, rtol=0)
    assert values.shape == batch.values.shape == (len(batch), 2 if "two-critics" in ablate else 1)
    assert bool(inputs["expert_mask"][rows, batch.expert].all())
    if "simultaneous" not in ablate:
        assert bool(batch.legal[rows, batch.node].all())


def test_masked_choices_have_probability_zero_and_no_gradient() -> None:
    _, agent, rollouts = rollout()
    inputs = rollouts.inputs() | {"expert_mask": torch.tensor([[True, False, True, False]]).expand(16, 4)}
    logits = agent.expert_logits(inputs, agent.encode(inputs))
    assert bool((logits.softmax(-1)[:, [1, 3]] == 0).all())
    entropy = marl.masked_entropy(logits.log_softmax(-1), inputs["expert_mask"])
    assert entropy.max().item() <= np.log(2) + 1e-6
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), [agent.expert_head[-1].bias])
    assert float(gradient.abs().sum()) == 0


def test_advantages_do_not_cross_the_end_of_a_visit() -> None:
    """With a horizon and no group baseline, the last advantage of a visit is its reward minus its value."""
    _, _, rollouts = rollout(num_steps=4, envs_per_stream=1)
    rewards: list[torch.Tensor] = []
    step = rollouts.step

    def noted(expert: torch.Tensor, node: torch.Tensor) -> Any:
        result = step(expert, node)
        rewards.append(result[0].clone())
        return result

    rollouts.step = noted
    batch = rollouts.collect()
    # Two visits per environment, one after the other, with two steps each.
    advantages, values = batch.advantages.view(2, 16, 2), batch.values.view(2, 16, 2)
    for visit, last in enumerate((1, 3)):
        torch.testing.assert_close(advantages[visit, :, 1], rewards[last] - values[visit, :, 1])


def test_the_group_baseline_is_the_mean_of_the_others() -> None:
    """By hand: the means of the others of 1, 2, 6 are 4, 3.5, 1.5."""
    advantages = torch.tensor([[1.0, 2.0, 6.0, 5.0, 5.0, 5.0]])[..., None]
    expected = torch.tensor([[-3.0, -1.5, 4.5, 0.0, 0.0, 0.0]])[..., None]
    torch.testing.assert_close(marl.subtract_group_baseline(advantages, 3), expected)
    # What the whole group shares has no effect.
    shared = torch.tensor([[7.0, 7.0, 7.0, -2.0, -2.0, -2.0]])[..., None]
    torch.testing.assert_close(marl.subtract_group_baseline(advantages + shared, 3), expected)


def test_a_group_of_environments_plays_the_same_stream() -> None:
    _, _, rollouts = rollout(envs_per_stream=4, intervals=2, num_steps=16)
    for _ in range(3):  # episodes have 4 steps, so several end in each rollout
        rollouts.collect()
        loads = rollouts.batch.episode["load_average"].reshape(4, 4, -1)
        assert bool((loads == loads[:, :1]).all())
        assert len(torch.unique(loads[:, 0], dim=0)) > 1, "different streams must differ"


def test_scale_logits_multiplies_the_logits_of_both_actors() -> None:
    _, agent, rollouts = rollout()
    inputs = rollouts.inputs()
    expert = torch.zeros(16, dtype=torch.int64)
    parts, legal = rollouts.look(expert[:, None])[:, 0], rollouts.legal(expert[:, None])[:, 0]

    def scores() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            encoded = agent.encode(inputs)
            nodes = agent.node_logits(inputs, encoded, expert, parts, legal)
            return agent.expert_logits(inputs, encoded), torch.where(legal, nodes, 0.0)

    before = scores()
    agent.scale_logits(3.0)
    for plain, sharp in zip(before, scores(), strict=True):
        torch.testing.assert_close(sharp, 3 * plain, atol=1e-5, rtol=1e-5)


def test_masked_experts_are_no_target_of_pretraining() -> None:
    args, agent, rollouts = rollout(pretrain_states=16)
    candidates = torch.arange(4).expand(16, 4)
    parts, legal = rollouts.look(candidates), rollouts.legal(candidates)
    inputs = rollouts.inputs() | {"expert_mask": torch.tensor([[True, True, True, False]]).expand(16, 4)}
    optimizer = marl.make_optimizer(agent, 1e-3)
    state = marl.Simulated(inputs, candidates, parts, legal)
    losses = marl.supervised_step(agent, optimizer, state, args, World())
    # The three scores are nearly equal: the cross-entropy is that of a uniform choice among three.
    assert losses["pretrain/expert_loss"] == pytest.approx(np.log(3), rel=0.05)


def test_value_normalisation_changes_no_value() -> None:
    _, agent, rollouts = rollout()
    inputs = rollouts.inputs()
    with torch.no_grad():
        encoded = agent.encode(inputs)
        unknown = agent.get_value(inputs, encoded)
        assert bool((unknown == 0).all()), "values of an untrained critic must not outweigh the rewards"
        agent.set_value_scale(0.1, 0.02)
        before = agent.get_value(inputs, encoded)
        agent.set_value_scale(0.3, 0.07)
        after = agent.get_value(inputs, encoded)
    torch.testing.assert_close(before, after, atol=1e-5, rtol=1e-4)
    assert float(agent.value_std) == pytest.approx(0.07)


def test_the_critic_learns_returns_of_any_scale() -> None:
    """Real traces give rewards of 1e-4. With clipping, a critic that starts at the wrong scale never recovers."""
    args, agent, rollouts = rollout(num_steps=16, learning_rate=5e-3)
    step = rollouts.step

    def tiny(expert: torch.Tensor, node: torch.Tensor) -> Any:
        reward, layer_end, done = step(expert, node)
        return 1e-4 * reward, layer_end, done

    rollouts.step = tiny
    optimizer, statistics = marl.make_optimizer(agent, args.ppo.learning_rate), marl.ReturnStatistics()
    found = [
        marl.iterate(agent, optimizer, rollouts, statistics, args, World())["losses/explained_variance"]
        for _ in range(10)
    ]
    assert np.mean(found[-3:]) > 0.2, found


def test_the_task_is_the_registered_environment() -> None:
    """The exact call that anybody can make gives the tensors that the trainer sees."""
    args, _, rollouts = rollout(intervals=2, envs_per_stream=1)
    options = marl.environment_options(args.task, tiny_task(args))
    made = gymnasium.make_vec("MoEPlacement-v0", num_envs=16, **options)
    made.reset(seed=0)
    made.batch.set_state(rollouts.batch.get_state())
    expert = rollouts.inputs()["expert_mask"].int().argmax(-1)
    node = rollouts.legal(expert[:, None])[:, 0].int().argmax(-1)
    rollouts.step(expert, node)
    obs, *_ = made.step(np.stack([expert.numpy(), node.numpy()], 1))
    assert set(obs) == set(rollouts.batch.obs)
    for name, array in obs.items():
        np.testing.assert_array_equal(array, rollouts.batch.obs[name].numpy(), err_msg=name)


def test_orthogonal_initialisation() -> None:
    agent = marl.Agent(marl.Args())
    hidden = agent.encoders.gpus_in.weight
    gram = hidden.T @ hidden
    torch.testing.assert_close(gram, 2 * torch.eye(len(gram)), atol=1e-4, rtol=0)
    assert agent.expert_head[-1].weight.norm().item() == pytest.approx(0.01, rel=1e-4)
    assert agent.critics[0][-1].weight.norm().item() == pytest.approx(1.0, rel=1e-4)


# Runs


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pairs_trace().save(tmp_path_factory.mktemp("traces") / "pairs.npz")


def file_args(trace: Path, folder: Path, **changes: Any) -> Any:
    """A run of a few seconds on a preset model and cluster."""
    tiny = {
        "trace": (str(trace),), "model": "mixtral-8x7b", "cluster": ("h800-2x4",), "run_dir": folder, "num_envs": 4,
        "num_steps": 4, "total_timesteps": 96, "checkpoint_interval": 2, "pretrain_states": 16,
        "eval_interval": 3, "eval_streams": 2, "eval_planners": ("static", "eplb"), "learning_rate": 1e-3,
        "tokens_per_rank": 4,
    }  # fmt: skip
    return make_args(**(SMALL | tiny | changes))


def test_a_run_writes_policy_table_curve_and_result(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = marl.train(file_args(trace_file, tmp_path / "run"), World())
    assert set(result["total_us"]) == {"static", "eplb", "untrained", "supervised", "policy", "policy planner"}
    assert "policy" in capsys.readouterr().out
    for name in (CHECKPOINT_NAME, "policy.pt", "planners.png", "summary.png"):
        assert (tmp_path / "run" / name).is_file()
    sim = Simulator("mixtral-8x7b", "h800-2x4")
    trace = TokenTrace.load(trace_file)
    planner = Policy(sim, checkpoint=tmp_path / "run", estimate=False)
    assert planner.settings.operations == 2  # as in training
    protocol = Protocol(Traffic("prefill", 4, 1, schedule="drift"), intervals=1)
    assert evaluate_planner(planner, "policy", trace, trace, protocol).total_us > 0


def test_models_clusters_and_profiles_are_trained_in_turn(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = np.random.default_rng(1).integers(0, 6, (512, 1, 1)).astype(np.int16)
    other = TokenTrace(experts, n_experts=6, seq_lens=np.full(64, 8), name="other", model="six")
    six = ModelSpec("six", 1, 6, 1, 64, 64)
    monkeypatch.setattr(task_module, "model_for", lambda trace, model: six if trace.n_experts == 6 else MODEL)
    traces = (str(trace_file), str(other.save(tmp_path / "other.npz")))
    played: list[tuple[int, int, str]] = []
    collect = marl.Rollouts.collect

    def counted(self: Any) -> Any:
        played.append((self.batch.n_experts, self.batch.n_gpus, self.batch.simulator.profile.name))
        return collect(self)

    monkeypatch.setattr(marl.Rollouts, "collect", counted)
    changes = {"cluster": ("h800-2x4", "h800-1x4"), "profile": ("sglang-prefill", "vllm-deepep")}
    args = file_args(trace_file, tmp_path / "run", **changes, total_timesteps=256, model=None, eval_interval=0)
    result = marl.train(replace(args, trace=traces), World())
    assert len(played) == 16
    every = {(e, g, p) for e in (4, 6) for g in (8, 4) for p in ("sglang-prefill", "vllm-deepep")}
    assert set(played[:8]) == every
    assert played[8:] == played[:8]
    printed = capsys.readouterr().out
    assert all(f"{name} on {cluster}, {profile}" in printed for name in ("pairs", "other")
               for cluster in ("h800-2x4", "h800-1x4") for profile in ("sglang-prefill", "vllm-deepep"))  # fmt: skip
    assert result["vs_eplb"] > 0


def test_validation_does_not_change_the_training(trace_file: Path, tmp_path: Path) -> None:
    for name, interval in (("often", 1), ("never", 0)):
        marl.train(file_args(trace_file, tmp_path / name, eval_interval=interval, eval_streams=0), World())
    states_agree(tmp_path / "often", tmp_path / "never")


def test_decentralised_critics_train_each_actor_on_its_own_advantage() -> None:
    """Only the expert's critic has an advantage: the GPU actor's own layers must not get a gradient."""
    args, agent, rollouts = rollout(ablate=("two-critics",), vf_coef=0.0, ent_coef=0.0, norm_adv=False, update_epochs=1)
    batch = rollouts.collect()
    agent.set_value_scale(0.0, 1.0)
    batch.advantages[:, 1] = 0.0
    before = {name: weight.detach().clone() for name, weight in agent.named_parameters()}
    marl.update(agent, torch.optim.SGD(agent.parameters(), lr=1.0), batch, args, World())
    changed = {name for name, weight in agent.named_parameters() if not torch.equal(weight, before[name])}
    assert "expert_head.2.weight" in changed
    assert not [name for name in changed if name.startswith(("node_head", "nodes_in", "look_scale"))]


def test_init_takes_the_policy_unchanged(trace_file: Path, tmp_path: Path) -> None:
    """Logits are scaled only after a supervised phase, not after loading a trained policy."""
    common = {
        "total_timesteps": 0,
        "pretrain_states": 0,
        "eval_streams": 0,
        "eval_interval": 0,
        "pretrain_sharpen": 4.0,
    }
    marl.train(file_args(trace_file, tmp_path / "first", **common), World())
    first = tmp_path / "first" / "policy.pt"
    marl.train(file_args(trace_file, tmp_path / "second", init=str(first), seed=2, **common), World())
    before, after = (read_policy(folder / "policy.pt")["weights"] for folder in (first.parent, tmp_path / "second"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def states_agree(a: Path, b: Path) -> None:
    first, second = (load_checkpoint(folder / CHECKPOINT_NAME, "ppo_moe_marl") for folder in (a, b))
    assert first["iteration"] == second["iteration"]
    for name, tensor in first["agent"].items():
        assert torch.equal(tensor, second["agent"][name]), name


def test_a_killed_and_resumed_run_is_bit_equal(trace_file: Path, tmp_path: Path) -> None:
    """With two tasks, so that both continue where they were."""
    whole, broken, profiles = tmp_path / "whole", tmp_path / "broken", ("sglang-prefill", "vllm-deepep")
    args = file_args(trace_file, whole, total_timesteps=640, eval_streams=0, eval_interval=0, profile=profiles)
    marl.train(args, World())
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in {
            **SMALL,
            "num_envs": 4,
            "num_steps": 4,
            "total_timesteps": 640,
            "tokens_per_rank": 4,
        }.items()
    ]
    flags += [
        "--model=mixtral-8x7b", "--cluster=h800-2x4", "--checkpoint-interval=2", "--pretrain-states=16",
        "--eval-interval=0", "--eval-streams=0", "--learning-rate=1e-3", f"--run-dir={broken}", "--resume",
        "--eval-planners", "static", "eplb", "--trace", str(trace_file), "--profile", *profiles,
    ]  # fmt: skip
    command = [sys.executable, str(FOLDER / "ppo_moe_marl.py"), *dict.fromkeys(flags)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        limit = time.monotonic() + 120
        checkpoint = broken / CHECKPOINT_NAME
        while not checkpoint.exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    assert checkpoint.exists(), errors.decode()[-2000:]
    marl.train(replace(args, run_dir=broken, resume=True), World())
    states_agree(whole, broken)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_last_checkpoint(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = marl.update, []

    def wrong(*arguments: Any) -> dict[str, float]:
        calls.append(1)
        return right(*arguments) | ({"losses/policy_loss": float("nan")} if len(calls) == 4 else {})

    monkeypatch.setattr(marl, "update", wrong)
    folder = tmp_path / "run"
    with pytest.raises(FloatingPointError, match=rf"iteration 4.*last good checkpoint is {folder / CHECKPOINT_NAME}"):
        marl.train(file_args(trace_file, folder, eval_interval=0, eval_streams=0), World())
    assert load_checkpoint(folder / CHECKPOINT_NAME, "ppo_moe_marl")["iteration"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "deepseek-v2-lite"}, "top-2 of 4 experts, but model 'deepseek-v2-lite' is top-6 of 64"),
        ({"cluster": ("h800-3x3x3",)}, "unknown cluster|NODESxGPUS"),
        ({"num_steps": 5}, "multiple of ops_per_layer"),
        ({"hidden": 0}, "hidden is 0"),
        ({"num_minibatches": 3}, "8 visits to a layer, which do not divide into 3 minibatches"),
        ({"init": "pretrained"}, "--init pretrained has network"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_training(
    trace_file: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, CheckpointError), match=message):
        marl.train(file_args(trace_file, tmp_path / "run", **changes), World())
    assert not (tmp_path / "run" / CHECKPOINT_NAME).exists()


def test_an_evaluation_trace_of_another_model_is_refused(trace_file: Path, tmp_path: Path) -> None:
    other = TokenTrace(np.zeros((64, 1, 1), np.int16), n_experts=2, seq_lens=[32, 32], name="other")
    path = other.save(tmp_path / "other.npz")
    with pytest.raises(ValueError, match="expected traces of one model"):
        marl.train(file_args(trace_file, tmp_path / "run", eval_trace=(str(path),)), World())


def test_smoke_the_script_prints_the_result_as_its_last_line(trace_file: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, str(FOLDER / "ppo_moe_marl.py"), "--trace", str(trace_file), "--model", "mixtral-8x7b",
        "--cluster", "h800-2x4", "--run-dir", str(tmp_path / "run"), "--total-timesteps", "0",
        "--pretrain-states", "0", "--eval-streams", "1", "--intervals", "1", "--tokens-per-rank", "4",
        "--eval-planners", "static", "eplb", "--num-envs", "2", "--num-steps", "16", "--num-minibatches", "2",
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    last = run.stdout.strip().splitlines()[-1]
    assert last.startswith("result ")
    assert json.loads(last.removeprefix("result "))["total_us"]["untrained"] > 0
