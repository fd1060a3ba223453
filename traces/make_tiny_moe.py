"""Make the bundled traces ``tiny_moe.npz`` and ``tiny_moe_ppo.npz``: train a small language model, record its routing.

    python traces/make_tiny_moe.py                  # 15 minutes on one CPU thread; needs the extra "train"

1. Six kinds of text that come with every Python are written to files. A part of each is reserved for recording.
2. ``cleanrl_ppo/ppo_llm.py`` trains a model on the rest and then optimises it with PPO and a KL penalty.
3. The routing of the reference (before PPO) and of the policy (after PPO) is recorded on the reserved text, the same in
   both files, and on text that each model generates (domain ``generated``).

The text depends on the version of Python. The data card names the version of the committed files.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from clustergym.traces import TokenTrace
from clustergym.traces.record import record, row_batches
from clustergym.training import load_checkpoint
from texts import bytecode_text, help_text, html_text, json_text, names_text, source_text
from tiny_moe import END, TinyMoE, TinyMoEConfig, encode

HERE = Path(__file__).resolve().parent
PRESET = "tiny-moe"
CHARACTERS = 300_000  # maximum per kind of text
RESERVED = 0.15  # share of each kind that is reserved for recording
BLOCK = 12  # paragraphs that are reserved together
SEQUENCE = (48, 128)  # shortest and longest sequence of the trace
PROMPT, RESPONSE = 32, 64  # tokens of generated sequences


@dataclass
class Args:
    work: Path = Path("runs/tiny_moe_trace")
    """Folder for the text, the training run and its checkpoints. Repeat the command to resume."""
    output: Path = HERE
    """Folder for the two traces."""
    pretrain_steps: int = 900
    """Pre-training updates."""
    total_timesteps: int = 245_760
    """Response tokens of PPO."""
    tokens: int = 10_000
    """Tokens per domain and trace."""
    seed: int = 1
    """Seed of training, sequence lengths and generated text."""


DOMAINS = {
    "help": help_text,
    "source": source_text,
    "html": html_text,
    "bytecode": bytecode_text,
    "json": json_text,
    "names": names_text,
}


def paragraphs(texts: Iterator[str]) -> list[str]:
    """Distinct paragraphs up to the limit of characters. No paragraph is both trained on and recorded."""
    found: dict[str, None] = {}
    length = 0
    for text in texts:
        for piece in re.split(r"\n\s*\n", text):
            piece = piece.strip("\n")
            if piece.strip() and piece not in found:
                found[piece] = None
                length += len(piece)
        if length >= CHARACTERS:
            break
    return list(found)


def reserve(pieces: list[str], rng: random.Random) -> tuple[list[str], list[str]]:
    """(training, reserved) paragraphs. Blocks of consecutive paragraphs are reserved at random."""
    blocks = [pieces[i : i + BLOCK] for i in range(0, len(pieces), BLOCK)]
    kept = set(rng.sample(range(len(blocks)), max(round(RESERVED * len(blocks)), 1)))
    learn = [piece for i, block in enumerate(blocks) if i not in kept for piece in block]
    return learn, [piece for i in sorted(kept) for piece in blocks[i]]


def sequences(pieces: list[str], n_tokens: int, rng: random.Random) -> list[list[int]]:
    """Cut the text into consecutive sequences of random lengths, ``n_tokens`` in total. Each paragraph ends in END."""
    tokens = [token for piece in pieces for token in [*encode(piece), END]]
    if len(tokens) < n_tokens:
        raise ValueError(f"{len(tokens)} tokens are reserved, but {n_tokens} are to be recorded: lower --tokens")
    rows, start = [], 0
    while start < n_tokens:
        length = min(rng.randint(*SEQUENCE), n_tokens - start)
        rows.append(tokens[start : start + length])
        start += length
    return rows


def generated(model: TinyMoE, rows: dict[str, list[list[int]]], n_tokens: int, seed: int) -> list[list[int]]:
    """Prompts from all domains and the text that the model generates after them, up to the first end token."""
    long = [row for part in rows.values() for row in part if len(row) >= PROMPT]
    prompts = [row[:PROMPT] for row in long if END not in row[:PROMPT]]
    random.Random(seed).shuffle(prompts)
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = []
    for i in range(0, len(prompts), 64):
        part = torch.tensor(prompts[i : i + 64])
        for prompt, response in zip(part.tolist(), model.generate(part, RESPONSE, generator).tolist(), strict=True):
            end = response.index(END) + 1 if END in response else RESPONSE
            found.append((prompt + response[:end])[: n_tokens - sum(map(len, found))])
            if sum(map(len, found)) == n_tokens:
                return found
    raise ValueError(f"{len(prompts)} prompts gave {sum(map(len, found))} tokens, but {n_tokens} are to be recorded")


def load_model(path: Path) -> TinyMoE:
    state = load_checkpoint(path, ("ppo_llm-reference", "ppo_llm-model"))
    sizes = state["args"]
    model = TinyMoE(TinyMoEConfig(n_layers=sizes["layers"], n_experts=sizes["experts"], hidden=sizes["hidden"]))
    model.load_state_dict(state["language_model"])
    return model


def routing(model: TinyMoE, rows: dict[str, list[list[int]]], args: Args, name: str) -> TokenTrace:
    parts = rows | {"generated": generated(model, rows, args.tokens, args.seed)}
    every = (batch for domain, part in parts.items() for batch in row_batches(part, domain, 32))
    return record(model, every, preset=PRESET, name=name)


def train(args: Args, files: list[Path], run: Path) -> None:
    """Run pre-training and PPO in a subprocess. Resumes an interrupted run."""
    trainer = HERE.parent / "cleanrl_ppo" / "ppo_llm.py"
    flags = {"seed": args.seed, "pretrain-steps": args.pretrain_steps, "run-dir": run}
    flags["total-timesteps"] = args.total_timesteps
    options = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, str(trainer), *options, "--resume", "--save-model", "--text", *map(str, files)]
    subprocess.run(command, check=True)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    files, rows = [], {}
    for domain, texts in DOMAINS.items():
        learn, reserved = reserve(paragraphs(texts()), rng)
        file = args.work / f"{domain}.txt"
        file.write_text("\n\n".join(learn), encoding="utf-8")
        files.append(file)
        rows[domain] = sequences(reserved, args.tokens, rng)
        print(
            f"{domain}: {file.stat().st_size:,} bytes for training, {sum(map(len, reserved)):,} characters reserved",
            flush=True,
        )
    run = args.work / "run"
    if not (run / "model.pt").exists():
        train(args, files, run)
    for name, file in (("tiny_moe", "reference.pt"), ("tiny_moe_ppo", "model.pt")):
        path = routing(load_model(run / file), rows, args, name).save(args.output / f"{name}.npz")
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB, {TokenTrace.load(path)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
