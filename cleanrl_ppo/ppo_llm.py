"""PPO for a language model: token-level actions and a KL penalty to a frozen reference model.

    python cleanrl_ppo/ppo_llm.py                                     # pre-training, then PPO for vowels: a few minutes
    python cleanrl_ppo/ppo_llm.py --reward capitals --text a.txt b.txt
    python cleanrl_ppo/ppo_llm.py --reference runs/ppo_llm__vowels__1/reference.pt --seed 2    # skip pre-training
    python cleanrl_ppo/ppo_llm.py --no-kl-penalty                     # shows what the penalty prevents
    python cleanrl_ppo/ppo_llm.py --resume                            # continue after a crash

1. A small mixture-of-experts transformer over characters (``traces/tiny_moe.py``) is trained on text.
2. A frozen copy of it is the reference. The prompt is the first state, each character is an action, and the response is
   the episode.
3. A reward function scores the response at its last token. Every token costs kl_coef · log(policy / reference), so the
   policy improves the reward without forgetting its language.

One CPU thread is enough. docs/reference/ppo_llm.md explains every metric and shows results.
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clustergym.training import (
    CHECKPOINT_NAME,
    CheckpointError,
    NonFiniteLoss,
    Progress,
    RunArgs,
    RunLogger,
    World,
    check_finite,
    check_same_args,
    check_values,
    derive_seed,
    load_checkpoint,
    parse_args,
    plain_args,
    run_folder,
    run_trainer,
    save_checkpoint,
    save_model,
)

# The scripts in traces/ record the routing of this model.
sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from tiny_moe import END, TinyMoE, TinyMoEConfig, decode, encode

# Paragraphs that are held out together, so that most sequences lie within one block.
BLOCK_PARAGRAPHS = 16
# Keys for derive_seed: each phase has its own random numbers.
PRETRAIN, PPO, SCALE, EVALUATE = range(4)


@dataclass
class Args(RunArgs):
    seed: int = 1
    """Seed for all random number generators, except for the split of the text."""
    checkpoint_interval: int = 10
    """PPO iterations between checkpoints, 0 for none. Pre-training writes one after each validation."""
    save_model: bool = False
    """Also save the policy: model.safetensors with model.json, and model.pt for --reference."""

    text: list[Path] = field(default_factory=list)
    """Text files to learn from, with paragraphs separated by blank lines. Default: Python's help topics."""
    held_out: float = 0.1
    """Share of the text that is held out for the validation loss and the final evaluation."""
    reference: Path | None = None
    """reference.pt of another run. Skips pre-training and uses its model and sizes."""
    model: TinyMoEConfig = field(default_factory=TinyMoEConfig)
    """Sizes of the language model."""
    pretrain_steps: int = 500
    """Number of pre-training updates."""
    pretrain_batch: int = 32
    """Number of sequences per pre-training update."""
    pretrain_length: int = 128
    """Number of characters per pre-training sequence."""
    pretrain_learning_rate: float = 3e-3
    """Peak learning rate of AdamW: 50 updates of warm-up, then a cosine down to 5 % of it."""
    weight_decay: float = 0.1
    """Weight decay of AdamW in pre-training."""
    balance_coef: float = 0.003
    """Coefficient of the load-balancing loss in both phases. Keeps all experts in use; their loads still differ."""
    validate_every: int = 100
    """Updates between validations."""

    reward: Literal["vowels", "capitals", "variety", "brevity"] = "vowels"
    """Reward function of a response; see REWARDS."""
    iterations: int = 40
    """Number of iterations, each with one rollout and one update."""
    batch_size: int = 128
    """Number of responses per rollout."""
    prompt_tokens: int = 32
    """Number of characters in a prompt, taken from the text."""
    response_tokens: int = 48
    """Maximum number of characters in a response. The end token can end it earlier."""
    temperature: float = 1.0
    """Sampling temperature. The optimised policy is the one at temperature 1."""
    learning_rate: float = 3e-4
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_minibatches: int = 4
    """Number of minibatches per epoch."""
    update_epochs: int = 2
    """Number of epochs per update."""
    gamma: float = 1.0
    """Discount factor. 1, because a response is short and rewarded as a whole."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    norm_adv: bool = True
    """Normalise advantages per minibatch, over the tokens of the responses."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio and of the value change."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    vf_coef: float = 0.1
    """Coefficient of the value loss."""
    max_grad_norm: float = 1.0
    """Maximum global norm of the gradients."""
    kl_penalty: bool = True
    """Penalise log(policy / reference) of every token. With --no-kl-penalty (or --kl-coef 0) it is only measured."""
    kl_coef: float = 0.2
    """Penalty per nat, in standard deviations of the reference's reward (the initial value if adapted)."""
    kl_target: float | None = 6.0
    """KL per response, in nats, that the controller aims at. "None" keeps kl_coef constant."""
    kl_horizon: float = 10_000.0
    """Number of response tokens in which the controller changes kl_coef by at most 20 %."""
    eval_prompts: int = 512
    """Number of held-out prompts in an evaluation of reference or policy."""
    show: int = 4
    """Number of samples printed before and after training."""


