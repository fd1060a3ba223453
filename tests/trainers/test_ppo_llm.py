"""PPO for language models: each function by hand or against a slow reference, and exact resuming."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.training import CheckpointError, World, load_checkpoint, read_scalars
from tiny_moe import END, TinyMoE, TinyMoEConfig, decode, encode
from trainers import FOLDER, load_trainer

llm = load_trainer("ppo_llm")
SMALL = TinyMoEConfig(n_layers=2, n_experts=6, top_k=2, hidden=16, intermediate=4, n_heads=2, context=32)


def small_args(run_dir: Path | None = None, **changes: Any) -> Any:
    args = llm.Args(
        run_dir=run_dir,
        model=SMALL,
        pretrain_steps=6,
        pretrain_batch=4,
        pretrain_length=24,
        validate_every=3,
        iterations=4,
        checkpoint_interval=2,
        batch_size=8,
        prompt_tokens=8,
        response_tokens=10,
        num_minibatches=2,
        eval_prompts=16,
        learning_rate=3e-3,
        show=1,
    )
    return replace(args, **changes)


# Text


def test_paragraphs_are_distinct_and_separated_by_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\n  three\n \nfour\n\none\ntwo\n")
    (tmp_path / "b.txt").write_text("four\n\nfive")
    assert llm.read_paragraphs([tmp_path / "a.txt", tmp_path / "b.txt"]) == ["one\ntwo", "  three", "four", "five"]


def test_default_text_is_split_into_disjoint_parts() -> None:
    paragraphs = llm.read_paragraphs([])
    assert len(paragraphs) > 1000
    train, held_out = llm.split_text(paragraphs, 0.1)
    parts = []
    for tokens in (train, held_out):
        ends = (tokens == END).nonzero().squeeze(1).tolist()
        assert ends[-1] == len(tokens) - 1
        parts.append({decode(tokens[a:b]) for a, b in zip([0, *[e + 1 for e in ends]], ends, strict=False)})
    # Characters outside ASCII become "?", so two paragraphs can become equal.
    assert len(parts[0] & parts[1]) <= 2
    assert 0.07 < len(held_out) / (len(train) + len(held_out)) < 0.13


def test_short_text_is_refused() -> None:
    with pytest.raises(ValueError, match="the text has 16 paragraphs: expected at least 17"):
        llm.split_text([str(i) for i in range(16)], 0.1)
    with pytest.raises(ValueError, match=r"held_out is 1.0: expected a share between 0 and 1"):
        llm.split_text(["a"] * 40, 1.0)


def test_prompts_lie_within_one_paragraph() -> None:
    tokens = torch.tensor([3, 4, 5, END, 6, 7, END, 8, 9, 10, 11])
    assert llm.prompt_starts(tokens, 3).tolist() == [0, 7, 8]
    assert llm.prompt_starts(tokens, 2).tolist() == [0, 1, 4, 7, 8, 9]
    drawn = llm.sample_prompts(tokens, llm.prompt_starts(tokens, 3), 50, 3, torch.Generator().manual_seed(0))
    assert {tuple(row) for row in drawn.tolist()} == {(3, 4, 5), (8, 9, 10), (9, 10, 11)}
    with pytest.raises(ValueError, match="no paragraph of the text has 5 characters"):
        llm.prompt_starts(tokens, 5)


# Rewards


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


def test_rewards_ignore_text_after_the_end_token() -> None:
    responses = torch.tensor([[*encode("ae"), END, *encode("aa")], encode("aexxx")])
    assert llm.reward_of("vowels", responses).tolist() == pytest.approx([0.4, 0.4])
    assert llm.reward_of("brevity", responses).tolist() == pytest.approx([0.6, 0.0])


def test_reward_flag_accepts_every_reward() -> None:
    assert set(llm.Args.__annotations__) >= {"reward"}
    for name in llm.REWARDS:
        assert name in str(llm.Args.__annotations__["reward"])


# KL controller


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.2),  # on target
        (6.6, 0.2 * (1 + 0.1 * 0.25)),  # 10 % too high
        (60.0, 0.2 * (1 + 0.2 * 0.25)),  # clipped
        (0.0, 0.2 * (1 - 0.2 * 0.25)),  # clipped at the lower end
        (-1.0, 0.2 * (1 - 0.2 * 0.25)),  # an estimate can be negative
    ],
)
def test_kl_controller_by_hand(kl: float, expected: float) -> None:
    assert llm.next_kl_coef(0.2, kl, target=6.0, n_tokens=2500, horizon=10_000.0) == pytest.approx(expected, rel=1e-12)


@given(st.floats(0, 1e3), st.integers(1, 10**6), st.floats(1, 1e5))
def test_kl_coefficient_stays_positive_and_changes_by_at_most_a_fifth(kl: float, n_tokens: int, horizon: float) -> None:
    after = llm.next_kl_coef(0.5, kl, 6.0, n_tokens, horizon)
    assert 0.4 - 1e-9 <= after <= 0.6 + 1e-9
    assert after >= 0.5 if kl >= 6 else after <= 0.5


def test_kl_controller_converges_to_a_known_coefficient() -> None:
    """If the KL is always 1 / coefficient, the coefficient converges to 1 / target."""
    coef = 3.0
    for _ in range(400):
        coef = llm.next_kl_coef(coef, 1 / coef, target=6.0, n_tokens=1000, horizon=10_000.0)
    assert coef == pytest.approx(1 / 6, rel=0.01)


# Masks, token rewards and advantages


def test_mask_ends_with_the_first_end_token() -> None:
    responses = torch.tensor([[5, 6, END, END], [5, 6, 7, 8], [END, END, END, END], [5, 6, 7, END]])
    assert llm.response_mask(responses).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_token_rewards_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    kl = torch.tensor([[1.0, -2.0, 50.0], [0.5, 0.0, 1.0]])
    rewards = llm.token_rewards(torch.tensor([3.0, 4.0]), kl, mask, kl_coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.2 + 3.0, 0.0], [-0.05, 0.0, -0.1 + 4.0]]))


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    gamma=st.floats(0.5, 1.0),
    gae_lambda=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_gae_over_tokens_matches_its_definition(lengths: list[int], gamma: float, gae_lambda: float, seed: int) -> None:
    """A_t = Σ (γλ)^l δ_{t+l} within the response. Values after its end have no effect."""
    generator = torch.Generator().manual_seed(seed)
    width = 6
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    rewards = torch.randn(len(lengths), width, generator=generator) * mask
    values = torch.randn(len(lengths), width, generator=generator)
    ends = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    zeros = torch.zeros_like(values)
    found, returns = llm.compute_gae(rewards.T, values.T, ends.T, ends.T, zeros[:, 0], zeros.T, gamma, gae_lambda)
    for row, n in enumerate(lengths):
        r, v = rewards[row, :n].tolist(), [*values[row, :n].tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            slow = sum((gamma * gae_lambda) ** (l - t) * deltas[l] for l in range(t, n))
            assert found.T[row, t].item() == pytest.approx(slow, abs=1e-4)
            assert returns.T[row, t].item() == pytest.approx(slow + v[t], abs=1e-4)


def test_kl_estimators_match_the_exact_kl() -> None:
    """For samples of p, the means of k1 and k3 converge to Σ p log(p/q)."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    exact = (p * (p / q).log()).sum().item()
    drawn = torch.multinomial(p, 400_000, replacement=True, generator=generator)
    k1, k2, k3 = llm.kl_estimators((q.log() - p.log())[drawn])
    assert k1.mean().item() == pytest.approx(exact, abs=1e-3)
    assert k3.mean().item() == pytest.approx(exact, abs=1e-4)
    assert k2.mean().item() == pytest.approx((p * (p / q).log() ** 2).sum().item() / 2, abs=1e-4)
    assert (k3 >= 0).all()


