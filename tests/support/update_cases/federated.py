"""Agents that learn in their own environments and stay close to their neighbours."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn.utils import parameters_to_vector

from update_cases.base import BOX, CPU, DISCRETE, Case, Played, Problem, cut, equal_parts
from update_cases.continuous import diagonal_normal
from update_reference import Sample, transitions


class FederatedCase(Case):
    name = "ppo_federated"
    small = Case.small | {"num_envs": 3, "num_steps": 6, "n_agents": 3, "hidden": 8, "penalty_coeff": 0.7,
                          "adaptive_kl_beta": 0.6, "env_id": DISCRETE}  # fmt: skip
    rows = 18
    has_world = False
    matrix = np.array([[0.0, 1.0, 1.0], [2.0, 0.0, 0.5], [1.0, 1.0, 0.0]])

    def make_learner(self, args: Any) -> Any:
        learner = self.trainer.Learner(args, 1, self.matrix, CPU)
        with torch.no_grad():
            learner.agent.policy.net[4].weight.mul_(100)
            if learner.agent.policy.logstd is not None:
                learner.agent.policy.logstd.copy_(torch.tensor([0.1, -0.4]))
        return learner

    def of(self, policy: Any, x: Tensor, mask: Any = None) -> Any:
        """The distribution of a policy for one observation."""
        out = policy.net(x)
        if policy.logstd is not None:
            return diagonal_normal(out, policy.logstd.exp())
        return Categorical(logits=out if mask is None else out.masked_fill(~torch.as_tensor(mask), -math.inf))

    def distribution(self, agent: Any, x: Tensor, mask: Any) -> Any:
        return self.of(agent.policy, x, mask)

    def entropy(self, agent: Any, x: Tensor, mask: Any) -> Tensor:
        return self.distribution(agent, x, mask).entropy() if mask is None else super().entropy(agent, x, mask)

    def valid(self, policy: Any, x: Tensor, mask: Tensor | None) -> Any:
        """The distribution over the valid actions alone."""
        return self.of(policy, x) if mask is None else Categorical(logits=policy.net(x)[mask])

    def value(self, agent: Any, x: Tensor) -> Tensor:
        return agent.critic(x)[0]

    def made_up_actions(self) -> Tensor:
        return torch.arange(self.rows) % self.num_actions

    def problem(self, masked: bool = False, kl_coef: float = 0.0, **changes: Any) -> Problem:
        torch.manual_seed(0)
        args = self.args(**changes)
        learner = self.make_learner(args)
        agent = learner.agent
        neighbours = {0: copy.deepcopy(agent.policy), 2: copy.deepcopy(agent.policy)}
        with torch.no_grad():
            for policy in neighbours.values():
                for parameter in policy.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
            old = copy.deepcopy(agent.policy)
            for parameter in old.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        learner.neighbours = {j: parameters_to_vector(policy.parameters()) for j, policy in neighbours.items()}
        actions = self.made_up_actions()
        masks = torch.nn.functional.one_hot((actions + 1) % self.num_actions, self.num_actions) == 0 if masked else None
        columns = self.made_up(agent, self.made_up_obs(), actions, masks) | {"masks": masks}
        with torch.no_grad():
            columns["dist"] = old(columns["obs"]) if masks is None else old(columns["obs"]).where(masks, -1e8)
        learner.batch = batch = self.trainer.Transitions(**columns)
        each_mask = [None] * self.rows if masks is None else list(masks)
        s = self.settings(args)
        beta = learner.beta
        divergences: list[tuple[float, float]] = []

        def both(p: Any, q: Any, i: int) -> tuple[Any, Any]:
            return self.valid(p, batch.obs[i], each_mask[i]), self.valid(q, batch.obs[i], each_mask[i])

        def samples_of(rows: list[int]) -> tuple[list[Sample], Tensor]:
            extra, own_kl, comm_kl = torch.zeros(()), torch.zeros(()), torch.zeros(())
            if not args.use_clipping:
                pairs = [both(old, agent.policy, i) for i in rows]
                own_kl = sum(kl_divergence(p, q) for p, q in pairs) / len(rows)
                extra = extra + beta * own_kl
            if args.use_comm_penalty:
                for j, policy in neighbours.items():
                    pairs = [both(agent.policy, policy, i) for i in rows]
                    kl = sum(kl_divergence(p, type(q)(**frozen(q))) for p, q in pairs) / len(rows)
                    comm_kl = comm_kl + self.matrix[1, j] * kl
                extra = extra + args.penalty_coeff * comm_kl
            divergences.append((float(own_kl.detach()), float(comm_kl.detach())))
            return [self.sample(agent, batch, i) for i in rows], extra

        def more_metrics(outcome: Any) -> dict[str, float]:
            own_kl, comm_kl = (float(np.mean(column)) for column in zip(*divergences, strict=True))
            terms = {
                "policy": outcome.mean("policy_loss"),
                "entropy": args.ent_coef * outcome.mean("entropy"),
                "value": args.vf_coef * outcome.mean("value_loss"),
                "comm_penalty": args.penalty_coeff * comm_kl,
            }
            new_beta, found = beta, {"losses/own_kl": own_kl, "losses/comm_kl": comm_kl}
            if not args.use_clipping:
                terms["kl_penalty"] = beta * own_kl
                with torch.no_grad():
                    kls = [float(kl_divergence(*both(old, agent.policy, i))) for i in range(self.rows)]
                found["losses/kl_after_update"] = kl = float(np.mean(kls))
                target = args.adaptive_kl_target
                new_beta = beta * 2 if kl > 1.5 * target else beta / 2 if kl < target / 1.5 else beta
            total = sum(map(abs, terms.values()))
            found |= {f"charts/loss_fractions/{name}": abs(term) / total for name, term in terms.items()}
            return found | {"charts/beta": beta, "next beta": new_beta}

        return Problem(
            agent,
            learner.optimizer,
            lambda world: learner.learn() | {"next beta": learner.beta},
            samples_of,
            lambda order: equal_parts(order, args.num_minibatches),
            s,
            (batch.values.tolist(), batch.returns.tolist()),
            more_metrics=more_metrics,
        )

    def schedules(self, folder: Path, iterations: int, **changes: Any) -> list[dict[str, float]]:
        args = self.args(total_timesteps=iterations * self.rows, **changes)
        learner = self.make_learner(args)
        used: list[dict[str, float]] = []
        learn = learner.learn

        def spy() -> dict[str, float]:
            used.append({"learning_rate": learner.optimizer.param_groups[0]["lr"]})
            return learn()

        learner.learn = spy
        for i in range(iterations):
            charts = learner.iterate()
            assert charts["charts/learning_rate"] == used[i]["learning_rate"]
            assert charts["charts/mean_return_100"] == pytest.approx(np.mean(learner.returns_100), nan_ok=True)
        assert learner.returns_100, "no episode has ended"
        return used

    def gamma_and_lambda(self, args: Any) -> tuple[float, float]:
        return args.gamma, args.gae_lambda if args.gae else 1.0

    def play(self, count: int = 3, **changes: Any) -> Played:
        torch.manual_seed(0)
        args = self.args(**changes)
        learner = self.make_learner(args)
        rollouts = []
        for _ in range(count):
            charts = learner.collect()
            rollouts.append((learner.batch, charts))
        scripts = [env.unwrapped for env in learner.envs.envs]
        steps = cut([transitions(each.journal, False) for each in scripts], args.num_steps)
        return Played(args, learner.agent, rollouts, steps, args.num_envs, [each.journal[0].obs for each in scripts])

    def rows_of(self, batch: Any) -> dict[str, Tensor]:
        """The stored distributions must be those that the stored log-probabilities belong to."""
        assert batch.actions.dtype == (torch.int64 if batch.actions.ndim == 1 else torch.float32)
        known = Categorical(logits=batch.dist) if batch.actions.ndim == 1 else diagonal_normal(*halves(batch.dist))
        torch.testing.assert_close(known.log_prob(batch.actions), batch.logprobs)
        return super().rows_of(batch)

    def charts(self, played: Played) -> list[dict[str, float]]:
        return [
            {key: value for key, value in charts.items() if key != "charts/mean_return_100"}
            for charts in super().charts(played)
        ]


def halves(dist: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations."""
    mean, logstd = dist.chunk(2, -1)
    return mean, logstd.exp()


def frozen(distribution: Any) -> dict[str, Any]:
    """The parameters of a distribution, without gradients."""
    if isinstance(distribution, Categorical):
        return {"logits": distribution.logits.detach()}
    base = Normal(distribution.base_dist.loc.detach(), distribution.base_dist.scale.detach())
    return {"base_distribution": base, "reinterpreted_batch_ndims": 1}


class FederatedBoxCase(FederatedCase):
    small = FederatedCase.small | {"env_id": BOX}
    num_actions = 2

    @property
    def id(self) -> str:
        return "ppo_federated-box"

    def made_up_actions(self) -> Tensor:
        return torch.randn(self.rows, 2)

    def played_action(self, stored: Tensor) -> np.ndarray:
        """Actions from −1 to 1 are scaled to the range of the space, −2 … 2 and 0 … 3, and clipped to it."""
        return np.clip(stored.numpy() * [2.0, 1.5] + [0.0, 1.5], [-2, 0], [2, 3])
