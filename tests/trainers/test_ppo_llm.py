"""``ppo_llm.py``: whole runs on a tiny model, compared with a slow reference that is written from the formulas."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

import tiny_moe
from clustergym.common.checkpoints import CheckpointError, load_checkpoint
from clustergym.training.args import FlagError, parse_args
from clustergym.training.logs import read_scalars
from clustergym.training.runs import Run
from tiny_moe import END, TinyMoE, TinyMoEConfig, decode, encode
from trainers import FOLDER, load_trainer
from update_reference import Adam, Sample, Settings, Transition, advantages_of, minibatch_loss

llm = load_trainer("ppo_llm")
SMALL: dict[str, Any] = {
    "layers": 2, "experts": 6, "hidden": 16, "pretrain_steps": 2, "batch_size": 6, "prompt_tokens": 4,
    "response_tokens": 5, "num_minibatches": 2, "eval_episodes": 8, "learning_rate": 1e-2, "total_timesteps": 60,
    "checkpoint_interval": 1, "cuda": False, "seed": 2,
}  # fmt: skip


def args_of(folder: Path, **changes: Any) -> Any:
    """Arguments of a run on a short text with the letters that the rewards ask for."""
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {i}: Words and {i * i} More, about aeiou." for i in range(60)))
    return llm.Args(**(SMALL | {"text": [text], "run_dir": folder / "run"} | changes))


def state_of(folder: Path) -> dict[str, Any]:
    state = load_checkpoint(folder / "checkpoint.pt", "ppo_llm")
    return {"iteration": state["iteration"], "policy": state["shared"]["policy"], **state["ranks"][0]}


# The slow reference: one sequence and one token at a time


class Slow:
    """A policy with its optimizer, and the frozen reference."""

    def __init__(self, weights: dict[str, Tensor], args: Any) -> None:
        config = TinyMoEConfig(n_layers=args.layers, n_experts=args.experts, hidden=args.hidden)
        self.reference, self.policy = TinyMoE(config), llm.Policy(TinyMoE(config))
        self.reference.load_state_dict(weights)
        self.policy.language_model.load_state_dict(weights)
        self.args, self.adam = args, Adam(list(self.policy.parameters()), args.learning_rate)
        self.kl_coef = args.kl_coef

    def distributions(self, model: TinyMoE, row: Tensor) -> tuple[list[Categorical], Tensor]:
        """Distribution of each token of the response, and the activations before it."""
        activations = model.trunk(row[None, :-1])[0][0][self.args.prompt_tokens - 1 :]
        logits = activations @ model.embedding.T
        return [Categorical(logits=each / self.args.temperature) for each in logits], activations

    def values(self, activations: Tensor) -> Tensor:
        return activations @ self.policy.value_head.weight[0] + self.policy.value_head.bias[0]

    def balance(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """E · Σ_e (share of the choices) · (mean probability), the mean over layers, without padding."""
        n, model = self.args.prompt_tokens, self.policy.language_model
        seen: list[list[Tensor]] = [[] for _ in model.layers]
        hooks = [
            layer.router.register_forward_hook(lambda _, __, out, seen=own: seen.extend([out[0], out[2]]))
            for layer, own in zip(model.layers, seen, strict=True)
        ]
        for row, length in zip(tokens, lengths, strict=True):
            model.trunk(row[None, : n + min(length, self.args.response_tokens - 1)])
        for hook in hooks:
            hook.remove()
        losses = []
        for own in seen:
            logits, chosen = torch.cat(own[::2]), torch.cat(own[1::2]).flatten().tolist()
            share = torch.tensor([chosen.count(e) / len(chosen) for e in range(self.args.experts)])
            losses.append(self.args.experts * (share * logits.softmax(-1).mean(0)).sum())
        return sum(losses) / len(losses)

    def learn(self, tokens: Tensor, orders: list[list[int]], mean: float, deviation: float) -> None:
        args, n = self.args, self.args.prompt_tokens
        responses = tokens[:, n:].tolist()
        lengths = [r.index(END) + 1 if END in r else len(r) for r in responses]
        data: list[list[Any]] = []
        kls = []
        with torch.no_grad():
            for row, response, length in zip(tokens, responses, lengths, strict=True):
                policy, activations = self.distributions(self.policy.language_model, row)
                frozen, _ = self.distributions(self.reference, row)
                logprobs = [float(p.log_prob(torch.tensor(t))) for p, t in zip(policy, response, strict=True)][:length]
                theirs = [float(p.log_prob(torch.tensor(t))) for p, t in zip(frozen, response, strict=True)][:length]
                k1 = [a - b for a, b in zip(logprobs, theirs, strict=True)]
                kls.append(sum(k1))
                rewards = [-self.kl_coef * each for each in k1]
                rewards[-1] += (vowels(decode(response)) / args.response_tokens - mean) / deviation
                values = self.values(activations)[:length].tolist()
                chain = [
                    (Transition(None, None, None, 0, t == length - 1, False, None, None, False), r, v, following)
                    for t, (r, v, following) in enumerate(zip(rewards, values, [*values[1:], 0.0], strict=True))
                ]
                advantages = advantages_of(chain, args.gamma, args.gae_lambda, True)
                data.append([logprobs, values, advantages, [a + v for a, v in zip(advantages, values, strict=True)]])
        settings = Settings(
            args.learning_rate, args.clip_coef, True, args.clip_vloss, True, 0.0, args.vf_coef, 0.0,
            args.max_grad_norm,
        )  # fmt: skip
        for order in orders:
            assert sorted(order) == list(range(len(tokens)))
            for part in np.array_split(order, args.num_minibatches):
                samples = []
                for i in part:
                    policy, activations = self.distributions(self.policy.language_model, tokens[i])
                    now = [p.log_prob(t) for p, t in zip(policy, tokens[i, n:], strict=True)]
                    columns = zip(now, self.values(activations), *data[i], strict=False)  # without the padding
                    for logprob, value, old, old_value, advantage, target in columns:
                        samples.append(Sample(logprob, torch.zeros(()), value, old, old_value, advantage, target))
                extra = args.balance_coef * self.balance(tokens[part], [lengths[i] for i in part])
                loss, _ = minibatch_loss(samples, extra, settings)
                gradients = torch.autograd.grad(loss, self.adam.parameters)
                norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
                self.adam.step([g * min(1.0, args.max_grad_norm / (norm + 1e-6)) for g in gradients])
        if args.kl_target is not None:
            error = min(max(sum(kls) / len(kls) / args.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * min(sum(lengths) / args.kl_horizon, 1)


def vowels(text: str) -> int:
    return sum(text.lower().count(each) for each in "aeiou")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute with 64 bits, so that small constants such as the ε of a division make a difference."""
    monkeypatch.setattr(tiny_moe, "grouped_mm", tiny_moe.grouped_mm_loop)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


