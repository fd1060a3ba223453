"""``ppo_federated.py``: whole runs on small cases, compared with a slow reference that is written from the formulas."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal, kl_divergence

from clustergym.common.checkpoints import load_checkpoint
from clustergym.gpu_allocation import edge_mixes
from clustergym.training.args import FlagError, parse_args
from clustergym.training.distributed import World
from clustergym.training.logs import read_scalars
from clustergym.training.runs import Run
from trainers import FOLDER, load_trainer
from update_reference import Adam, Sample, Script, Settings, Transition, advantages_of, minibatch_loss, transitions

fed = load_trainer("ppo_federated")
TRAINER = FOLDER / "ppo_federated.py"
MATRIX = np.array([[0.0, 1.0, 0.0], [2.0, 3.0, 0.5], [1.0, 0.0, 0.0]])  # asymmetric, with a diagonal entry
SMALL: dict[str, Any] = {
    "n_agents": 3, "num_envs": 2, "num_steps": 6, "num_minibatches": 2, "update_epochs": 2, "local_updates": 1,
    "total_timesteps": 24, "hidden": 8, "eval_episodes": 0, "seed": 3, "checkpoint_interval": 1, "cuda": False,
    "learning_rate": 1e-2, "penalty_coeff": 0.7,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("reproducible")


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    """Registers scripted environments with discrete, masked and Box actions. Returns those that are made."""
    made: list[Script] = []
    box = gym.spaces.Box(np.array([-2, 0], np.float32), np.array([2, 3], np.float32))
    spaces = {"Discrete": gym.spaces.Discrete(4), "Masked": gym.spaces.Discrete(4), "Box": box}
    for name, space in spaces.items():

        def make(space: Any = space, masked: bool = name == "Masked", **_: Any) -> Script:
            made.append(Script(space, masked=masked, first_episode=len(made)))
            return made[-1]

        gym.register(f"Federated{name}-v0", make, disable_env_checker=True)
    yield made
    for name in spaces:
        del gym.registry[f"Federated{name}-v0"]


def args_of(folder: Path, **changes: Any) -> Any:
    """Arguments of a run with the matrix of this file."""
    folder.mkdir(exist_ok=True)
    matrix = folder / "matrix.json"
    matrix.write_text(json.dumps({"comm_matrix": MATRIX.tolist()}))
    return fed.Args(**(SMALL | {"comm_matrix_config": matrix, "run_dir": folder / "run"} | changes))


def members_of(folder: Path) -> list[dict[str, Any]]:
    """States of all agents in a checkpoint, of one process or of several."""
    ranks = load_checkpoint(folder / "checkpoint.pt", "ppo_federated")["ranks"]
    return [member for rank in ranks for member in rank["members"]]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or a != a)


# The slow reference: one agent, one decision at a time, with 64 bits


class Slow:
    """An agent of the reference. ``net`` is a copy of the trainer's networks, used layer by layer."""

    def __init__(self, net: Any, args: Any) -> None:
        self.net, self.args = net.double(), args
        self.adam = Adam(list(self.net.parameters()), args.learning_rate)
        self.beta = args.kl_coef

    def policy(self, x: Any, mask: Any, net: Any = None) -> Any:
        """The distribution over the valid actions."""
        actor = (net or self.net).actor
        out = actor.net(torch.as_tensor(x, dtype=torch.float64))
        if actor.logstd is not None:
            return Independent(Normal(out, actor.logstd.exp()), 1)
        return Categorical(logits=out if mask is None else out.masked_fill(~torch.as_tensor(mask), -math.inf))

    def valid(self, x: Any, mask: Any, net: Any = None) -> Any:
        """The same, without invalid actions. Their probability 0 makes the formulas of torch NaN."""
        policy = self.policy(x, mask, net)
        return policy if mask is None else Categorical(logits=policy.logits[torch.as_tensor(mask)])

    def value(self, x: Any) -> Tensor:
        return self.net.critic(torch.as_tensor(x, dtype=torch.float64))[0]

    def learn(
        self, steps: list[list[Transition]], actions: list[Tensor], orders: list[list[int]], others: dict[int, Any]
    ) -> None:
        """One update. ``steps``: transitions by step and environment. ``others``: weight and network by neighbour."""
        args, rows = self.args, [each for step in steps for each in step]
        old = deepcopy(self.net)
        with torch.no_grad():
            values = [float(self.value(row.obs)) for row in rows]
            following = [float(self.value(row.successor)) for row in rows]
            logprobs = [float(self.policy(r.obs, r.mask).log_prob(a)) for r, a in zip(rows, actions, strict=True)]
        advantages = [0.0] * len(rows)
        for env in range(args.num_envs):
            own = range(env, len(rows), args.num_envs)
            chain = [(rows[i], rows[i].reward, values[i], following[i]) for i in own]
            found = advantages_of(chain, args.gamma, args.gae_lambda if args.gae else 1.0, True)
            for i, advantage in zip(own, found, strict=True):
                advantages[i] = advantage
        settings = Settings(
            args.learning_rate, args.clip_coef, args.use_clipping, args.clip_vloss, args.norm_adv, args.ent_coef,
            args.vf_coef, 0.0, args.max_grad_norm,
        )  # fmt: skip
        size = len(rows) // args.num_minibatches
        for order in orders:
            assert sorted(order) == list(range(len(rows)))
            for part in (order[start : start + size] for start in range(0, len(order), size)):
                samples, extra = [], torch.zeros((), dtype=torch.float64)
                for i in part:
                    x, mask = rows[i].obs, rows[i].mask
                    now, valid = self.policy(x, mask), self.valid(x, mask)
                    sample = (now.log_prob(actions[i]), valid.entropy(), self.value(x))
                    samples.append(Sample(*sample, logprobs[i], values[i], advantages[i], advantages[i] + values[i]))
                    if not args.use_clipping:
                        extra = extra + self.beta * kl_divergence(self.valid(x, mask, old), valid) / len(part)
                    for weight, other in others.values():
                        kl = kl_divergence(valid, self.valid(x, mask, other))
                        extra = extra + args.penalty_coeff * weight * kl / len(part)
                loss, _ = minibatch_loss(samples, extra, settings)
                gradients = torch.autograd.grad(loss, self.adam.parameters)
                norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
                self.adam.step([g * min(1.0, args.max_grad_norm / (norm + 1e-6)) for g in gradients])
        if not args.use_clipping:
            pairs = [(self.valid(r.obs, r.mask, old), self.valid(r.obs, r.mask)) for r in rows]
            with torch.no_grad():
                kl = float(np.mean([float(kl_divergence(p, q)) for p, q in pairs]))
            self.beta *= 2 if kl > 1.5 * args.kl_target else 0.5 if kl < args.kl_target / 1.5 else 1
            self.beta = max(self.beta, 0.01)


