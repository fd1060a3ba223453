"""Placement: two actors, one critic or two, and roll-outs in the real batched environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_ppo_moe_marl import SMALL, make_args, tiny_task
from torch import Tensor, nn

from update_cases.base import CPU, Case, Problem, equal_parts
from update_reference import Sample, Transition, advantages_of

VALUE_MEAN, VALUE_STD = 0.3, 1.7


@contextmanager
def single_precision() -> Iterator[None]:
    """The environment computes with 32 bits."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@cache
def real_batch(ablate: tuple[str, ...]) -> Any:
    """Inputs and actions of a roll-out. Its numbers are replaced, so the policy does not matter."""
    case = PlacementCase()
    args = case.args(ablate=ablate)
    with single_precision():
        torch.manual_seed(0)
        rollouts = case.trainer.Rollouts(args, case.trainer.make_agent(args), tiny_task(args), CPU)
        rollouts.restart(5)
        return rollouts.collect()


def wide(x: Any) -> Any:
    """64 bits, or the default of the test, for all floating-point tensors of a batch."""
    if isinstance(x, dict):
        return {key: wide(value) for key, value in x.items()}
    return x.to(torch.get_default_dtype()) if x.is_floating_point() else x


class PlacementCase(Case):
    name = "ppo_moe_marl"
    has_rollout = False  # it has a test of its own
    has_schedule = False
    logs_updates = False
    small = SMALL | {"num_envs": 4, "num_steps": 4, "num_minibatches": 3, "update_epochs": 3, "envs_per_stream": 2,
                     "target_kl": None}  # fmt: skip
    losses = ("policy_loss", "value_loss", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
    ablate: tuple[str, ...] = ()

    def groups(self, args: Any) -> list[Any]:
        return [args, *(value for value in vars(args).values() if is_dataclass(value))]

    def knows(self, name: str) -> bool:
        return any(name in vars(group) for group in self.groups(self.trainer.Args()))

    def args(self, **changes: Any) -> Any:
        return make_args(
            **{key: value for key, value in (self.small | {"ablate": self.ablate} | changes).items() if self.knows(key)}
        )

    def make_agent(self, args: Any) -> nn.Module:
        agent = self.trainer.make_agent(args)
        with torch.no_grad():
            for head in (agent.expert_head, agent.node_head):
                head[-1].weight.mul_(50)
        agent.set_value_scale(VALUE_MEAN, VALUE_STD)
        if "simultaneous" in agent.ablate:
            agent.chosen_in.requires_grad_(False)  # not used
        return agent

    def outputs(self, agent: Any, batch: Any, row: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Log-probabilities of the chosen expert and node, entropies of the two actors, and values, of one step."""
        i, visit = torch.tensor([row]), torch.tensor([row * batch.visits // len(batch)])
        inputs = {key: x[i] for key, x in batch.steps.items()} | {"same_node": batch.same_node}
        inputs |= {key: x[visit] for key, x in batch.graphs.items()}
        legal = batch.legal[i]
        *logits, values = agent(inputs, batch.expert[i], batch.parts[i], legal)
        masks = (inputs["expert_mask"], inputs["gpu_mask"] if "simultaneous" in agent.ablate else legal)
        logprobs, entropies = [], []
        for scores, mask, choice in zip(logits, masks, (batch.expert, batch.node), strict=True):
            assert bool(mask[0, choice[row]])
            p = torch.softmax(scores[0][mask[0]], 0)
            chosen = mask[0].nonzero()[:, 0].tolist().index(int(choice[row]))
            logprobs.append(p[chosen].log())
            entropies.append(-(p * p.log()).sum())
        return logprobs, entropies, values[0]

    def make_batch(self, agent: Any, args: Any, masked: bool) -> Any:
        batch = real_batch(args.ablation.ablate)
        batch = replace(batch, **{name: wide(x) for name, x in vars(batch).items()})
        with torch.no_grad():
            rows = [self.outputs(agent, batch, i) for i in range(len(batch))]
        logprobs = torch.tensor([[float(x) for x in row[0]] for row in rows])
        values = torch.stack([row[2] for row in rows])
        return replace(
            batch,
            logprobs=logprobs + 0.2 * torch.randn_like(logprobs),
            advantages=2 + 3 * torch.randn_like(values),
            returns=VALUE_MEAN + VALUE_STD * (values + torch.randn_like(values)),
            values=VALUE_MEAN + VALUE_STD * (values + 0.5 * torch.randn_like(values)),
        )

    def samples(self, agent: Any, batch: Any, row: int) -> list[Sample]:
        """One decision of both actors with one critic, or one of each actor with its own critic."""
        logprobs, entropies, values = self.outputs(agent, batch, row)
        old = [float(x) for x in batch.logprobs[row]]
        if "two-critics" not in agent.ablate:
            logprobs, entropies, old = [sum(logprobs)], [sum(entropies)], [sum(old)]
        old_values, targets = ((x[row] - VALUE_MEAN) / VALUE_STD for x in (batch.values, batch.returns))
        return [
            Sample(logprobs[i], entropies[i], values[i], old[i], float(old_values[i]),
                   float(batch.advantages[row, i]), float(targets[i]), actor=i)
            for i in range(len(values))
        ]  # fmt: skip

    def problem(self, masked: bool = False, kl_coef: float = 0.0, **changes: Any) -> Problem:
        args = self.args(**changes)
        real_batch(args.ablation.ablate)  # draws random numbers
        torch.manual_seed(0)
        agent = self.make_agent(args)
        batch = self.make_batch(agent, args, masked)
        optimizer = self.trainer.make_optimizer(agent, args.ppo.learning_rate)
        steps = len(batch) // batch.visits
        entropies: list[list[float]] = []

        def rows_of(visits: list[int]) -> list[int]:
            return [visit * steps + step for visit in visits for step in range(steps)]

        def samples_of(visits: list[int]) -> tuple[list[Sample], float]:
            with torch.no_grad():
                found = [[float(x) for x in self.outputs(agent, batch, row)[1]] for row in rows_of(visits)]
            entropies.append(np.mean(found, 0).tolist())
            return [sample for row in rows_of(visits) for sample in self.samples(agent, batch, row)], 0.0

        def update(world: Any, rank: int | None = None) -> dict[str, float]:
            part = batch
            if rank is not None:
                visits = torch.arange(rank, batch.visits, 2)
                rows = torch.tensor(rows_of(visits.tolist()))
                graphs = {key: x[visits] for key, x in batch.graphs.items()}
                columns = {name: x[rows] for name, x in vars(batch).items() if name not in KEPT}
                part = replace(batch, steps={key: x[rows] for key, x in batch.steps.items()}, graphs=graphs, **columns)
            return self.trainer.update(agent, optimizer, part, args, world)

        return Problem(
            agent,
            optimizer,
            update,
            samples_of,
            lambda order: equal_parts(order, args.ppo.num_minibatches),
            self.settings(args.ppo),
            (batch.values.flatten().tolist(), batch.returns.flatten().tolist()),
            more_metrics=lambda _: dict(
                zip(("losses/expert_entropy", "losses/node_entropy"), np.mean(entropies, 0), strict=True)
            ),
        )

    @torch.no_grad()
    def compare_rollouts(self, **changes: Any) -> None:
        """Compare two roll-outs with what the environment answered, one step of one environment at a time.

        An episode has two visits of two steps, so that visits end in the middle of episodes and of roll-outs.
        """
        torch.manual_seed(0)
        args = self.args(**({"gamma": 0.9, "gae_lambda": 0.8, "intervals": 2, "num_steps": 6} | changes))
        agent = self.make_agent(args)
        rollouts = self.trainer.Rollouts(args, agent, tiny_task(args), CPU)
        rollouts.restart(5)
        played: list[dict[str, Any]] = []
        seen: list[dict[str, Tensor]] = []
        plain, plain_inputs, lookahead = rollouts.batch.step, rollouts.inputs, rollouts.batch.lookahead

        def inputs() -> dict[str, Tensor]:
            # A copy: what an actor looks at changes the memory of the environment.
            found = plain_inputs()
            similar = self.trainer.observed.similar_experts(rollouts.batch.obs["affinity"])
            assert torch.equal(found["similar"], similar)
            seen.append({key: x.clone() for key, x in found.items()})
            return found

        def look(experts: Tensor) -> Tensor:
            seen[-1]["looked"] = lookahead(experts)
            return seen[-1]["looked"]

        def step(expert: Tensor, node: Tensor) -> Any:
            legal = rollouts.batch.obs["joint_mask"][torch.arange(len(expert)), expert].bool()
            looked = seen[-1].pop("looked")[:, 0]
            if played:
                assert bool((rollouts.batch.saved[played[-1]["done"]] == 0).all()), "an ended episode was not reset"
            result = plain(expert, node)
            state = rollouts.batch.episode
            played.append({
                "inputs": seen[-1], "expert": expert.clone(), "node": node.clone(), "parts": 100 * looked,
                "legal": legal.clone(), "reward": result[1].clone(), "done": result[2].clone(),
                "saved_us": state["times_us"][:, self.trainer.TIME_OPERATION].clone(),
                "visit_end": state["clock"][:, self.trainer.CLOCK_OPERATION] == 0,
                "saved": rollouts.batch.saved.clone(),
            })  # fmt: skip
            return result

        rollouts.batch.step, rollouts.inputs, rollouts.batch.lookahead = step, inputs, look
        assert rollouts.episodic_return is None
        # Times between readings of the clock: 1 and 100 belong to the policy, 10 and 1000 to the simulator.
        readings = np.cumsum([10000, 1, 10, 100, 1000] * 2 * args.ppo.num_steps).tolist()
        for number in (1, 2):
            played.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.trainer, "time", SimpleNamespace(perf_counter=lambda: readings.pop(0)))
                batch = rollouts.collect()
            steps = number * args.ppo.num_steps
            assert rollouts.seconds == {"policy": 101 * steps, "simulator": 1010 * steps}
            self.compare_rollout(args, agent, batch, played, seen[-1], rollouts.batch.rules_host.static_us)
            ended = [float(step["saved"][step["done"]].mean()) for step in played if bool(step["done"].any())]
            if ended:
                assert np.isclose(rollouts.episodic_return, ended[-1])
        assert len(batch) == args.ppo.num_envs * args.ppo.num_steps

    def compare_rollout(self, args: Any, agent: Any, batch: Any, played: list[Any], last: Any, static_us: Any) -> None:
        ops, num_envs = args.task.ops_per_layer, args.ppo.num_envs
        # Rows are ordered by visit to a layer, then environment, then step of the visit.
        place = [(t - t % ops) * num_envs + env * ops + t % ops for t in range(len(played)) for env in range(num_envs)]
        assert sorted(place) == list(range(len(batch)))
        assert {len(column) for column in batch.graphs.values()} == {len(batch) // ops}

        def value(inputs: Any, env: int) -> list[float]:
            one = {key: x if key == "same_node" else x[env : env + 1] for key, x in inputs.items()}
            return (agent.values(one, agent.encode(one))[0] * VALUE_STD + VALUE_MEAN).tolist()

        critics = batch.values.shape[1]
        advantages = np.zeros((len(played), num_envs, critics))
        numbers = [[value(step["inputs"], env) for env in range(num_envs)] for step in played]
        numbers.append([value(last, env) for env in range(num_envs)])
        for env in range(num_envs):
            for critic in range(critics):
                chain = []
                for t, step in enumerate(played):
                    operation = args.task.horizon > 0
                    reward = step["saved_us"][env] / static_us if operation else step["reward"][env]
                    end = bool(step["done"][env]) or (operation and bool(step["visit_end"][env]))
                    outcome = Transition(None, None, None, 0, end, False, None, None, False)
                    chain.append((outcome, float(reward), numbers[t][env][critic], numbers[t + 1][env][critic]))
                advantages[:, env, critic] = advantages_of(chain, args.ppo.gamma, args.ppo.gae_lambda, True)
        size = args.ppo.envs_per_stream
        baselines = np.zeros_like(advantages)
        for env in range(num_envs):
            others = [other for other in range(num_envs) if other // size == env // size and other != env]
            if others:
                baselines[:, env] = advantages[:, others].mean(1)
        for row, (t, env) in zip(place, np.ndindex(len(played), num_envs), strict=True):
            step = played[t]
            for name in ("expert", "node", "legal", "parts"):
                assert torch.equal(getattr(batch, name)[row], step[name][env]), name
            for key, column in batch.steps.items():
                assert torch.equal(column[row], step["inputs"][key][env]), key
            for key, column in batch.graphs.items():
                first = played[t - t % ops]["inputs"]
                assert torch.equal(column[row // ops], first[key][env]), key
            logprobs, _, _ = self.outputs(agent, batch, row)
            np.testing.assert_allclose(batch.logprobs[row], logprobs, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(batch.values[row], numbers[t][env], rtol=1e-4, atol=1e-5)
            targets = advantages[t, env] + numbers[t][env]
            np.testing.assert_allclose(batch.returns[row], targets, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(
                batch.advantages[row], advantages[t, env] - baselines[t, env], rtol=1e-4, atol=1e-5
            )

    def run_args(self, folder: Path, iterations: int, **changes: Any) -> Any:
        small = {
            "trace": ("tiny_moe",), "layers": 1, "tokens_per_rank": 4, "hidden": 8, "pretrain_states": 8,
            "eval_interval": 0, "eval_planners": (), "eval_streams": 0, "num_minibatches": 2,
        }  # fmt: skip
        return self.args(**(small | {"run_dir": folder} | changes))


KEPT = ("steps", "graphs", "same_node")


class TwoCriticsCase(PlacementCase):
    """Each actor has its own critic, and the second does not see what the first has chosen."""

    has_early_stop = False  # as with one critic
    ablate = ("two-critics", "simultaneous")

    @property
    def id(self) -> str:
        return f"{self.name}_two_critics"