# Rollout and update


@pytest.fixture
def setting() -> tuple[Any, TinyMoE, torch.Tensor]:
    torch.manual_seed(0)
    reference = TinyMoE(SMALL)
    policy = llm.PolicyWithValue(copy.deepcopy(reference))
    prompts = torch.randint(1, 90, (8, 8), generator=torch.Generator().manual_seed(1))
    return policy, reference, prompts


def roll(
    setting: tuple[Any, TinyMoE, torch.Tensor], kl_coef: float = 0.3, **changes: Any
) -> tuple[Any, dict[str, float]]:
    policy, reference, prompts = setting
    scale = llm.Scale(0.2, 0.1)
    return llm.rollout(
        policy, reference, prompts, scale, kl_coef, small_args(**changes), torch.Generator().manual_seed(2)
    )


def test_first_values_and_first_kl_are_zero(setting: tuple[Any, TinyMoE, torch.Tensor]) -> None:
    batch, metrics = roll(setting)
    assert not batch.values.any()
    assert [metrics[f"kl/{k}"] for k in ("k1", "k2", "k3")] == [0.0, 0.0, 0.0]
    # With γ = λ = 1 and zero values and KL, the advantage of every token is the score of the response.
    batch, _ = roll(setting, gae_lambda=1.0)
    scores = (llm.reward_of("vowels", batch.tokens[:, 8:]) - 0.2) / 0.1
    torch.testing.assert_close(batch.advantages[batch.mask], scores[:, None].expand(-1, 10)[batch.mask])