class Spies:
    """The initial networks of the agents, the orders of the minibatches and the noise of the Box actions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nets: list[Any] = []
        self.orders: list[list[int]] = []
        self.noise: list[Tensor] = []
        plain_agent, plain_randperm, plain_randn = fed.Agent, torch.randperm, torch.randn

        def agent(*args: Any) -> Any:
            made = plain_agent(*args)
            with torch.no_grad():  # policies that differ between states and agents
                made.actor.net[-1].weight.mul_(100)
                made.actor.net[-1].bias.normal_()
            self.nets.append(deepcopy(made))
            return made

        def randperm(*args: Any, **options: Any) -> Tensor:
            order = plain_randperm(*args, **options)
            self.orders.append(order.tolist())
            return order

        def randn(*args: Any, **options: Any) -> Tensor:
            self.noise.append(plain_randn(*args, **options))
            return self.noise[-1]

        monkeypatch.setattr(fed, "Agent", agent)
        monkeypatch.setattr(torch, "randperm", randperm)
        monkeypatch.setattr(torch, "randn", randn)


def journals(scripts: list[Script], args: Any, index: int, iteration: int) -> list[list[Transition]]:
    """What agent ``index`` experienced in an iteration, by step and environment."""
    own = scripts[index * args.num_envs : (index + 1) * args.num_envs]
    by_env = [[t for t in transitions(each.journal, False) if t is not None] for each in own]
    rows = slice(iteration * args.num_steps, (iteration + 1) * args.num_steps)
    return [list(step) for step in zip(*(env[rows] for env in by_env), strict=True)]


CASES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "without_clips": {"norm_adv": False, "clip_vloss": False, "max_grad_norm": 100.0, "vf_coef": 0.9, "gae": False},
    "masked_kl_penalty": {"env_id": "FederatedMasked-v0", "use_clipping": False, "kl_target": 1e-4},
    "loose_kl_target": {"use_clipping": False, "kl_target": 10.0, "kl_coef": 0.015},
    "box": {"env_id": "FederatedBox-v0"},
    "box_kl_penalty": {"env_id": "FederatedBox-v0", "use_clipping": False, "gamma": 0.7},
    "frozen_neighbours": {"local_updates": 2},
    "averaged": {"average_weights": True},
    "alone": {"use_comm_penalty": False},
}


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_weights_after_iterations_equal_the_reference(
    case: str, iterations: int, scripts: list[Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"env_id": "FederatedDiscrete-v0"} | CASES[case] | {"total_timesteps": 12 * iterations}
    args, spies = args_of(tmp_path, **changes), Spies(monkeypatch)
    fed.train(args)
    agents = [Slow(net, args) for net in spies.nets]
    published = [deepcopy(agent.net) for agent in agents]
    orders, noise = iter(spies.orders), iter(spies.noise)
    for iteration in range(iterations):
        for i, agent in enumerate(agents):
            agent.adam.learning_rate = args.learning_rate * (1 - iteration / iterations)
            steps = journals(scripts, args, i, iteration)
            actions = []
            for step in steps:
                drawn = next(noise) if "Box" in args.env_id else None
                for env, row in enumerate(step):
                    assert row.mask is None or row.mask[row.action]
                    action = torch.as_tensor(row.action)
                    if drawn is not None:
                        policy = agent.policy(row.obs, None).base_dist
                        action = (policy.loc + policy.scale * drawn[env]).detach()
                        # From −1 … 1 to the range of the space, and clipped to it.
                        played = np.clip(action.numpy() * [2, 1.5] + [0, 1.5], [-2, 0], [2, 3])
                        np.testing.assert_allclose(row.action, played, atol=1e-5)
                    actions.append(action)
            others = {j: (MATRIX[i, j], published[j]) for j in range(3) if j != i and MATRIX[i, j]}
            own_orders = [next(orders) for _ in range(args.update_epochs)]
            agent.learn(steps, actions, own_orders, others if args.use_comm_penalty else {})
        if (iteration + 1) % args.local_updates == 0:
            published = [deepcopy(agent.net) for agent in agents]
        if args.average_weights:
            for i, agent in enumerate(agents):
                weights = [MATRIX[i, j] or float(i == j) for j in range(3)]
                nets = [list(net.parameters()) for net in published]
                for k, parameter in enumerate(agent.net.parameters()):
                    total = sum(w * net[k].detach() for w, net in zip(weights, nets, strict=True))
                    parameter.data = total / sum(weights)
    for agent, first, found in zip(agents, spies.nets, members_of(tmp_path / "run"), strict=True):
        assert found["kl_coef"] == pytest.approx(agent.beta)
        assert first is agent.net
        for name, weight in agent.net.state_dict().items():
            torch.testing.assert_close(found["agent"][name].double(), weight, rtol=1e-4, atol=2e-5, msg=name)


def test_actions_are_samples_of_the_policy(
    scripts: list[Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frequencies of the actions within 4 standard deviations of their probabilities."""
    changes = {"env_id": "FederatedDiscrete-v0", "num_steps": 150, "total_timesteps": 300, "update_epochs": 1}
    args, spies = args_of(tmp_path, **changes, n_agents=1, comm_matrix_config=None), Spies(monkeypatch)
    fed.train(args)
    agent = Slow(spies.nets[0], args)
    rows = [row for step in journals(scripts, args, 0, 0) for row in step]
    with torch.no_grad():
        p = torch.stack([agent.policy(row.obs, None).probs for row in rows]).numpy()
    chosen = np.eye(4)[[int(row.action) for row in rows]]
    assert p.max() > 0.5
    assert (np.abs((chosen - p).sum(0)) < 4 * np.sqrt((p * (1 - p)).sum(0))).all()


