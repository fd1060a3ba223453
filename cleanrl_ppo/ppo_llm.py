"""PPO for a language model: tokens are actions, and a KL penalty keeps the policy close to a frozen reference model.

    python cleanrl_ppo/ppo_llm.py                                     # pre-training, then PPO for vowels: a few minutes
    python cleanrl_ppo/ppo_llm.py --reward capitals --text a.txt b.txt
    python cleanrl_ppo/ppo_llm.py --reference runs/ppo_llm__vowels__1/reference.pt --seed 2    # without pre-training
    python cleanrl_ppo/ppo_llm.py --kl-coef 0                         # shows what the penalty prevents
    python cleanrl_ppo/ppo_llm.py --resume                            # continue after a crash, bit for bit

1. A small mixture-of-experts transformer over characters (traces/tiny_moe.py) is trained on text.
2. A frozen copy of it is the reference. The prompt is the first state, each character is an action, and the response is
   the episode.
3. A reward function scores the response at its last token. Every token costs kl_coef · log(policy / reference), so the
   policy improves the reward without forgetting its language.

The comments in ``train`` have the numbers of "The 37 Implementation Details of PPO" and say what is different for
language models. ``torchrun`` trains on several processes, each with ``batch_size`` responses. One CPU thread is enough.
docs/reference/ppo_llm.md explains the metrics.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clustergym.common.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from clustergym.training.args import COUNT, NOT_NEGATIVE, POSITIVE, FlagError, RunArgs, main, parse_args
from clustergym.training.distributed import World, init_distributed
from clustergym.training.envs import derive_seed, evaluation_seed
from clustergym.training.logs import Progress
from clustergym.training.runs import Run

# The scripts in traces/ record the routing of this model.
sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from tiny_moe import END, TinyMoE, TinyMoEConfig, decode, encode

HELD_OUT = 0.1
"""Share of the text that is held out for the validation loss and the evaluation."""
BLOCK_PARAGRAPHS = 16
"""Paragraphs that are held out together, so that most sequences lie within one block."""
PRETRAIN_BATCH, PRETRAIN_LENGTH = 32, 128
"""Number and length of the sequences of a pre-training update."""
PRETRAIN_LEARNING_RATE = 3e-3
"""Peak learning rate of AdamW: 50 updates of warm-up, then a cosine down to 5 % of it."""


@dataclass
class Args(RunArgs):
    checkpoint_interval: int = 10
    """Number of iterations between checkpoints, 0 for none. Has no influence on the training."""
    total_timesteps: int = 245_760
    """Total number of response tokens, padding included. Rounded up to whole iterations."""
    eval_episodes: int = 512
    """Number of held-out prompts in an evaluation, always the same ones."""
    text: list[Path] = field(default_factory=list)
    """Text files to learn from, with paragraphs separated by blank lines. Default: Python's help topics."""
    reference: Path | None = None
    """reference.pt of another run. Skips pre-training and uses its model and sizes."""
    layers: int = 4
    """Number of layers of the language model."""
    experts: int = 64
    """Number of experts per layer. Each token uses 4."""
    hidden: int = 96
    """Width of the language model, a multiple of 8."""
    pretrain_steps: int = 500
    """Number of pre-training updates."""
    balance_coef: float = 0.003
    """Coefficient of the load-balancing loss in both phases. Keeps all experts in use; their loads still differ."""
    reward: Literal["vowels", "capitals", "variety", "brevity"] = "vowels"
    """Reward of a response, as a share of the characters that it may have: vowels, capital letters, letters in distinct
    words, or characters that are left when it ends."""
    batch_size: int = 128
    """Number of responses per iteration and process."""
    prompt_tokens: int = 32
    """Number of characters in a prompt, taken from the text."""
    response_tokens: int = 48
    """Maximum number of characters in a response. The end token can end it earlier."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in the probabilities that PPO uses."""
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
    clip_coef: float = 0.2
    """Clip range of the probability ratio and of the value change."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    vf_coef: float = 0.1
    """Coefficient of the value loss."""
    max_grad_norm: float = 1.0
    """Maximum global norm of the gradients."""
    kl_coef: float = 0.2
    """Penalty per nat of KL to the reference, in standard deviations of the reference's reward (the initial value if
    adapted). With 0, the KL is only measured."""
    kl_target: float | None = 6.0
    """KL per response, in nats, that kl_coef is adapted to. "None" keeps kl_coef constant."""
    kl_horizon: float = 10_000.0
    """Number of response tokens in which kl_coef changes by at most 20 %."""


RANGES = {
    **dict.fromkeys(["layers", "experts", "pretrain_steps", "batch_size", "prompt_tokens", "response_tokens"], COUNT),
    **dict.fromkeys(["temperature", "kl_horizon"], POSITIVE),
    **dict.fromkeys(["balance_coef", "kl_coef"], NOT_NEGATIVE),
    "eval_episodes": COUNT,
}


def read_paragraphs(files: list[Path]) -> list[str]:
    """Distinct paragraphs of the files, or of Python's help topics, which repeat paragraphs of each other."""
    if files:
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    else:
        from pydoc_data.topics import topics

        texts = [topics[name] for name in sorted(topics)]
    pieces = (piece.strip("\n") for text in texts for piece in re.split(r"\n\s*\n", text))
    return list(dict.fromkeys(piece for piece in pieces if piece.strip()))