def test_ratio_is_one_in_the_first_minibatch(
    setting: tuple[Any, TinyMoE, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = setting[0]
    batch, _ = roll(setting)
    ratios: list[torch.Tensor] = []
    original = llm.policy_loss
    monkeypatch.setattr(
        llm, "policy_loss", lambda ratio, *rest: (ratios.append(ratio.detach()), original(ratio, *rest))[1]
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    llm.update(policy, optimizer, batch, small_args(), torch.Generator().manual_seed(3))
    assert len(ratios) == 4  # 2 epochs of 2 minibatches
    torch.testing.assert_close(ratios[0], torch.ones_like(ratios[0]), rtol=0, atol=2e-5)
    assert (ratios[1] - 1).abs().max() > 1e-3
    assert sum(map(len, ratios[:2])) == int(batch.mask.sum())


def test_padding_does_not_change_the_update(setting: tuple[Any, TinyMoE, torch.Tensor]) -> None:
    """Normalisation, losses and gradients only use tokens up to the end token."""
    policy, _, _ = setting
    batch, _ = roll(setting)
    batch.mask[:, 6:] = False
    batch.mask[0, 2:] = False
    dirty = replace(batch, **{k: getattr(batch, k).clone() for k in ("advantages", "returns", "values", "logprobs")})
    for key in ("advantages", "returns", "values"):
        getattr(dirty, key)[~batch.mask] = 1e6
    weights = []
    for each in (batch, dirty):
        learner = copy.deepcopy(policy)
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
        llm.update(learner, optimizer, each, small_args(), torch.Generator().manual_seed(3))
        weights.append(torch.cat([p.detach().flatten() for p in learner.parameters()]))
    assert torch.equal(*weights)


def test_balance_loss_leaves_out_the_tokens_behind_the_end(setting: tuple[Any, TinyMoE, torch.Tensor]) -> None:
    """The loss of a padded batch equals that of its rows, cut at the end token and joined."""
    _, model, prompts = setting
    n = prompts.shape[1]
    tokens = torch.cat([prompts[:2], torch.tensor([[5, 7, llm.END, llm.END, llm.END], [6, 8, 9, 10, 11]])], 1)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [layer.router.register_forward_hook(lambda _, __, out: seen.append(out)) for layer in model.layers]
    for row in (tokens[:1, : n + 3], tokens[1:2, : n + 4]):
        model.trunk(row)
    for hook in hooks:
        hook.remove()
    layers = len(model.layers)
    expected = []
    for one, other in zip(seen[:layers], seen[layers:], strict=True):
        logits, experts = torch.cat([one[0], other[0]]), torch.cat([one[2], other[2]])
        share = torch.bincount(experts.flatten(), minlength=logits.shape[1]) / experts.numel()
        expected.append(logits.shape[1] * (share * logits.softmax(-1).mean(0)).sum().item())
    fresh = llm.PolicyWithValue(model)
    assert fresh(tokens, n)[2].item() == pytest.approx(sum(expected) / layers, rel=1e-5)


def test_advantages_are_normalised_over_the_mask() -> None:
    advantages = torch.tensor([[1.0, 3.0, 1e9], [5.0, 7.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    white = llm.normalize_advantages(advantages[mask])
    torch.testing.assert_close(white, (torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0]) - 5) / math.sqrt(10))


def test_update_raises_the_probability_of_tokens_with_positive_advantage(
    setting: tuple[Any, TinyMoE, torch.Tensor],
) -> None:
    policy = setting[0]
    batch, _ = roll(setting)
    chosen = batch.tokens[:, 8:] < 40
    batch.advantages = torch.where(chosen, 1.0, -1.0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    llm.update(policy, optimizer, batch, small_args(), torch.Generator().manual_seed(0))
    with torch.no_grad():
        change = policy(batch.tokens, 8)[0] - batch.logprobs
    assert change[batch.mask & chosen].mean() > 0 > change[batch.mask & ~chosen].mean()


def test_pretraining_learning_rate_schedule() -> None:
    args = small_args(pretrain_steps=1000, pretrain_learning_rate=1.0)
    rates = [llm.pretrain_learning_rate(step, args) for step in range(1001)]
    assert rates[0] == pytest.approx(1 / 50)
    assert max(rates) == pytest.approx(0.995, abs=0.005)
    assert rates[500] == pytest.approx(0.525)
    assert rates[1000] == pytest.approx(0.05)


@torch.no_grad()
def test_validation_loss_matches_a_reference() -> None:
    torch.manual_seed(0)
    model = TinyMoE(SMALL)
    tokens = torch.randint(0, 90, (50,))
    slow = [
        -model(tokens[a : a + 8][None]).log_softmax(-1)[0, i, tokens[a + i + 1]].item()
        for a in range(0, 48, 8)
        for i in range(8)
    ]
    assert llm.validation_loss(model, tokens, 8) == pytest.approx(sum(slow) / len(slow), rel=1e-5)


# Whole runs


def weights_of(folder: Path) -> torch.Tensor:
    state = load_checkpoint(folder / "checkpoint.pt", "ppo_llm")
    assert (state["phase"], state["iteration"]) == ("ppo", 4)
    return torch.cat([tensor.flatten() for tensor in state["policy"].values()])


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("llm") / "run"
    return folder, llm.train(small_args(folder, save_model=True), World())


class Crash(Exception):
    """Simulates the end of the process."""


@pytest.mark.parametrize("saves", [1, 2, 3])
def test_resume_continues_bit_for_bit(
    whole_run: tuple[Path, dict[str, Any]], saves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crash during pre-training (1), after it but before the reference is saved (2), or during PPO (3)."""
    folder, expected = whole_run
    original = llm.save_checkpoint
    count = 0

    def dying(path: Path, kind: str, state: Any) -> None:
        nonlocal count
        original(path, kind, state)
        count += kind == "ppo_llm"
        if count == saves:
            raise Crash

    monkeypatch.setattr(llm, "save_checkpoint", dying)
    with pytest.raises(Crash):
        llm.train(small_args(tmp_path / "run"), World())
    monkeypatch.setattr(llm, "save_checkpoint", original)
    found = llm.train(small_args(tmp_path / "run", resume=True), World())
    assert torch.equal(weights_of(tmp_path / "run"), weights_of(folder))
    for key in ("mean_return", "kl", "validation_loss", "gain"):
        assert found[key] == expected[key]
    steps, values = read_scalars(tmp_path / "run", "charts/reward")
    assert (steps, values) == read_scalars(folder, "charts/reward")
    assert steps == [7, 8, 9, 10]
    assert read_scalars(tmp_path / "run", "pretrain/validation_loss") == read_scalars(
        folder, "pretrain/validation_loss"
    )


def test_resume_after_sigkill_gives_the_same_result(whole_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, expected = whole_run
    args = small_args()
    names = (
        "pretrain_steps pretrain_batch pretrain_length validate_every iterations checkpoint_interval batch_size "
        "prompt_tokens response_tokens num_minibatches eval_prompts learning_rate show"
    )
    flags = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names.split()]
    flags += [f"--model.{key.replace('_', '-')}={value}" for key, value in vars(SMALL).items()]
    command = [sys.executable, str(FOLDER / "ppo_llm.py"), "--run-dir", str(tmp_path / "run"), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoint.pt").exists():
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, check=True)
    *_, last = done.stdout.splitlines()
    result = json.loads(last.removeprefix("result "))
    for key in ("mean_return", "kl", "validation_loss", "gain"):
        assert result[key] == expected[key]
    assert "--- before" in done.stdout
    assert "--- after" in done.stdout


def test_result_and_logs_of_a_run(whole_run: tuple[Path, dict[str, Any]]) -> None:
    folder, result = whole_run
    assert result["steps"] == 4 * 8 * 10
    assert result["gain"] == result["mean_return"] - result["reference_return"]
    for tag in ("kl/k1", "kl/k2", "kl/k3", "charts/kl_coef", "losses/policy_loss", "eval/kl"):
        read_scalars(folder, tag)
    assert read_scalars(folder, "kl/k1")[1][0] == 0.0
    reference = load_checkpoint(folder / "reference.pt", "ppo_llm-reference")
    policy = load_checkpoint(folder / "model.pt", "ppo_llm-model")
    assert reference["model"] == policy["model"] == vars(SMALL)
    assert reference["weights"].keys() == policy["weights"].keys()


def test_reference_of_another_run_is_used_and_not_changed(
    whole_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, first = whole_run
    before = (folder / "reference.pt").read_bytes()
    args = small_args(tmp_path / "run", reference=folder / "reference.pt", iterations=1)
    result = llm.train(args, World())
    assert result["reference_validation_loss"] == first["reference_validation_loss"]
    assert (folder / "reference.pt").read_bytes() == before
    text = tmp_path / "other.txt"
    text.write_text("\n\n".join(f"paragraph {i} of another text" for i in range(40)))
    with pytest.raises(CheckpointError, match="was pre-trained on another text or split"):
        llm.train(replace(args, run_dir=tmp_path / "other", text=[text]), World())


@pytest.mark.parametrize("changes", [{"kl_penalty": False}, {"kl_coef": 0.0}])
def test_kl_is_only_measured_without_penalty(
    whole_run: tuple[Path, dict[str, Any]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    args = small_args(tmp_path / "run", reference=whole_run[0] / "reference.pt", **changes)
    result = llm.train(args, World())
    assert result["kl_target"] is None
    assert set(read_scalars(tmp_path / "run", "charts/kl_coef")[1]) == {0.0}
    assert read_scalars(tmp_path / "run", "kl/k3")[1][-1] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_tokens": 40}, r"sequences of 48 tokens do not fit into --model.context 32"),
        ({"iterations": 0}, "iterations is 0: expected at least 1"),
        ({"batch_size": 3}, "batch_size is 3: expected at least 2 responses per minibatch"),
        ({"kl_target": 0.0}, "--kl-target is 0.0: expected more than 0"),
        ({"kl_horizon": -1.0}, "--kl-horizon is -1.0: expected more than 0"),
        ({"kl_coef": -0.1}, "--kl-coef is -0.1: expected 0 or more"),
        ({"temperature": float("nan")}, "--temperature is nan: expected more than 0"),
        ({"gae_lambda": 1.1}, "--gae-lambda is 1.1: expected 0 … 1"),
    ],
)
def test_invalid_sizes_are_refused_before_the_run_starts(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.train(small_args(tmp_path / "run", **changes), World())
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ppo_llm.py runs in one process, not in 2: start it without torchrun"):
        llm.train(small_args(tmp_path / "run"), World(0, 2))
    assert not (tmp_path / "run").exists()