# Runs


class Crash(Exception):
    """Simulates the end of the process."""


@pytest.mark.parametrize("cut", [1, 3])
def test_resumed_run_is_bit_identical(cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between two exchanges, when the coefficients of the KL penalty are not those of the start."""
    changes = {"env_id": "gpu_allocation_v0", "use_clipping": False, "kl_target": 2e-3, "local_updates": 2}
    changes |= {"total_timesteps": 12 * 5, "num_envs": 3, "num_steps": 4}
    fed.train(args_of(tmp_path, **changes, run_dir=tmp_path / "whole"))
    checkpoint = Run.checkpoint

    def dying(self: Run, **state: Any) -> None:
        checkpoint(self, **state)
        if self.iteration == cut:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Run, "checkpoint", dying)
        with pytest.raises(Crash):
            fed.train(args_of(tmp_path, **changes))
    assert {member["kl_coef"] for member in members_of(tmp_path / "run")} != {1.0}
    torch.manual_seed(99)
    fed.train(args_of(tmp_path, **changes, resume=True))
    assert same(members_of(tmp_path / "whole"), members_of(tmp_path / "run"))


@pytest.mark.slow
def test_torchrun_gives_the_same_numbers_after_a_killed_rank(tmp_path: Path) -> None:
    """One process per agent. A rank is killed, torchrun starts all again, and the result is that of one process."""
    changes = {"env_id": "gpu_allocation_v0", "total_timesteps": 12 * 100, "n_agents": 2, "comm_matrix_config": "pair"}
    fed.train(args_of(tmp_path, **changes | {"comm_matrix_config": Path("pair"), "run_dir": tmp_path / "whole"}))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | changes).items()]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
        str(TRAINER), *flags, "--run-dir", str(tmp_path / "cut"),
    ]  # fmt: skip
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while not (tmp_path / "cut" / "checkpoint.pt").exists():
            assert launcher.poll() is None, launcher.communicate()
            time.sleep(0.02)
        ranks = [each for each in psutil.Process(launcher.pid).children() if each.environ().get("RANK") == "1"]
        ranks[0].kill()
        stdout, stderr = launcher.communicate()
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 0, stderr
    assert same(members_of(tmp_path / "whole"), members_of(tmp_path / "cut"))
    assert json.loads(stdout.splitlines()[-1].removeprefix("result "))["n_agents"] == 2


def test_logs_results_and_models_of_a_run(tmp_path: Path) -> None:
    changes = {"env_id": "CartPole-v1", "total_timesteps": 12 * 4, "local_updates": 2, "eval_episodes": 2}
    result = fed.train(args_of(tmp_path, **changes, save_model=True, eval_interval=2))
    assert result["steps"] == 3 * 12 * 4
    assert result["mean_return"] == pytest.approx(np.mean(list(result["mean_returns"].values())))
    run = tmp_path / "run"
    assert read_scalars(run, "losses/policy_loss")[0] == [36, 72, 108, 144]
    for i in range(3):
        own = run / f"agent_{i}"
        steps, value_loss = read_scalars(own, "losses/value_loss")
        assert steps == [12, 24, 36, 48]
        terms = ("policy", "entropy", "value", "kl_penalty", "comm_penalty")
        fractions = {name: read_scalars(own, f"charts/loss_fractions/{name}")[1] for name in terms}
        assert np.sum(list(fractions.values()), 0) == pytest.approx([1.0] * 4)
        total = np.abs(read_scalars(own, "losses/policy_loss")[1]) / fractions["policy"]
        assert np.array(value_loss) * 0.5 / total == pytest.approx(fractions["value"], rel=1e-4)
        penalty = 0.7 * np.array(read_scalars(own, "losses/comm_kl")[1]) / total
        assert penalty == pytest.approx(fractions["comm_penalty"], rel=1e-3)
        assert read_scalars(own, "eval/mean_return")[0] == [24]
        for j in {0, 1, 2} - {i}:
            assert read_scalars(own, f"charts/kl_{i}_{j}")[0] == [24, 48]
    model = load_checkpoint(run / "model.pt", "ppo_federated-model")
    for i, member in enumerate(members_of(run)):
        assert same(dict(model[f"agent_{i}"]), dict(member["agent"]))


def test_agents_differ_unless_their_weights_are_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for averaged in (False, True):
        nets: list[Any] = []
        plain = fed.Agent

        def agent(*given: Any, plain: Any = plain, nets: list[Any] = nets) -> Any:
            nets.append(plain(*given))
            return deepcopy(nets[-1])

        with monkeypatch.context() as patch:
            patch.setattr(fed, "Agent", agent)
            folder = tmp_path / str(averaged)
            fed.train(args_of(folder, env_id="CartPole-v1", average_weights=averaged, total_timesteps=12))
        assert same(nets[0].state_dict(), nets[1].state_dict()) == averaged


def test_edge_nodes_have_mixes_of_their_own() -> None:
    for i, mix in enumerate(edge_mixes(3)):
        envs = fed.make_envs("gpu_allocation_v0", i, 2)
        assert envs.unwrapped.batch.mixes == [mix, mix]
        assert envs.single_observation_space.shape == (19,)


# Flags


def test_commands_of_the_seed_are_understood() -> None:
    """Document 003, word by word."""
    common = ["--total-timesteps=1000000", "--n-agents=4", "--local-updates=16", "--num-envs=4"]
    common += ["--comm-matrix-config=comm_matrices/4_agents.json", "--use-clipping=True"]
    first = ["--total-timesteps=500000", "--n-agents=2", "--local-updates=16", "--num-envs=4"]
    args = parse_args(fed.Args, argv=[*first, "--exp-description=n_agents = 2, local-updates=16", "--comm-coeff=10"])
    assert (args.total_timesteps, args.n_agents, args.penalty_coeff) == (500_000, 2, 10.0)
    assert args.exp_description == "n_agents = 2, local-updates=16"
    args = parse_args(fed.Args, argv=common)
    assert (args.use_clipping, args.vf_coef, args.num_steps, args.local_updates) == (True, 0.5, 128, 16)
    weights = fed.load_matrix(args.comm_matrix_config, args.n_agents).tolist()
    assert weights == [[0, 100, 0, 0], [100, 0, 0, 0], [0, 0, 0, 100], [0, 0, 100, 0]]
    assert parse_args(fed.Args, argv=[*common, "--vf-coef=0.001"]).vf_coef == 0.001


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--n-agents=0", "--n-agents is 0: expected at least 1"),
        ("--local-updates=0", "--local-updates is 0: expected at least 1"),
        ("--comm-coeff=-1", "--penalty-coeff is -1.0: expected at least 0"),
    ],
)
def test_bad_flags_are_one_line(flag: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args(fed.Args, argv=[flag], ranges=fed.RANGES)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {complaint}\n"


def test_one_process_per_agent_is_required(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fed, "init_distributed", lambda *_: World(0, 2))
    with pytest.raises(FlagError, match="--n-agents is 3, but torchrun started 2 processes"):
        fed.train(args_of(tmp_path))