CASES: dict[str, dict[str, Any]] = {
    "defaults": {"kl_horizon": 40.0},
    "temperature": {"temperature": 1.7, "balance_coef": 0.4},
    "without_clips": {"clip_vloss": False, "max_grad_norm": 100.0, "vf_coef": 0.9, "gamma": 0.8},
    "small_kl_target": {"kl_target": 1e-3, "kl_horizon": 10.0, "num_minibatches": 3},
    "kl_measured_only": {"kl_coef": 0.0, "kl_target": None},
}


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("double", "reproducible")
def test_weights_after_iterations_equal_the_reference(
    case: str, iterations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = args_of(tmp_path, **CASES[case], total_timesteps=30 * iterations)
    orders: list[list[int]] = []
    texts: list[Tensor] = []
    plain_randperm, plain_generate, plain_pretrain = torch.randperm, TinyMoE.generate, llm.pretrain

    def randperm(*given: Any, **options: Any) -> Tensor:
        order = plain_randperm(*given, **options)
        orders.append(order.tolist())
        return order

    def generate(self: TinyMoE, prompts: Tensor, n: int, temperature: float) -> Tensor:
        assert temperature == args.temperature
        responses = plain_generate(self, prompts, n, temperature=temperature)
        responses[::3, 2:] = END  # responses with and without an end token
        texts.append(torch.cat([prompts, responses], 1))
        return responses

    def pretrain(model: TinyMoE, *given: Any) -> None:
        plain_pretrain(model, *given)
        with torch.no_grad():
            model.embedding.mul_(20)  # distributions that are not uniform

    monkeypatch.setattr(torch, "randperm", randperm)
    monkeypatch.setattr(TinyMoE, "generate", generate)
    monkeypatch.setattr(llm, "pretrain", pretrain)
    llm.train(args)
    scored, _, *rollouts, _ = texts
    raw = np.array([vowels(decode(row[4:])) / 5 for row in scored])
    weights = load_checkpoint(tmp_path / "run" / "reference.pt", "ppo_llm-reference")["language_model"]
    slow = Slow(weights, args)
    assert len(rollouts) == iterations
    for i, tokens in enumerate(rollouts):
        slow.adam.learning_rate = args.learning_rate * (1 - i / iterations)
        slow.learn(tokens, orders[2 * i : 2 * i + 2], raw.mean(), max(raw.std(ddof=1), 1e-6))
    found = state_of(tmp_path / "run")
    assert found["kl_coef"] == pytest.approx(slow.kl_coef, rel=1e-9)
    assert (slow.kl_coef != args.kl_coef) == (args.kl_target is not None)
    for name, weight in slow.policy.state_dict().items():
        torch.testing.assert_close(found["policy"][name], weight, rtol=1e-8, atol=1e-10, msg=name)


def test_responses_are_sampled_at_the_temperature() -> None:
    torch.manual_seed(0)
    model, n = TinyMoE(TinyMoEConfig(n_layers=1, n_experts=4, hidden=16)), 20_000
    with torch.no_grad():
        model.embedding.mul_(20)
        prompt = torch.tensor([encode("The ")])
        p = (model(prompt)[0, -1] / 2.5).softmax(-1).double()
    counts = torch.bincount(model.generate(prompt.expand(n, -1), 1, temperature=2.5)[:, 0], minlength=len(p)) / n
    assert p.max() > 0.03
    assert ((counts - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-4).all()


# Text and rewards


def test_paragraphs_are_distinct_and_separated_by_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\n  three\n \nfour\n\none\ntwo\n")
    (tmp_path / "b.txt").write_text("four\n\nfive")
    assert llm.read_paragraphs([tmp_path / "a.txt", tmp_path / "b.txt"]) == ["one\ntwo", "  three", "four", "five"]


def test_default_text_is_split_into_disjoint_parts() -> None:
    paragraphs = llm.read_paragraphs([])
    assert len(paragraphs) > 1000
    train, held_out = llm.split_text(paragraphs)
    parts = []
    for tokens in (train, held_out):
        ends = (tokens == END).nonzero().squeeze(1).tolist()
        assert ends[-1] == len(tokens) - 1
        parts.append({decode(tokens[a:b]) for a, b in zip([0, *[e + 1 for e in ends]], ends, strict=False)})
    # Characters outside ASCII become "?", so two paragraphs can become equal.
    assert len(parts[0] & parts[1]) <= 2
    assert 0.07 < len(held_out) / (len(train) + len(held_out)) < 0.13
    with pytest.raises(FlagError, match="--text has 16 paragraphs: expected at least 17"):
        llm.split_text([str(i) for i in range(16)])


def test_prompts_lie_within_one_paragraph() -> None:
    tokens = torch.tensor([3, 4, 5, END, 6, 7, END, 8, 9, 10, 11])
    assert llm.prompt_starts(tokens, 3).tolist() == [0, 7, 8]
    assert llm.prompt_starts(tokens, 2).tolist() == [0, 1, 4, 7, 8, 9]
    drawn = llm.sample_prompts(tokens, llm.prompt_starts(tokens, 3), 50, 3)
    assert {tuple(row) for row in drawn.tolist()} == {(3, 4, 5), (8, 9, 10), (9, 10, 11)}
    with pytest.raises(FlagError, match="--prompt-tokens is 5, but no paragraph"):
        llm.prompt_starts(tokens, 5)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("vowels", "An area", 4 / 10),  # A a e a
        ("vowels", "", 0.0),
        ("capitals", "PEP 8 and I", 4 / 10),
        ("variety", "the cat the CAT a", 7 / 10),  # the, cat, a
        ("brevity", "abc", 7 / 10),
        ("brevity", "abcdefghij", 0.0),
    ],
)
def test_rewards_by_hand(name: str, text: str, expected: float) -> None:
    assert llm.REWARDS[name](text, 10) == pytest.approx(expected)
    assert name in str(llm.Args.__annotations__["reward"])


