"""Make the bundled trace ``tiny_moe_domains.npz``, or a longer one: train a small language model on many domains.

    python traces/make_tiny_moe_domains.py
    python traces/make_tiny_moe_domains.py --tokens 2000000 --output tiny_moe_2m.npz

The model is trained on a part of the texts of ``texts.py``, and its routing is recorded on the rest. Training takes
about ten minutes on one core, recording about 30 s per million tokens.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro

from clustergym.common.checkpoints import load_checkpoint, save_checkpoint
from clustergym.traces import TokenTrace
from clustergym.traces.record import record, row_batches
from texts import DOMAINS, DomainText, read_domain
from tiny_moe import END, TinyMoE, TinyMoEConfig, encode

HERE = Path(__file__).resolve().parent
KIND = "tiny-moe-domains"
PRESET = "tiny-moe"
BATCH, LENGTH = 32, 128
"""Sequences and tokens per sequence of a training step."""
SEQUENCE = (48, 128)
"""Shortest and longest recorded sequence."""
_SAVE_EVERY = 100


@dataclass(frozen=True)
class Args:
    tokens: int = 198_000
    """Tokens in the trace, divided evenly among the domains."""
    domains: tuple[str, ...] = DOMAINS
    """Domains of texts."""
    steps: int = 1000
    """Training steps of 4,096 tokens."""
    characters: int = 60_000
    """Characters per domain that the model is trained on."""
    seed: int = 0
    """Seed of texts, weights, batches and sequence lengths."""
    work: Path = Path("runs/tiny_moe_domains")
    """Folder for the model. Repeat the command to resume an interrupted training, or to record more with one model."""
    output: Path = HERE / "tiny_moe_domains.npz"
    """The .npz file to write."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.domains) - set(DOMAINS))
        if unknown:
            raise ValueError(f"unknown text domain {unknown[0]!r}; the domains are: {', '.join(DOMAINS)}")
        for name in ("tokens", "steps", "characters"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: expected more than 0")

    @property
    def tokens_per_domain(self) -> int:
        return max(1, self.tokens // len(self.domains))


def training_tokens(texts: dict[str, DomainText]) -> torch.Tensor:
    """The training text of all domains. Every paragraph ends in END."""
    return torch.tensor([t for text in texts.values() for piece in text.train for t in (*encode(piece), END)])


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over 50 steps, then a cosine to 5 %."""
    return 3e-3 * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(
    tokens: torch.Tensor,
    steps: int,
    seed: int,
    checkpoint: Path,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> TinyMoE:
    """Train a model to predict the next character, resuming from ``checkpoint``."""
    torch.manual_seed(seed)
    model = TinyMoE(TinyMoEConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    done = 0
    if checkpoint.is_file():
        state = load_checkpoint(checkpoint, KIND)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["steps"]
    window = torch.arange(LENGTH + 1)
    while done < steps:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + done)
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=generator)
        batch = tokens[starts + window]
        optimizer.param_groups[0]["lr"] = learning_rate(done, steps)
        activations, balance = model.trunk(batch[:, :-1])
        loss = F.cross_entropy(model.logits(activations).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + 0.003 * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done += 1
        progress(done, loss.item())
        if done % _SAVE_EVERY == 0:
            _save(checkpoint, model, optimizer, done)
    _save(checkpoint, model, optimizer, done)
    return model


def _save(path: Path, model: TinyMoE, optimizer: torch.optim.Optimizer, steps: int) -> None:
    save_checkpoint(path, KIND, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps})


def sequences(pieces: Sequence[str], n_tokens: int, rng: random.Random) -> list[list[int]]:
    """Consecutive sequences of random lengths, at most ``n_tokens`` in total. Every paragraph ends in END."""
    tokens = [token for piece in pieces for token in (*encode(piece), END)][:n_tokens]
    rows, start = [], 0
    while start < len(tokens):
        length = rng.randint(*SEQUENCE)
        rows.append(tokens[start : start + length])
        start += length
    return rows


def model_file(tokens: torch.Tensor, args: Args) -> Path:
    """The checkpoint of the model. Its name has a hash of the training text and its settings."""
    digest = hashlib.sha256(tokens.numpy().tobytes())
    digest.update(f"{args.steps} {args.seed}".encode())
    return args.work / f"tiny_moe-{digest.hexdigest()[:8]}.pt"


def main(args: Args) -> None:
    torch.set_num_threads(1)
    texts = {name: read_domain(name, args.characters, args.tokens_per_domain, args.seed) for name in args.domains}
    tokens = training_tokens(texts)
    args.work.mkdir(parents=True, exist_ok=True)
    model = train(tokens, args.steps, args.seed, model_file(tokens, args), progress=report)
    rng = random.Random(args.seed)
    batches = (
        batch
        for name, text in texts.items()
        for batch in row_batches(sequences(text.recorded, args.tokens_per_domain, rng), name, 64)
    )
    path = record(model, batches, preset=PRESET, name=args.output.stem).save(args.output)
    print(f"{path}: {TokenTrace.load(path)}")


def report(step: int, loss: float) -> None:
    if step % _SAVE_EVERY == 0:
        print(f"step {step}: {loss:.3f} nats per character", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