# ALGO LOGIC: functions that are identical in every trainer (tests/trainers/test_trainers_agree.py)


def anneal(initial: float, iteration: int, num_iterations: int) -> float:
    """Linear schedule: ``initial`` in iteration 1, falling to 0 after the last iteration."""
    return initial * (1.0 - (iteration - 1) / num_iterations)


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    terminations: Tensor,
    dones: Tensor,
    next_value: Tensor,
    final_values: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation. Returns (advantages, returns), both of shape (steps, envs).

    ``terminations`` and ``dones`` (terminated or truncated) describe the outcome of step t. If an episode ended at step
    t, ``final_values[t]`` is the value of its last observation. It is used after a truncation, not after a termination.
    ``next_value`` (envs,) is the value of the observation that follows the last step of the rollout.
    """
    following = torch.where(dones, final_values, torch.cat([values[1:], next_value[None]]))
    deltas = rewards + gamma * following * ~terminations - values
    decays = gamma * gae_lambda * (~dones).to(rewards.dtype)
    advantages = torch.zeros_like(rewards)
    last = torch.zeros_like(next_value)
    for t in reversed(range(len(rewards))):
        advantages[t] = last = deltas[t] + decays[t] * last
    return advantages, advantages + values


def normalize_advantages(advantages: Tensor) -> Tensor:
    """Normalise to mean 0 and standard deviation 1 within the minibatch."""
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def policy_loss(ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """Clipped surrogate loss: for each sample, the larger of the unclipped and the clipped loss."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(unclipped, clipped).mean()


def value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | None) -> Tensor:
    """Half the mean squared error. With ``clip_coef``, the larger of the errors with and without clipping."""
    unclipped = (new_values - returns) ** 2
    if clip_coef is None:
        return 0.5 * unclipped.mean()
    clipped_values = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max(unclipped, (clipped_values - returns) ** 2).mean()


