"""A language model: tokens are actions, and a response is an episode."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from tiny_moe import END, TinyMoE, TinyMoEConfig, decode
from update_cases.base import Case, Problem, larger_first
from update_reference import Sample, Transition, advantages_of


class LLMCase(Case):
    """Tokens are actions; a response is an episode."""

    name = "ppo_llm"
    small = {"prompt_tokens": 3, "response_tokens": 5, "batch_size": 7, "num_minibatches": 3, "update_epochs": 2,
             "balance_coef": 0.4, "vf_coef": 0.3}  # fmt: skip
    config = TinyMoEConfig(n_layers=2, n_experts=4, top_k=2, hidden=16, intermediate=4, n_heads=2, context=32)
    has_world = False
    has_early_stop = False
    has_rollout = False
    logs_updates = False
    losses = ("policy_loss", "value_loss", "approx_kl", "clipfrac", "grad_norm", "max_ratio")

    def run_args(self, folder: Path, iterations: int, **changes: Any) -> Any:
        sizes = {"pretrain_steps": 1, "pretrain_batch": 2, "pretrain_length": 16, "eval_prompts": 2, "show": 0}
        text = folder.with_suffix(".txt")
        text.write_text("\n\n".join(f"Paragraph {i} has some words, and {i * i} more." for i in range(60)))
        more = {"model": self.config, "checkpoint_interval": 0, "iterations": iterations, "text": [text]}
        return self.args(**sizes, **more, run_dir=folder, **changes)

    def make_policy(self) -> Any:
        policy = self.trainer.PolicyWithValue(TinyMoE(self.config))
        with torch.no_grad():
            policy.language_model.embedding.mul_(20)
            policy.value_head.weight.normal_()
        return policy

    def response(self, policy: Any, tokens: Tensor, n_prompt: int) -> tuple[list[Any], list[Tensor]]:
        """Distribution and value before each token of the response, from one sequence at a time."""
        activations = policy.language_model.trunk(tokens[None, :-1])[0][0]
        rows = activations[n_prompt - 1 :]
        logits = rows @ policy.language_model.embedding.T
        values = rows @ policy.value_head.weight[0] + policy.value_head.bias[0]
        return [Categorical(logits=each) for each in logits], list(values)

    def balance(self, model: TinyMoE, tokens: Tensor, mask: Tensor, n_prompt: int) -> Tensor:
        """E · Σ_e (share of the choices) · (mean probability), the mean over layers, for the inputs that count."""
        seen: list[tuple[Tensor, Tensor]] = []
        hooks = [
            layer.router.register_forward_hook(lambda _, __, out: seen.append((out[0], out[2])))
            for layer in model.layers
        ]
        model.trunk(tokens[:, :-1])
        for hook in hooks:
            hook.remove()
        counts = self.balanced_inputs(tokens, mask, n_prompt).flatten()
        losses = []
        for logits, experts in seen:
            chosen = experts[counts].flatten().tolist()
            share = torch.tensor([chosen.count(e) / len(chosen) for e in range(self.config.n_experts)])
            probability = torch.stack([torch.softmax(row, 0) for row in logits[counts]]).mean(0)
            losses.append(self.config.n_experts * (share * probability).sum())
        return sum(losses) / len(losses)

    def balanced_inputs(self, tokens: Tensor, mask: Tensor, n_prompt: int) -> Tensor:
        """Inputs of the model that the routers have to balance (B, P + R − 1): no padding after the end token."""
        return torch.cat([torch.ones_like(tokens[:, :n_prompt], dtype=torch.bool), mask[:, :-1]], 1)

    def problem(self, masked: bool = False, kl_coef: float = 0.0, **changes: Any) -> Problem:
        torch.manual_seed(0)
        args = self.args(**changes)
        policy = self.make_policy()
        n, p, r = args.batch_size, args.prompt_tokens, args.response_tokens
        tokens = torch.randint(1, 60, (n, p + r))
        lengths = [1 + i % r for i in range(n)]
        mask = torch.tensor([[t < length for t in range(r)] for length in lengths])
        for i, length in enumerate(lengths):
            if length < r:
                tokens[i, p + length - 1 :] = END
        with torch.no_grad():
            both = [self.response(policy, row, p) for row in tokens]
        logprobs = torch.tensor([
            [float(each.log_prob(token)) for each, token in zip(distributions, row[p:], strict=True)]
            for (distributions, _), row in zip(both, tokens, strict=True)
        ])  # fmt: skip
        values = torch.tensor([[float(value) for value in numbers] for _, numbers in both])
        noise = partial(torch.randn, n, r)
        batch = self.trainer.Batch(
            tokens, mask, logprobs + 0.3 * noise(), values + 0.5 * noise(), 2 + 3 * noise(), values + noise()
        )
        optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate, eps=1e-5)
        s = self.settings(args, ent_coef=0.0)
        balances: list[float] = []

        def samples_of(rows: list[int]) -> tuple[list[Sample], Tensor]:
            samples = []
            for i in rows:
                distributions, new_values = self.response(policy, tokens[i], p)
                for t in range(lengths[i]):
                    columns = (batch.logprobs, batch.values, batch.advantages, batch.returns)
                    old = (float(column[i, t]) for column in columns)
                    logprob = distributions[t].log_prob(tokens[i, p + t])
                    samples.append(Sample(logprob, torch.zeros(()), new_values[t], *old))
            balance = self.balance(policy.language_model, tokens[rows], mask[rows], p)
            balances.append(float(balance.detach()))
            return samples, args.balance_coef * balance

        return Problem(
            policy,
            optimizer,
            lambda world: self.trainer.update(policy, optimizer, batch, args, torch.Generator().manual_seed(3)),
            samples_of,
            lambda order: larger_first(order, args.num_minibatches),
            s,
            more_metrics=lambda outcome: {"losses/balance_loss": float(np.mean(balances))},
        )

    @torch.no_grad()
    def compare_rollout(self, kl_coef: float, **changes: Any) -> None:
        """Compare a roll-out with responses that are scored one by one."""
        torch.manual_seed(0)
        args = self.args(**({"batch_size": 9, "gamma": 0.9, "gae_lambda": 0.8} | changes))
        policy, reference = self.make_policy(), self.make_policy().language_model
        policy.language_model.embedding[END] *= 3  # some responses end early
        p, r = args.prompt_tokens, args.response_tokens
        prompts = torch.randint(1, 60, (args.batch_size, p))
        scale = self.trainer.Scale(0.2, 0.1)
        generator = torch.Generator().manual_seed(2)
        batch, metrics = self.trainer.rollout(policy, reference, prompts, scale, kl_coef, args, generator)
        assert torch.equal(batch.tokens[:, :p], prompts)
        torch.manual_seed(1)  # only the generator matters
        again = torch.Generator().manual_seed(2)
        repeated, _ = self.trainer.rollout(policy, reference, prompts, scale, kl_coef, args, again)
        assert torch.equal(repeated.tokens, batch.tokens)
        reward_of = {"vowels": lambda text: sum(each in "aeiouAEIOU" for each in text) / r}[args.reward]
        totals: dict[str, list[float]] = {key: [] for key in ("reward", "score", "length", "ended", "k1", "k2", "k3")}
        all_values, all_targets = [], []
        for i, row in enumerate(batch.tokens):
            response = row[p:].tolist()
            length = response.index(END) + 1 if END in response else r
            assert batch.mask[i].tolist() == [t < length for t in range(r)]
            distributions, values = self.response(policy, row, p)
            rows = reference.trunk(row[None, :-1])[0][0][p - 1 :]
            of_reference = [Categorical(logits=each) for each in rows @ reference.embedding.T]
            raw = reward_of(decode(response[:length]))
            rewards, kls = [], []
            for t in range(length):
                token = row[p + t]
                logprob = float(distributions[t].log_prob(token))
                assert math.isclose(float(batch.logprobs[i, t]), logprob, rel_tol=1e-9)
                k1 = logprob - float(of_reference[t].log_prob(token))
                kls.append((k1, k1**2 / 2, math.exp(-k1) - 1 + k1))
                rewards.append(-kl_coef * k1 + ((raw - 0.2) / 0.1 if t == length - 1 else 0.0))
            numbers = [float(value) for value in values[:length]]
            following = [*numbers[1:], 0.0]
            steps = [Transition(None, None, None, 0, t == length - 1, False, None, None, False) for t in range(length)]
            chain = list(zip(steps, rewards, numbers, following, strict=True))
            advantages = advantages_of(chain, args.gamma, args.gae_lambda, True)
            targets = [a + v for a, v in zip(advantages, numbers, strict=True)]
            for name, column in (("values", numbers), ("advantages", advantages), ("returns", targets)):
                np.testing.assert_allclose(getattr(batch, name)[i, :length], column, rtol=1e-9, atol=1e-9)
            all_values += numbers
            all_targets += targets
            found = (raw, sum(rewards), length, END in response, *map(sum, zip(*kls, strict=True)))
            for column, number in zip(totals.values(), found, strict=True):
                column.append(float(number))
        mean = {key: float(np.mean(column)) for key, column in totals.items()}
        assert 0 < mean["ended"] < 1, "the test needs responses with and without an end token"
        residuals = np.subtract(all_targets, all_values)
        assert metrics == {
            "charts/reward": approx(mean["reward"]),
            "charts/episodic_return": approx(mean["reward"]),
            "charts/episodic_length": approx(mean["length"]),
            "charts/penalized_score": approx(mean["score"]),
            "charts/response_tokens": approx(mean["length"]),
            "charts/ended": approx(mean["ended"]),
            "kl/k1": approx(mean["k1"]),
            "kl/k2": approx(mean["k2"]),
            "kl/k3": approx(mean["k3"]),
            "losses/explained_variance": approx(1 - np.var(residuals) / np.var(all_targets)),
        }


def approx(value: float) -> Any:
    return pytest.approx(value, rel=1e-6, abs=1e-9)