def split_text(paragraphs: list[str]) -> tuple[Tensor, Tensor]:
    """Split at random into (training, held-out) tokens. The end token follows every paragraph."""
    blocks = [paragraphs[i : i + BLOCK_PARAGRAPHS] for i in range(0, len(paragraphs), BLOCK_PARAGRAPHS)]
    if len(blocks) < 2:
        raise FlagError(f"--text has {len(paragraphs)} paragraphs: expected at least {BLOCK_PARAGRAPHS + 1}")
    random.Random(0).shuffle(blocks)
    cut = max(round(len(blocks) * HELD_OUT), 1)
    parts = [[token for block in part for text in block for token in [*encode(text), END]]
             for part in (blocks[cut:], blocks[:cut])]  # fmt: skip
    return torch.tensor(parts[0]), torch.tensor(parts[1])


def prompt_starts(tokens: Tensor, length: int) -> Tensor:
    """All positions where ``length`` tokens lie within one paragraph."""
    ends = F.pad((tokens == END).cumsum(0), (1, 0))
    starts = (ends[length:] == ends[:-length]).nonzero().squeeze(1)
    if not len(starts):
        raise FlagError(f"--prompt-tokens is {length}, but no paragraph of the text has as many characters")
    return starts


def sample_prompts(tokens: Tensor, starts: Tensor, n: int, length: int) -> Tensor:
    """Prompts (n, length)."""
    chosen = starts[torch.randint(len(starts), (n,), device=starts.device)]
    return tokens[chosen[:, None] + torch.arange(length, device=tokens.device)]


# Rewards are shares of the limit, not of the response. Otherwise a response of a single good letter would be best.
REWARDS: dict[str, Callable[[str, int], float]] = {
    "vowels": lambda text, limit: sum(character in "aeiouAEIOU" for character in text) / limit,
    "capitals": lambda text, limit: sum(character.isupper() for character in text) / limit,
    "variety": lambda text, limit: sum(map(len, set(re.findall(r"[a-z]+", text.lower())))) / limit,
    "brevity": lambda text, limit: 1 - len(text) / limit,
}


def rewards_of(name: str, responses: Tensor) -> Tensor:
    """Rewards (B,) of responses (B, R)."""
    found = [REWARDS[name](decode(row), responses.shape[1]) for row in responses]
    return torch.tensor(found, dtype=torch.get_default_dtype(), device=responses.device)


def response_mask(responses: Tensor) -> Tensor:
    """Boolean mask (B, R): True up to and including the first end token. What follows is padding."""
    ended = (responses == END).cumsum(1)
    return ended - (responses == END).long() == 0


def response_logprobs(model: TinyMoE, activations: Tensor, tokens: Tensor, args: Args) -> Tensor:
    """Log-probabilities (B, R) of the responses in ``tokens`` (B, P + R), from activations (B, P + R − 1, D)."""
    logits = model.logits(activations[:, args.prompt_tokens - 1 :]) / args.temperature
    return logits.log_softmax(-1).gather(-1, tokens[:, args.prompt_tokens :, None]).squeeze(-1)


class Policy(nn.Module):
    """The language model with a value head: both share the trunk (detail 13)."""

    def __init__(self, language_model: TinyMoE) -> None:
        super().__init__()
        self.language_model = language_model
        self.value_head = nn.Linear(language_model.config.hidden, 1)
        # The first values are 0. A random head would add noise to the first advantages.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, tokens: Tensor, args: Args) -> tuple[Tensor, Tensor, Tensor]:
        """For prompts and responses (B, P + R): log-probabilities (B, R), values (B, R) and the load-balancing loss."""
        n_prompt = args.prompt_tokens
        # The routers do not have to balance padding.
        mask = F.pad(response_mask(tokens[:, n_prompt:-1]), (n_prompt, 0), value=True)
        activations, balance = self.language_model.trunk(tokens[:, :-1], mask=mask)
        logprobs = response_logprobs(self.language_model, activations, tokens, args)
        return logprobs, self.value_head(activations[:, n_prompt - 1 :]).squeeze(-1), balance