def kl_estimators(logratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Estimates (k1, k2, k3) of KL(old ‖ new) from samples of the old policy, where logratio = log new − log old.

    k1 = −log r is unbiased but has high variance and can be negative. k2 = (log r)² / 2 is biased with low variance.
    k3 = (r − 1) − log r is unbiased with low variance and never negative. See http://joschu.net/blog/kl-approx.html.
    """
    return -logratio, logratio**2 / 2, logratio.exp() - 1 - logratio


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var[returns − values] / Var[returns]: 1 for perfect values, 0 for constant ones, NaN for constant returns."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else float("nan")


# Text and rewards


def read_paragraphs(files: list[Path]) -> list[str]:
    """Read the distinct paragraphs of the files, or of Python's help topics.

    Help topics repeat paragraphs of each other. Without duplicates, no held-out paragraph is also trained on.
    """
    if files:
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    else:
        from pydoc_data.topics import topics

        texts = [topics[name] for name in sorted(topics)]
    pieces = (piece.strip("\n") for text in texts for piece in re.split(r"\n\s*\n", text))
    return list(dict.fromkeys(piece for piece in pieces if piece.strip()))


def split_text(paragraphs: list[str], held_out: float) -> tuple[Tensor, Tensor]:
    """Split at random into (training, held-out) tokens. The end token follows every paragraph."""
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is {held_out}: expected a share between 0 and 1")
    blocks = [paragraphs[i : i + BLOCK_PARAGRAPHS] for i in range(0, len(paragraphs), BLOCK_PARAGRAPHS)]
    if len(blocks) < 2:
        raise ValueError(f"the text has {len(paragraphs)} paragraphs: expected at least {BLOCK_PARAGRAPHS + 1}")
    random.Random(0).shuffle(blocks)
    cut = min(max(round(len(blocks) * held_out), 1), len(blocks) - 1)

    def pack(part: list[list[str]]) -> Tensor:
        return torch.tensor([token for block in part for text in block for token in [*encode(text), END]])

    return pack(blocks[cut:]), pack(blocks[:cut])


@dataclass
class Text:
    """Training and held-out tokens, and a digest that is saved with the reference model."""

    train: Tensor
    held_out: Tensor
    digest: str

    @property
    def device(self) -> torch.device:
        return self.train.device


def load_text(args: Args, device: torch.device) -> Text:
    paragraphs = read_paragraphs(args.text)
    digest = hashlib.sha256("\0".join([str(args.held_out), *paragraphs]).encode()).hexdigest()
    train, held_out = split_text(paragraphs, args.held_out)
    return Text(train.to(device), held_out.to(device), digest)


def prompt_starts(tokens: Tensor, length: int) -> Tensor:
    """All positions where ``length`` tokens lie within one paragraph."""
    ends = F.pad((tokens.cpu() == END).cumsum(0), (1, 0))
    starts = (ends[length:] == ends[:-length]).nonzero().squeeze(1)
    if not len(starts):
        raise ValueError(f"no paragraph of the text has {length} characters: reduce --prompt-tokens")
    return starts


def sample_prompts(tokens: Tensor, starts: Tensor, n: int, length: int, generator: torch.Generator) -> Tensor:
    """Sample prompts of shape (n, length)."""
    chosen = starts[torch.randint(len(starts), (n,), generator=generator, device=generator.device).cpu()]
    return tokens[(chosen[:, None] + torch.arange(length)).to(tokens.device)]


def vowels(text: str, limit: int) -> float:
    """Number of vowels."""
    return sum(character in "aeiouAEIOU" for character in text) / limit


def capitals(text: str, limit: int) -> float:
    """Number of capital letters."""
    return sum(character.isupper() for character in text) / limit


def variety(text: str, limit: int) -> float:
    """Number of letters in distinct words."""
    return sum(map(len, set(re.findall(r"[a-z]+", text.lower())))) / limit


def brevity(text: str, limit: int) -> float:
    """Number of characters that the response leaves unused."""
    return 1 - len(text) / limit


# All rewards are divided by the maximum length of a response. Divided by the actual length, they would be highest for a
# response of a single good letter.
REWARDS: dict[str, Callable[[str, int], float]] = {
    "vowels": vowels,
    "capitals": capitals,
    "variety": variety,
    "brevity": brevity,
}


def reward_of(name: str, responses: Tensor) -> Tensor:
    """Raw rewards (B,) of responses (B, R)."""
    return torch.tensor([REWARDS[name](decode(row), responses.shape[1]) for row in responses])


# ALGO LOGIC: policy and rollouts


def make_generator(device: torch.device, *key: int) -> torch.Generator:
    """A random number generator on the device where its numbers are used, seeded by the key."""
    return torch.Generator(device).manual_seed(derive_seed(*key))


class PolicyWithValue(nn.Module):
    """A language model with a value head."""

    def __init__(self, language_model: TinyMoE) -> None:
        super().__init__()
        self.language_model = language_model
        self.value_head = nn.Linear(language_model.config.hidden, 1)
        # The first values are 0. A random head would add noise to the first advantages.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, tokens: Tensor, n_prompt: int) -> tuple[Tensor, Tensor, Tensor]:
        """For prompts and responses (B, P + R): log-probabilities (B, R), values (B, R) and the load-balancing loss."""
        # Tokens behind the end of a response are padding: the routers do not have to balance them.
        mask = F.pad(response_mask(tokens[:, n_prompt:-1]), (n_prompt, 0), value=True)
        activations, balance = self.language_model.trunk(tokens[:, :-1], mask=mask)
        activations = activations[:, n_prompt - 1 :]
        logprobs = response_logprobs(self.language_model.logits(activations), tokens[:, n_prompt:])
        return logprobs, self.value_head(activations).squeeze(-1), balance


def response_logprobs(logits: Tensor, responses: Tensor) -> Tensor:
    """Log-probabilities (B, R) of the response tokens (B, R), from the logits (B, R, V) of the previous positions."""
    return logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)


@torch.no_grad()
def model_logprobs(model: TinyMoE, tokens: Tensor, n_prompt: int) -> Tensor:
    """Log-probabilities (B, R) of the responses in prompts and responses (B, P + R)."""
    activations, _ = model.trunk(tokens[:, :-1])
    return response_logprobs(model.logits(activations[:, n_prompt - 1 :]), tokens[:, n_prompt:])


def response_mask(responses: Tensor) -> Tensor:
    """Boolean mask (B, R) of the tokens up to and including the first end token."""
    ended = (responses == END).cumsum(1)
    return ended - (responses == END).long() == 0


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards (B, R): each token costs kl_coef · its KL, and the last token of a response gets the score."""
    last = mask.sum(1, keepdim=True) - 1
    return (-kl_coef * kl * mask).scatter_add(1, last, scores[:, None])


def next_kl_coef(kl_coef: float, kl: float, target: float, n_tokens: int, horizon: float) -> float:
    """Adaptive KL controller of Ziegler et al. (2019). ``n_tokens`` is the number of tokens since the last change.

    The proportional error is clamped to ±0.2, and one change to ±20 %: more tokens than the horizon must not make the
    coefficient negative.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * min(n_tokens / horizon, 1.0))


@dataclass
class Batch:
    """Training data of one update, one row per response. Entries where ``mask`` is False are padding."""

    tokens: Tensor
    """Prompts and responses (B, P + R)"""
    mask: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class Scale:
    """Normalises rewards by their mean and standard deviation under the reference, so kl_coef fits every reward."""

    mean: float
    deviation: float

    def __call__(self, raw: Tensor) -> Tensor:
        return (raw - self.mean) / self.deviation


@torch.no_grad()
def rollout(
    policy: PolicyWithValue,
    reference: TinyMoE,
    prompts: Tensor,
    scale: Scale,
    kl_coef: float,
    args: Args,
    generator: torch.Generator,
) -> tuple[Batch, dict[str, float]]:
    """Generate and score responses to the prompts. Returns the training data and metrics."""
    responses = policy.language_model.generate(prompts, args.response_tokens, generator, args.temperature)
    tokens, mask = torch.cat([prompts, responses], dim=1), response_mask(responses)
    # Recomputed the same way as in the update, so that the first probability ratio is exactly 1.
    logprobs, values, _ = policy(tokens, args.prompt_tokens)
    k1, k2, k3 = kl_estimators(model_logprobs(reference, tokens, args.prompt_tokens) - logprobs)
    raw = reward_of(args.reward, responses).to(values.device)
    rewards = token_rewards(scale(raw), k1, mask, kl_coef)
    # An episode ends at the last token of the response: the end token, or the last possible one.
    ends = mask & ~F.pad(mask[:, 1:], (0, 1))
    zeros = torch.zeros_like(values)
    steps = (rewards.T, values.T, ends.T, ends.T, zeros[:, 0], zeros.T)
    advantages, returns = compute_gae(*steps, args.gamma, args.gae_lambda)
    metrics = {
        "charts/reward": raw.mean().item(),
        "charts/episodic_return": raw.mean().item(),
        "charts/episodic_length": mask.sum(1).float().mean().item(),
        "charts/penalized_score": rewards.sum(1).mean().item(),
        "charts/response_tokens": mask.sum(1).float().mean().item(),
        "charts/ended": (responses == END).any(1).float().mean().item(),
        **{f"kl/{name}": (kl * mask).sum(1).mean().item() for name, kl in (("k1", k1), ("k2", k2), ("k3", k3))},
        "losses/explained_variance": explained_variance(values[mask], returns.T[mask]),
    }
    return Batch(tokens, mask, logprobs, values, advantages.T, returns.T), metrics


def update(
    policy: PolicyWithValue, optimizer: torch.optim.Adam, batch: Batch, args: Args, generator: torch.Generator
) -> dict[str, float]:
    """Train on one rollout: several epochs of shuffled minibatches. Returns the mean of each metric."""
    seen: list[Tensor] = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.tokens), generator=generator, device=generator.device).to(batch.tokens.device)
        for rows in order.tensor_split(args.num_minibatches):
            # Select the tokens of the responses, so that means and normalisation leave out the padding.
            mask = batch.mask[rows]
            logprobs, new_values, balance = policy(batch.tokens[rows], args.prompt_tokens)
            old_values, returns, advantages = (
                column[rows][mask] for column in (batch.values, batch.returns, batch.advantages)
            )
            logratio = (logprobs - batch.logprobs[rows])[mask]
            ratio = logratio.exp()

            advantages = normalize_advantages(advantages) if args.norm_adv else advantages
            pg_loss = policy_loss(ratio, advantages, args.clip_coef)
            v_loss = value_loss(new_values[mask], old_values, returns, args.clip_coef if args.clip_vloss else None)
            loss = pg_loss + args.vf_coef * v_loss + args.balance_coef * balance

            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            optimizer.step()
            with torch.no_grad():
                clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
                approx_kl = kl_estimators(logratio)[2].mean()
                seen.append(torch.stack([pg_loss, v_loss, balance, approx_kl, clipfrac, grad_norm, ratio.max()]))
    names = ("policy_loss", "value_loss", "balance_loss", "approx_kl", "clipfrac", "grad_norm", "max_ratio")
    return {f"losses/{name}": value for name, value in zip(names, torch.stack(seen).mean(0).tolist(), strict=True)}


# Pre-training


def pretrain_learning_rate(step: int, args: Args) -> float:
    """Linear warm-up over 50 updates, then a cosine from the peak to 5 % of it. The first ``step`` is 0."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / args.pretrain_steps))
    return args.pretrain_learning_rate * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * cosine)


