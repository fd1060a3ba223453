"""Record millions of tokens of the small language model over many text domains (``clustergym trace tiny-moe``).

A :class:`~clustergym.traces.tiny_moe.TinyMoE` is trained on a part of the texts of :mod:`clustergym.traces.texts`, and
its routing is recorded on the rest. The model and the traces are kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from clustergym.common.cache import cache_folder
from clustergym.common.checkpoints import load_checkpoint, save_checkpoint
from clustergym.traces.record import record, row_batches
from clustergym.traces.texts import DOMAINS, DomainText, read_domain
from clustergym.traces.tiny_moe import END, TinyMoE, TinyMoEConfig, encode
from clustergym.traces.token_trace import TokenTrace

KIND = "tiny-moe-domains"
PRESET = "tiny-moe"
BATCH, LENGTH = 32, 128
"""Sequences and tokens per sequence of a training step."""
SEQUENCE = (48, 128)
"""Shortest and longest recorded sequence."""
_SAVE_EVERY = 100


@dataclass(frozen=True)
class Recording:
    """What is trained and recorded."""

    tokens: int = 2_000_000
    """Tokens in the trace, divided evenly among the domains."""
    domains: Sequence[str] = field(default=DOMAINS)
    """Domains of texts."""
    steps: int = 1000
    """Training steps of 4,096 tokens."""
    minutes: float = 30.0
    """Maximum time for training. Then the model is used as it is, and the name of the trace says after how many
    steps."""
    characters: int = 60_000
    """Characters per domain that the model is trained on."""
    seed: int = 0
    """Seed of texts, weights, batches and sequence lengths."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.domains) - set(DOMAINS))
        if unknown:
            raise ValueError(f"unknown text domain {unknown[0]!r}; the domains are: {', '.join(DOMAINS)}")
        for name in ("tokens", "steps", "characters", "minutes"):
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
    minutes: float,
    seed: int,
    checkpoint: Path,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[TinyMoE, int]:
    """Train a model to predict the next character, resuming from ``checkpoint``. Returns it and the steps done."""
    torch.manual_seed(seed)
    model = TinyMoE(TinyMoEConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    done = 0
    if checkpoint.is_file():
        state = load_checkpoint(checkpoint, KIND)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["steps"]
    until, window = time.monotonic() + 60 * minutes, torch.arange(LENGTH + 1)
    while done < steps and time.monotonic() < until:
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
    return model, done


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


def make_trace(
    recording: Recording,
    folder: Path | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Path:
    """The file of the trace. It is made if the cache does not have it; an interrupted training is resumed.

    The name of the file has the number of tokens, and a hash of the training text and its settings.
    """
    folder = cache_folder() if folder is None else folder
    texts = {
        name: read_domain(name, recording.characters, recording.tokens_per_domain, recording.seed)
        for name in recording.domains
    }
    tokens = training_tokens(texts)
    digest = hashlib.sha256(tokens.numpy().tobytes())
    digest.update(f"{recording.steps} {recording.seed}".encode())
    key = digest.hexdigest()[:8]
    (folder / "models").mkdir(parents=True, exist_ok=True)
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    model, done = train(
        tokens, recording.steps, recording.minutes, recording.seed, folder / "models" / f"tiny_moe-{key}.pt", on_step
    )
    steps = "" if done == recording.steps else f"-{done}steps"
    path = folder / "traces" / f"tiny_moe_{recording.tokens}-{key}{steps}.npz"
    if not path.is_file():
        rng = random.Random(recording.seed)
        batches = (
            batch
            for name, text in texts.items()
            for batch in row_batches(sequences(text.recorded, recording.tokens_per_domain, rng), name, 64)
        )
        record(model, batches, preset=PRESET, name=path.stem, on_batch=on_tokens).save(path)
    return path


def describe(path: Path) -> str:
    """Tokens of each domain of a recorded trace, in one line."""
    trace = TokenTrace.load(path)
    counts = {name: int(trace.seq_lens[trace.domains == name].sum()) for name in trace.domain_names}
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