def test_padding_after_the_end_token_does_not_count() -> None:
    responses = torch.tensor([[*encode("ae"), END, *encode("aa")], encode("aexxx"), [END] * 5])
    assert llm.rewards_of("vowels", responses).tolist() == pytest.approx([0.4, 0.4, 0.0])
    assert llm.response_mask(responses).int().tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]


@torch.no_grad()
def test_validation_loss_matches_a_reference() -> None:
    torch.manual_seed(0)
    model, tokens = TinyMoE(TinyMoEConfig(n_layers=1, n_experts=4, hidden=16)), torch.randint(0, 90, (50,))
    slow = [
        -model(tokens[a : a + 8][None]).log_softmax(-1)[0, i, tokens[a + i + 1]].item()
        for a in range(0, 48, 8)
        for i in range(8)
    ]
    assert llm.validation_loss(model, tokens, 8) == pytest.approx(sum(slow) / len(slow), rel=1e-5)


# Whole runs


class Crash(Exception):
    """Simulates the end of the process."""


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    weights = all(torch.equal(weight, b["policy"][name]) for name, weight in a["policy"].items())
    return weights and all(a[key] == b[key] for key in ("iteration", "kl_coef", "reward_scale"))


def test_resumed_run_is_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash between pre-training and the first checkpoint, and after one in PPO."""
    torch.set_num_threads(1)
    changes = {"total_timesteps": 30 * 4, "kl_horizon": 100.0}
    whole = llm.train(args_of(tmp_path, **changes, run_dir=tmp_path / "whole", save_model=True))
    checkpoint = Run.checkpoint
    for cut in (1, 3):

        def dying(self: Run, cut: int = cut, **state: Any) -> None:
            if cut > 1:
                checkpoint(self, **state)
            if self.iteration == cut:
                raise Crash

        folder = tmp_path / f"cut{cut}"
        with monkeypatch.context() as patch:
            patch.setattr(Run, "checkpoint", dying)
            with pytest.raises(Crash):
                llm.train(args_of(tmp_path, **changes, run_dir=folder))
        torch.manual_seed(99)
        resumed = llm.train(args_of(tmp_path, **changes, run_dir=folder, resume=True))
        assert same(state_of(folder), state_of(tmp_path / "whole"))
        for key in ("mean_return", "kl", "validation_loss", "reference_return"):
            assert resumed[key] == whole[key]
        assert read_scalars(folder, "kl/k3") == read_scalars(tmp_path / "whole", "kl/k3")
    # The files of the run, and another run with its reference.
    first_kl, *others = read_scalars(tmp_path / "whole", "kl/k1")[1]
    assert abs(first_kl) < 1e-5
    assert all(others)
    assert read_scalars(tmp_path / "whole", "pretrain/validation_loss")[0] == [2]
    reference = tmp_path / "whole" / "reference.pt"
    model = load_checkpoint(tmp_path / "whole" / "model.pt", "ppo_llm-model")
    assert model["language_model"].keys() == load_checkpoint(reference, "ppo_llm-reference")["language_model"].keys()
    before = reference.read_bytes()
    other = args_of(tmp_path, **changes, run_dir=tmp_path / "other", reference=reference, layers=4)
    assert llm.train(other)["reference_validation_loss"] == whole["reference_validation_loss"]
    assert reference.read_bytes() == before
    text = tmp_path / "other.txt"
    text.write_text("\n\n".join(f"paragraph {i} of another text" for i in range(40)))
    with pytest.raises(CheckpointError, match="was pre-trained on another text"):
        llm.train(replace(other, text=[text]))


def flags_of(args: Any, **changes: Any) -> list[str]:
    values = {name: getattr(args, name) for name in SMALL} | changes
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    return [*flags, "--run-dir", str(args.run_dir), "--text", str(args.text[0])]


@pytest.mark.slow
def test_run_that_was_killed_resumes_with_the_same_result(tmp_path: Path) -> None:
    args = args_of(tmp_path, total_timesteps=30 * 40)
    whole = llm.train(replace(args, run_dir=tmp_path / "whole"))
    command = [sys.executable, str(FOLDER / "ppo_llm.py"), *flags_of(args)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "run" / "checkpoint.pt").exists():
            assert process.poll() is None
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1].removeprefix("result "))["mean_return"] == whole["mean_return"]
    assert same(state_of(tmp_path / "run"), state_of(tmp_path / "whole"))
    assert "before: " in done.stderr
    assert "after: " in done.stderr


@pytest.mark.slow
def test_ranks_share_weights_and_the_kl_coefficient(tmp_path: Path) -> None:
    """Two processes learn from responses of their own, and agree on the coefficient."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(FOLDER / "ppo_llm.py"), *flags_of(args_of(tmp_path), total_timesteps=120, kl_horizon=50),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    state = load_checkpoint(tmp_path / "run" / "checkpoint.pt", "ppo_llm")
    first, second = state["ranks"]
    assert state["iteration"] == 2
    assert first["kl_coef"] == second["kl_coef"] != 0.2
    assert first["reward_scale"] == second["reward_scale"]
    assert not torch.equal(first["rng"]["torch"], second["rng"]["torch"])


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--kl-target=0", "--kl-target is 0.0: expected more than 0"),
        ("--kl-horizon=-1", "--kl-horizon is -1.0: expected more than 0"),
        ("--kl-coef=-0.1", "--kl-coef is -0.1: expected at least 0"),
        ("--temperature=nan", "--temperature is nan: expected more than 0"),
        ("--response-tokens=0", "--response-tokens is 0: expected at least 1"),
    ],
)
def test_bad_flags_are_one_line(flag: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args(llm.Args, argv=[flag], ranges=llm.RANGES)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {complaint}\n"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"response_tokens": 300}, r"--prompt-tokens \+ --response-tokens is 304: expected at most 256"),
        ({"batch_size": 3}, "--batch-size is 3: expected at least 2 responses per minibatch"),
    ],
)
def test_sizes_are_refused_before_the_run_starts(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FlagError, match=complaint):
        llm.train(args_of(tmp_path, **changes))
    assert not (tmp_path / "run").exists()