@torch.no_grad()
def validation_loss(model: TinyMoE, tokens: Tensor, length: int) -> float:
    """Mean cross-entropy in nats per character, on consecutive sequences of ``length`` tokens."""
    length = min(length, len(tokens) - 1)
    count = (len(tokens) - 1) // length
    inputs, targets = tokens[: count * length].view(count, length), tokens[1 : count * length + 1].view(count, length)
    losses = [
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        for x, y in zip(inputs.split(64), targets.split(64), strict=True)
    ]
    return sum(losses) / (count * length)


def pretrain(
    model: TinyMoE, text: Text, args: Args, logger: RunLogger, saved: dict[str, Any] | None, save: Callable[..., None]
) -> None:
    """Train the model to predict the next character, with a load-balancing loss for the routers."""
    if len(text.train) <= args.pretrain_length:
        raise ValueError(f"the training text has {len(text.train)} characters: need more than {args.pretrain_length}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=args.weight_decay)
    first = 0
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    window = torch.arange(args.pretrain_length + 1, device=text.device)
    per_step = args.pretrain_batch * args.pretrain_length
    with Progress(args.pretrain_steps * per_step, first * per_step) as progress:
        for step in range(first, args.pretrain_steps):
            generator = make_generator(text.device, args.seed, PRETRAIN, step)
            last = len(text.train) - args.pretrain_length
            starts = torch.randint(last, (args.pretrain_batch, 1), generator=generator, device=text.device)
            batch = text.train[starts + window]
            optimizer.param_groups[0]["lr"] = pretrain_learning_rate(step, args)
            activations, balance = model.trunk(batch[:, :-1])
            loss = F.cross_entropy(model.logits(activations).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            (loss + args.balance_coef * balance).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

            done = step + 1
            metrics = {"pretrain/loss": loss.item(), "pretrain/balance_loss": balance.item()}
            if not math.isfinite(metrics["pretrain/loss"]):
                raise NonFiniteLoss(f"the loss of pre-training is not finite in update {done}: lower the learning rate")
            if done % args.validate_every == 0 or done == args.pretrain_steps:
                metrics["pretrain/validation_loss"] = validation_loss(model, text.held_out, args.pretrain_length)
                logger.scalars(metrics, done)
                save("pretrain", done, model=model.state_dict(), optimizer=optimizer.state_dict())
            elif done % 10 == 0:
                logger.scalars(metrics, done)
            progress.update(done * per_step, **{key.split("/")[1]: value for key, value in metrics.items()})


# Evaluation and the whole run


def load_reference(path: Path, text: Text) -> TinyMoE:
    """Load a reference model. It must have been trained on the same text, so that the held-out part is unseen."""
    state = load_checkpoint(path, ("ppo_llm-reference", "ppo_llm-model"), text.device)
    if state["text"] != text.digest:
        raise CheckpointError(
            f"{path} was pre-trained on another text or split (digest {state['text'][:12]}, here {text.digest[:12]}): "
            "use the same --text and --held-out (Python's help topics differ between its versions)"
        )
    model = TinyMoE(TinyMoEConfig(**state["model"])).to(text.device)
    model.load_state_dict(state["weights"])
    return model


@torch.no_grad()
def evaluate(policy: TinyMoE, reference: TinyMoE, text: Text, args: Args) -> tuple[dict[str, float], Tensor]:
    """Mean reward and KL of responses to held-out prompts (always the same ones), and some samples to print."""
    generator = make_generator(text.device, args.seed, EVALUATE)
    starts = prompt_starts(text.held_out, args.prompt_tokens)
    prompts = sample_prompts(text.held_out, starts, args.eval_prompts, args.prompt_tokens, generator)
    responses = policy.generate(prompts, args.response_tokens, generator, args.temperature)
    tokens, mask = torch.cat([prompts, responses], dim=1), response_mask(responses)
    reference_logprobs = model_logprobs(reference, tokens, args.prompt_tokens)
    policy_logprobs = model_logprobs(policy, tokens, args.prompt_tokens)
    k1, k2, k3 = ((each * mask).sum(1) for each in kl_estimators(reference_logprobs - policy_logprobs))
    rewards = reward_of(args.reward, responses)
    found = {
        "reward": rewards.mean().item(),
        "reward_ci95": 1.96 * rewards.std().item() / len(rewards) ** 0.5,
        "kl": k1.mean().item(),
        "kl_ci95": 1.96 * k1.std().item() / len(rewards) ** 0.5,
        "kl_k2": k2.mean().item(),
        "kl_k3": k3.mean().item(),
        "response_tokens": mask.sum(1).float().mean().item(),
        "validation_loss": validation_loss(policy, text.held_out, args.pretrain_length),
    }
    return found, tokens[: args.show]


def print_samples(title: str, tokens: Tensor, n_prompt: int) -> None:
    print(f"--- {title}: prompt | response")
    for row in tokens:
        print(f"{decode(row[:n_prompt])!r} | {decode(row[n_prompt:])!r}")


def check_args(args: Args) -> None:
    longest = max(args.pretrain_length, args.prompt_tokens + args.response_tokens)
    if longest > args.model.context and args.reference is None:
        raise ValueError(f"sequences of {longest} tokens do not fit into --model.context {args.model.context}")
    sizes = "pretrain_steps iterations prompt_tokens response_tokens num_minibatches update_epochs eval_prompts"
    for key in sizes.split():
        if getattr(args, key) < 1:
            raise ValueError(f"{key} is {getattr(args, key)}: expected at least 1")
    if args.batch_size < 2 * args.num_minibatches:
        raise ValueError(f"batch_size is {args.batch_size}: expected at least 2 responses per minibatch")
    check_values(args, "kl_target kl_horizon temperature learning_rate max_grad_norm", lambda x: x > 0, "more than 0")
    check_values(args, "kl_coef vf_coef balance_coef clip_coef", lambda x: x >= 0, "0 or more")
    check_values(args, "gamma gae_lambda", lambda x: 0 <= x <= 1, "0 … 1")


def train(args: Args, world: World) -> dict[str, Any]:
    """Pre-train, train with PPO and evaluate. Returns the content of the result line."""
    check_args(args)
    if world.size > 1:
        raise ValueError(f"ppo_llm.py runs in one process, not in {world.size}: start it without torchrun")
    device = world.device
    folder = run_folder(f"ppo_llm__{args.reward}__{args.seed}", args.run_dir, args.resume)
    config = plain_args(args)
    text = load_text(args, device)
    saved, checkpoint, reference_file = None, folder / CHECKPOINT_NAME, folder / "reference.pt"
    if args.resume and checkpoint.exists():
        saved = load_checkpoint(checkpoint, "ppo_llm", device)
        check_same_args(saved["args"], config, may_differ=["iterations"])
    in_ppo = saved is not None and saved["phase"] == "ppo"

    def save(phase: str, step: int, **state: Any) -> None:
        if args.checkpoint_interval:
            logger.flush()
            save_checkpoint(checkpoint, "ppo_llm", {"args": config, "phase": phase, "step": step, **state})

    start_step, project, entity = saved["step"] + 1 if saved else 0, args.wandb_project_name, args.wandb_entity
    with RunLogger(folder, config, args.track, project, start_step=start_step, entity=entity) as logger:
        if in_ppo or args.reference is not None:
            reference = load_reference(reference_file if in_ppo else args.reference, text)
        else:
            torch.manual_seed(args.seed)
            reference = TinyMoE(args.model).to(device)
            pretrain(reference, text, args, logger, saved, save)
        about = {"model": asdict(reference.config), "text": text.digest}
        if not in_ppo:
            save_checkpoint(reference_file, "ppo_llm-reference", about | {"weights": reference.state_dict()})
        reference.requires_grad_(False)
        n_parameters = sum(p.numel() for p in reference.parameters())
        print(
            f"{n_parameters:,} parameters, {len(text.train):,} training and {len(text.held_out):,} held-out characters"
        )

        policy = PolicyWithValue(copy.deepcopy(reference).requires_grad_(True)).to(device)
        optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate, eps=1e-5)
        kl_coef = args.kl_coef if args.kl_penalty else 0.0
        starts = prompt_starts(text.train, args.prompt_tokens)
        first = 1
        if in_ppo:
            policy.load_state_dict(saved["policy"])
            optimizer.load_state_dict(saved["optimizer"])
            first, kl_coef, scale = saved["iteration"] + 1, saved["kl_coef"], Scale(*saved["scale"])
        else:
            generator = make_generator(device, args.seed, SCALE)
            prompts = sample_prompts(text.train, starts, args.eval_prompts, args.prompt_tokens, generator)
            raw = reward_of(args.reward, reference.generate(prompts, args.response_tokens, generator, args.temperature))
            scale = Scale(raw.mean().item(), max(raw.std().item(), 1e-6))
        before, samples = evaluate(reference, reference, text, args)
        print_samples("before", samples, args.prompt_tokens)
        print(f"reward {before['reward']:.3f}, validation loss {before['validation_loss']:.3f} nats per character")

        # The step of the logs counts updates: those of PPO continue after those of pre-training.
        pretrained = 0 if args.reference is not None else args.pretrain_steps
        tokens_per_iteration = args.batch_size * args.response_tokens
        total_tokens = args.iterations * tokens_per_iteration
        with Progress(total_tokens, (first - 1) * tokens_per_iteration) as progress:
            for iteration in range(first, args.iterations + 1):
                generator = make_generator(device, args.seed, PPO, iteration)
                if args.anneal_lr:
                    optimizer.param_groups[0]["lr"] = anneal(args.learning_rate, iteration, args.iterations)

                prompts = sample_prompts(text.train, starts, args.batch_size, args.prompt_tokens, generator)
                batch, metrics = rollout(policy, reference, prompts, scale, kl_coef, args, generator)
                metrics |= update(policy, optimizer, batch, args, generator)

                metrics["charts/kl_coef"] = kl_coef
                metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
                metrics["charts/SPS"] = progress.steps_per_s(iteration * tokens_per_iteration)
                if args.eval_interval and iteration % args.eval_interval == 0 and iteration < args.iterations:
                    found, _ = evaluate(policy.language_model, reference, text, args)
                    metrics |= {f"eval/{key}": value for key, value in found.items()}
                if args.kl_target is not None:
                    n_tokens = int(batch.mask.sum())
                    kl_coef = next_kl_coef(kl_coef, metrics["kl/k1"], args.kl_target, n_tokens, args.kl_horizon)
                check_finite(metrics, iteration, checkpoint)
                logger.scalars(metrics, pretrained + iteration)
                shown = {"reward": metrics["charts/reward"], "kl": metrics["kl/k1"], "kl_coef": kl_coef}
                progress.update(iteration * tokens_per_iteration, **shown)
                if iteration == args.iterations or iteration % (args.checkpoint_interval or args.iterations) == 0:
                    save(
                        "ppo",
                        pretrained + iteration,
                        iteration=iteration,
                        kl_coef=kl_coef,
                        scale=[scale.mean, scale.deviation],
                        policy=policy.state_dict(),
                        optimizer=optimizer.state_dict(),
                    )
            steps_per_s = progress.steps_per_s(total_tokens)

        after, samples = evaluate(policy.language_model, reference, text, args)
        print_samples("after", samples, args.prompt_tokens)
        logger.scalars({f"eval/{key}": value for key, value in after.items()}, pretrained + args.iterations)
    if args.save_model:
        save_model(folder, "ppo_llm", config, weights=policy.language_model.state_dict(), **about)
    return {
        "reward_name": args.reward,
        "seed": args.seed,
        "mean_return": after["reward"],
        "reference_return": before["reward"],
        "gain": after["reward"] - before["reward"],
        "kl_target": args.kl_target if args.kl_penalty and args.kl_coef else None,
        "reference_validation_loss": before["validation_loss"],
        **{key: value for key, value in after.items() if key != "reward"},
        "steps": total_tokens,
        "steps_per_s": steps_per_s,
        "checkpoint": checkpoint if args.checkpoint_interval else None,
        "reference": reference_file,
        "run_dir": folder,
    }


if __name__ == "__main__":
    run_trainer(train, parse_args(Args, __doc__))
