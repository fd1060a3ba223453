"""Make the bundled traces ``tiny_moe.npz`` and ``tiny_moe_ppo.npz``: train a small language model, record its routing.

    python traces/make_tiny_moe.py                  # a quarter of an hour on one CPU thread; needs the extra "train"

1. Six kinds of text that every Python carries are written to files; a part of each is reserved for recording.
2. ``cleanrl_ppo/ppo_llm.py`` learns the rest from scratch and then optimises the model by PPO with a KL penalty.
3. The routing of the reference (before PPO) and of the policy (after) is recorded on the reserved text, token for token the same
   in both files, and on what each model writes itself (domain ``generated``).

The text depends on the version of Python; the data card names the one that made the committed files.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import json
import pydoc
import random
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

import torch
import tyro

from clustergym.traces import TokenTrace
from clustergym.traces.record import record, row_batches
from clustergym.traces.tiny_moe import END, TinyMoE, TinyMoEConfig, encode
from clustergym.training import load_checkpoint

HERE = Path(__file__).resolve().parent
PRESET = "tiny-moe"
# Modules of the standard library whose source, documentation and bytecode are read: pure Python, importable everywhere.
MODULES = (
    "argparse", "ast", "base64", "bisect", "calendar", "cmd", "code", "codecs", "collections", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "datetime", "difflib", "dis", "doctest", "email.message", "enum",
    "fileinput", "fractions", "functools", "gettext", "glob", "gzip", "heapq", "html.parser", "http.client",
    "http.cookies", "imaplib", "inspect", "ipaddress", "json.decoder", "json.encoder", "locale", "logging", "mailbox",
    "mimetypes", "optparse", "os", "pathlib", "pdb", "pickle", "pkgutil", "platform", "plistlib", "poplib", "pprint",
    "pydoc", "queue", "random", "sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket",
    "socketserver", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading",
    "timeit", "tokenize", "trace", "traceback", "types", "typing", "unittest.case", "urllib.parse", "urllib.request",
    "uuid", "warnings", "weakref", "zipfile",
)  # fmt: skip
CHARACTERS = 300_000  # of each kind of text, at most
RESERVED = 0.15  # share of each kind that is kept for recording
BLOCK = 12  # paragraphs that are reserved together
SEQUENCE = (48, 128)  # shortest and longest sequence of the trace
PROMPT, RESPONSE = 32, 64  # of the sequences that a model writes itself


@dataclass
class Args:
    work: Path = Path("runs/tiny_moe_trace")
    """Folder for the text, the training run and its checkpoints; the same command again goes on where it was interrupted."""
    output: Path = HERE
    """Folder that the two traces are written to."""
    pretrain_steps: int = 900
    """Updates of pre-training."""
    iterations: int = 40
    """Iterations of PPO."""
    tokens: int = 10_000
    """Tokens of each domain in a trace."""
    seed: int = 1
    """Of training, of the cut into sequences, and of what the models write."""


def modules() -> list[ModuleType]:
    return [importlib.import_module(name) for name in MODULES]


def tidy(text: str) -> str:
    """Without addresses in memory and places on this disk, which differ between two runs."""
    text = re.sub(r"<a href=\"file:[^>]*>[^<]*</a>", "", text)
    text = re.sub(r", file \"[^\"]*\"", "", text)
    return re.sub(r"\b0x[0-9a-f]{6,}\b", "0x0", text)


def help_text() -> Iterator[str]:
    """English: the topics of Python's built-in help."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))


def source_text() -> Iterator[str]:
    """Programs: the source of modules."""
    yield from (inspect.getsource(module) for module in modules())


def html_text() -> Iterator[str]:
    """Mark-up: the documentation of modules as pydoc writes it, a line a paragraph."""
    for module in modules():
        yield "\n\n".join(tidy(pydoc.HTMLDoc().docmodule(module)).splitlines())


def bytecode_text() -> Iterator[str]:
    """Listings: the bytecode of functions."""
    for module in modules():
        for _, function in inspect.getmembers(module, lambda f: isinstance(f, FunctionType)):
            yield tidy(dis.Bytecode(function).dis())


def json_text() -> Iterator[str]:
    """Data: signatures and defaults of the functions of modules as JSON."""
    for module in modules():
        for name, function in inspect.getmembers(module, inspect.isfunction):
            parameters = {p.name: tidy(str(p)) for p in inspect.signature(function).parameters.values()}
            about = {"module": module.__name__, "function": name, "line": function.__code__.co_firstlineno}
            sizes = {"stack": function.__code__.co_stacksize, "names": list(function.__code__.co_names)}
            yield json.dumps(about | {"parameters": parameters} | sizes, indent=2)


def names_text() -> Iterator[str]:
    """Tables: numbers, categories and names of characters, sixteen rows a paragraph."""
    rows = [
        f"{point:06X};{unicodedata.category(chr(point))};{unicodedata.name(chr(point))};{point};{unicodedata.bidirectional(chr(point))}"
        for point in range(0x20, 0x3000)
        if unicodedata.name(chr(point), "")
    ]
    yield from ("\n".join(rows[i : i + 16]) for i in range(0, len(rows), 16))


DOMAINS = {
    "help": help_text,
    "source": source_text,
    "html": html_text,
    "bytecode": bytecode_text,
    "json": json_text,
    "names": names_text,
}


def paragraphs(texts: Iterator[str]) -> list[str]:
    """Distinct paragraphs, up to the limit of characters: what is recorded must not have been trained on."""
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
    """(to learn, reserved) paragraphs: blocks of consecutive ones are dealt at random."""
    blocks = [pieces[i : i + BLOCK] for i in range(0, len(pieces), BLOCK)]
    kept = set(rng.sample(range(len(blocks)), max(round(RESERVED * len(blocks)), 1)))
    learn = [piece for i, block in enumerate(blocks) if i not in kept for piece in block]
    return learn, [piece for i in sorted(kept) for piece in blocks[i]]


def sequences(pieces: list[str], n_tokens: int, rng: random.Random) -> list[list[int]]:
    """Consecutive pieces of the text with lengths between the limits, ``n_tokens`` in all; each paragraph ends in END."""
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
    """What the model writes after prompts from all domains, prompt included, each up to its first end token."""
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
    state = load_checkpoint(path, "ppo_llm-reference")
    model = TinyMoE(TinyMoEConfig(**state["model"]))
    model.load_state_dict(state["weights"])
    return model


def routing(model: TinyMoE, rows: dict[str, list[list[int]]], args: Args, name: str) -> TokenTrace:
    parts = rows | {"generated": generated(model, rows, args.tokens, args.seed)}
    every = (batch for domain, part in parts.items() for batch in row_batches(part, domain, 32))
    return record(model, every, preset=PRESET, name=name)


def train(args: Args, files: list[Path], run: Path) -> None:
    """Pre-training and PPO in a process of their own; what was interrupted goes on."""
    trainer = HERE.parent / "cleanrl_ppo" / "ppo_llm.py"
    flags = {"seed": args.seed, "pretrain-steps": args.pretrain_steps, "iterations": args.iterations, "run-dir": run}
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
            f"{domain}: {file.stat().st_size:,} bytes to learn, {sum(map(len, reserved)):,} characters reserved",
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