@torch.no_grad()
def validation_loss(model: TinyMoE, tokens: Tensor, length: int = PRETRAIN_LENGTH) -> float:
    """Mean cross-entropy in nats per character, on consecutive sequences of ``length`` tokens."""
    length = min(length, len(tokens) - 1)
    count = (len(tokens) - 1) // length
    inputs, targets = tokens[: count * length].view(count, length), tokens[1 : count * length + 1].view(count, length)
    losses = [
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        for x, y in zip(inputs.split(64), targets.split(64), strict=True)
    ]
    return sum(losses) / (count * length)


def pretrain(model: TinyMoE, train_tokens: Tensor, held_out: Tensor, args: Args, run: Run, world: World) -> None:
    """Train the model to predict the next character, with a load-balancing loss for the routers."""
    if len(train_tokens) <= PRETRAIN_LENGTH:
        raise FlagError(f"--text has {len(train_tokens)} training characters: expected more than {PRETRAIN_LENGTH}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    window = torch.arange(PRETRAIN_LENGTH + 1, device=train_tokens.device)
    progress = Progress(args.pretrain_steps, 0) if run.writer is not None else None
    for step in range(args.pretrain_steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / args.pretrain_steps))
        warm_up = min(1.0, (step + 1) / 50)
        optimizer.param_groups[0]["lr"] = PRETRAIN_LEARNING_RATE * warm_up * (0.05 + 0.95 * cosine)
        starts = torch.randint(len(train_tokens) - PRETRAIN_LENGTH, (PRETRAIN_BATCH, 1), device=train_tokens.device)
        batch = train_tokens[starts + window]
        activations, balance = model.trunk(batch[:, :-1])
        loss = F.cross_entropy(model.logits(activations).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + args.balance_coef * balance).backward()
        world.average_gradients(model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        if run.writer is not None and progress is not None and (done % 10 == 0 or done == args.pretrain_steps):
            metrics = {"pretrain/loss": loss.item(), "pretrain/balance_loss": balance.item()}
            if done % 100 == 0 or done == args.pretrain_steps:
                metrics["pretrain/validation_loss"] = validation_loss(model, held_out)
            for name, value in metrics.items():
                run.writer.add_scalar(name, value, done)
            progress.update(done, {"loss": metrics["pretrain/loss"]})
    if progress is not None:
        progress.close()


def train(args: Args) -> dict[str, Any]:
    """Pre-train, train with PPO and evaluate. Returns the content of the result line."""
    if args.capture_video:
        raise FlagError("--capture-video: a text has no video. Samples are printed before and after the training")
    world = init_distributed(args.cuda, args.torch_deterministic)
    device = world.device
    paragraphs = read_paragraphs(args.text)
    digest = hashlib.sha256("\0".join(paragraphs).encode()).hexdigest()
    train_tokens, held_out = (part.to(device) for part in split_text(paragraphs))
    starts, held_out_starts = (prompt_starts(part, args.prompt_tokens) for part in (train_tokens, held_out))
    if args.reference is not None:
        reference_state = load_checkpoint(args.reference, "ppo_llm-reference", device)
        # Otherwise the reference would have seen prompts of the evaluation.
        if reference_state["text"] != digest:
            advice = "use the same --text (Python's help topics differ between its versions)"
            raise CheckpointError(f"{args.reference} was pre-trained on another text: {advice}")
        args = replace(args, **reference_state["args"])
    config = TinyMoEConfig(n_layers=args.layers, n_experts=args.experts, hidden=args.hidden)
    if args.prompt_tokens + args.response_tokens > config.context:
        found = f"--prompt-tokens + --response-tokens is {args.prompt_tokens + args.response_tokens}"
        raise FlagError(f"{found}: expected at most {config.context}, the context of the model")
    if args.batch_size < 2 * args.num_minibatches:
        raise FlagError(f"--batch-size is {args.batch_size}: expected at least 2 responses per minibatch")
    run = Run("ppo_llm", args, args.reward, args.batch_size * args.response_tokens, world)

    # The reference: of another run, of this run before it was interrupted, or trained now.
    reference, file = TinyMoE(config).to(device), run.folder / "reference.pt"
    if args.reference is None and run.resumed and file.exists():
        reference_state = load_checkpoint(file, "ppo_llm-reference", device)
    elif args.reference is None:
        world.broadcast(reference)
        pretrain(reference, train_tokens, held_out, args, run, world)
        sizes = {"layers": args.layers, "experts": args.experts, "hidden": args.hidden}
        reference_state = {"args": sizes, "text": digest, "language_model": reference.state_dict()}
    reference.load_state_dict(reference_state["language_model"])
    if world.is_main and not file.exists():
        save_checkpoint(file, "ppo_llm-reference", reference_state)
    # The same random numbers whether the reference was trained or loaded.
    torch.manual_seed(derive_seed(args.seed, run.first_iteration, world.rank))

    policy = Policy(deepcopy(reference)).to(device)
    reference.requires_grad_(False)
    # Detail 3: Adam's epsilon.
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate, eps=1e-5)

    def respond(model: TinyMoE, tokens: Tensor, starts: Tensor, n: int) -> Tensor:
        """Prompts of the text with sampled responses (n, P + R)."""
        prompts = sample_prompts(tokens, starts, n, args.prompt_tokens)
        return torch.cat([prompts, model.generate(prompts, args.response_tokens, temperature=args.temperature)], 1)

    @torch.no_grad()
    def evaluate_model(model: TinyMoE) -> tuple[list[float], dict[str, float], Tensor]:
        """Rewards of responses to held-out prompts, other metrics, and the prompts with the responses."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(evaluation_seed(args.seed))
            tokens = respond(model, held_out, held_out_starts, args.eval_episodes)
        mask = response_mask(tokens[:, args.prompt_tokens :])
        ours, theirs = (response_logprobs(m, m.trunk(tokens[:, :-1])[0], tokens, args) for m in (model, reference))
        metrics = {
            "kl": ((ours - theirs) * mask).sum(1).mean().item(),
            "response_tokens": mask.sum(1).float().mean().item(),
            "validation_loss": validation_loss(model, held_out),
        }
        return rewards_of(args.reward, tokens[:, args.prompt_tokens :]).tolist(), metrics, tokens

    def show(title: str, tokens: Tensor) -> None:
        for row in tokens[:4] if world.is_main else []:
            text = f"{decode(row[: args.prompt_tokens])!r} | {decode(row[args.prompt_tokens :])!r}"
            print(f"{title}: {text}", file=sys.stderr)

    # Rewards are normalised by their mean and deviation under the reference, so that one kl_coef suits every reward.
    raw = rewards_of(args.reward, respond(reference, train_tokens, starts, args.eval_episodes)[:, args.prompt_tokens :])
    reward_mean, reward_std = world.share([raw.mean().item(), max(raw.std().item(), 1e-6)])
    before, before_metrics, tokens = evaluate_model(reference)
    show("before", tokens)

    saved = run.load_checkpoint(policy=policy, optimizer=optimizer)
    kl_coef = saved.get("kl_coef", args.kl_coef)
    reward_mean, reward_std = saved.get("reward_scale", [reward_mean, reward_std])

    for iteration in run.iterations():
        if args.anneal_lr:
            # Detail 4: the learning rate falls linearly to 0.
            optimizer.param_groups[0]["lr"] = (1 - (iteration - 1) / run.num_iterations) * args.learning_rate

        # Roll-out: the policy answers prompts of the text. A response is a whole episode.
        with torch.no_grad():
            tokens = respond(policy.language_model, train_tokens, starts, args.batch_size)
            responses = tokens[:, args.prompt_tokens :]
            mask = response_mask(responses)
            # Computed as in the update, so that the first ratio is 1 (sampling has a cache and rounds differently).
            logprobs, values, _ = policy(tokens, args)
            reference_logprobs = response_logprobs(reference, reference.trunk(tokens[:, :-1])[0], tokens, args)

        # Rewards: every token pays for its KL to the reference (estimator k1). The last one, which is the end token or
        # the last possible token, gets the reward of the response.
        kl = logprobs - reference_logprobs
        raw = rewards_of(args.reward, responses)
        rewards = -kl_coef * kl * mask
        rewards[torch.arange(len(mask), device=device), mask.sum(1) - 1] += (raw - reward_mean) / reward_std

        # Detail 5: generalised advantage estimation over the tokens. Nothing is bootstrapped after the last one.
        advantages = torch.zeros_like(rewards)
        lastgaelam = torch.zeros(len(mask), device=device)
        for t in reversed(range(args.response_tokens)):
            nextvalues = values[:, t + 1] * mask[:, t + 1] if t + 1 < args.response_tokens else 0.0
            delta = rewards[:, t] + args.gamma * nextvalues - values[:, t]
            advantages[:, t] = lastgaelam = (delta + args.gamma * args.gae_lambda * lastgaelam) * mask[:, t]
        returns = advantages + values

        minibatch_metrics = []
        for _ in range(args.update_epochs):
            # Detail 6: every response is in one minibatch of an epoch.
            for mb_inds in torch.randperm(args.batch_size, device=device).tensor_split(args.num_minibatches):
                newlogprob, newvalue, balance = policy(tokens[mb_inds], args)
                # Only tokens of the responses count, not the padding after the end token.
                mb_mask = mask[mb_inds]
                mb_values, mb_returns = values[mb_inds][mb_mask], returns[mb_inds][mb_mask]
                newvalue, logratio = newvalue[mb_mask], (newlogprob - logprobs[mb_inds])[mb_mask]
                ratio = logratio.exp()

                # Detail 7: advantages are normalised per minibatch, over the tokens of the responses.
                mb_advantages = advantages[mb_inds][mb_mask]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

                # Detail 8: the clipped surrogate loss.
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()

                # Detail 9: the larger of the value losses with and without clipping.
                v_loss = (newvalue - mb_returns) ** 2
                if args.clip_vloss:
                    change = torch.clamp(newvalue - mb_values, -args.clip_coef, args.clip_coef)
                    v_loss = torch.max(v_loss, (mb_values + change - mb_returns) ** 2)
                v_loss = 0.5 * v_loss.mean()

                # Detail 10: one loss. In place of the entropy bonus, the KL penalty keeps the policy random.
                loss = pg_loss + args.vf_coef * v_loss + args.balance_coef * balance

                optimizer.zero_grad()
                loss.backward()
                world.average_gradients(policy.parameters())
                # Detail 11: the global norm of the gradients is limited.
                grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                optimizer.step()

                # Detail 12: debug variables. Both KL estimators are from http://joschu.net/blog/kl-approx.html.
                with torch.no_grad():
                    old_approx_kl = (-logratio).mean()
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
                    seen = [pg_loss, v_loss, balance, old_approx_kl, approx_kl, clipfrac, grad_norm]
                    minibatch_metrics.append(torch.stack(seen))

        names = ("policy_loss", "value_loss", "balance_loss", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
        means = torch.stack(minibatch_metrics).mean(0).tolist()
        metrics = {f"losses/{name}": value for name, value in zip(names, means, strict=True)}
        metrics["losses/explained_variance"] = float(1 - (returns - values)[mask].var() / returns[mask].var())
        metrics["charts/updates"] = len(minibatch_metrics)
        metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["charts/episodic_return"] = raw.mean().item()
        metrics["charts/episodic_length"] = mask.sum(1).float().mean().item()
        metrics["charts/penalized_score"] = rewards.sum(1).mean().item()
        metrics["charts/ended"] = (responses == END).any(1).float().mean().item()
        metrics["charts/kl_coef"] = kl_coef
        # KL to the reference per response, by three estimators. k1 and k3 are unbiased; k3 has the smaller variance.
        estimators = {"k1": kl, "k2": kl**2 / 2, "k3": (-kl).exp() - 1 + kl}
        metrics |= {f"kl/{name}": (each * mask).sum(1).mean().item() for name, each in estimators.items()}

        if args.kl_target is not None:
            # Adaptive controller of Ziegler et al. (2019). All ranks use the same coefficient.
            error = float(np.clip(world.mean(metrics["kl/k1"]) / args.kl_target - 1, -0.2, 0.2))
            n_tokens = world.mean(float(mask.sum())) * world.size
            kl_coef *= 1 + error * min(n_tokens / args.kl_horizon, 1.0)
        if run.evaluation_due():
            returned, found, _ = evaluate_model(policy.language_model)
            metrics |= {f"eval/{name}": value for name, value in found.items()}
            metrics["eval/mean_return"] = float(np.mean(returned))
        run.log(metrics, reward=metrics["charts/episodic_return"], kl=metrics["kl/k1"], kl_coef=kl_coef)
        scale = [reward_mean, reward_std]
        run.checkpoint(policy=policy, optimizer=optimizer, kl_coef=kl_coef, reward_scale=scale)

    after, after_metrics, tokens = evaluate_model(policy.language_model)
    show("after", tokens)
    run.save_model(language_model=policy.language_model)
    world.close()
    return run.finish(
        after,
        reward=args.reward,
        reference_return=float(np.mean(before)),
        reference_validation_loss=before_metrics["validation_loss"],
        reference=str(file),
        **after_metrics,
    )


if __name__ == "__main__":
    main(train, parse_args(Args, __doc__, ranges=RANGES))
