"""Make the bundled trace ``tiny_decode.npz``: train a small mixture-of-experts model, let it write, record its routing.

    python traces/make_tiny_decode.py               # needs the extra "record" (its tokenizers library)

1. Documents of many domains (``texts.py``) are divided by content: most train the model, the others give prompts.
2. A byte-level BPE vocabulary and a TinyMoE with 12 layers of 32 experts are trained, on one CPU thread.
3. The model continues prompts, token by token with a key-value cache. The experts of generated tokens are recorded.
   Repetitive answers and repeated openings are dropped.
4. Every document belongs to one split. Some domains occur in the split ``new-domain`` only.

Training resumes from the last checkpoint. The same seed and the same versions of Python and of the packages give the
same file. The texts depend on these versions; ``traces/README.md`` names those of the committed file.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from clustergym.common.checkpoints import load_checkpoint, save_checkpoint
from clustergym.traces import TokenTrace, split_trace
from clustergym.traces.arrays import write_trace
from clustergym.traces.record import tapped
from texts import DOMAINS, FILES, domain_texts
from tiny_moe import END, Cache, TinyMoE, TinyMoEConfig

HERE = Path(__file__).resolve().parent
KIND = "tiny-decode"
CONFIG = TinyMoEConfig(n_layers=12, n_experts=32, top_k=4, hidden=64, intermediate=32, n_heads=2, context=320)
VOCABULARY = 1024
NEW_DOMAINS = ("readmes", "headers", "html", "yaml", "lisp", "chess")
"""Domains of the split ``new-domain``. The model was trained on them, as a large model was on everything."""
SPLITS = {"train": 0.65, "validation": 0.1, "test": 0.25}
"""Shares of the tokens of every other domain."""
BATCH, LENGTH = 8, 256
"""Sequences and tokens per sequence of a training step."""
PROMPTS = (16, 24, 32, 48, 64)
"""Lengths of prompts."""
ANSWER = (64, 256)
"""Shortest and longest answer. The end token may end it earlier, but not before the shortest."""
OPENING = 16
"""No two prompts begin with the same tokens."""
DISTINCT = 0.5
"""Least share of distinct 4-grams in an answer. A lower share means that the answer repeats itself."""
TEMPERATURE = 0.8
DOCUMENTS = 40
"""Documents per domain that give prompts, or all that there are."""
SPARE = 1.6
"""Prompts for every answer that is needed, because some answers are dropped."""
SAVE_EVERY = 50


@dataclass
class Args:
    work: Path = Path("runs/tiny_decode")
    """Folder for the checkpoint of the training."""
    output: Path = HERE / "tiny_decode.npz"
    """The file to write."""
    steps: int = 700
    """Training steps of 2,048 tokens."""
    tokens: int = 160_000
    """Tokens in the trace, divided evenly among the domains."""
    characters: int = 400_000
    """Maximum number of characters per domain that the model is trained on."""
    balance: float = 0.003
    """Coefficient of the load-balancing loss."""
    seed: int = 0
    """Seed for the documents, weights, batches and answers."""


def documents(domain: str, seed: int) -> Iterator[list[str]]:
    """Documents of a domain as lists of paragraphs. A paragraph that occurred before is left out."""
    rng = random.Random(f"{domain} {seed}")
    seen: set[str] = set()
    source = domain_texts(domain, rng)
    for text in source:
        if domain not in FILES:  # generated texts are short: several make one document
            text = "\n\n".join([text, *(next(source) for _ in range(rng.randrange(3, 8)))])
        pieces = [piece.strip("\n") for piece in re.split(r"\n\s*\n", text)]
        fresh = [piece for piece in dict.fromkeys(pieces) if piece.strip() and piece not in seen]
        seen.update(fresh)
        if fresh:
            yield fresh


def read_documents(domain: str, characters: int, seed: int) -> tuple[list[str], list[str]]:
    """(texts to train on, documents to take prompts from). The content of a document decides: 4 of 5 are trained on."""
    learn: list[str] = []
    reserved: list[str] = []
    size = 0
    for pieces in documents(domain, seed):
        text = "\n\n".join(pieces)
        if zlib.crc32(text.encode()) % 5 == 0:
            reserved.append(text)
        elif size < characters:
            learn.append(text)
            size += len(text)
        if size >= characters and len(reserved) >= DOCUMENTS:
            break
    return learn, reserved[:DOCUMENTS]


def train_vocabulary(texts: list[str]) -> Tokenizer:
    """Byte-level BPE whose token 0 is the end of a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=sorted(alphabet))
    )
    return tokenizer


def train(tokens: torch.Tensor, args: Args, checkpoint: Path) -> TinyMoE:
    """Train the model to predict the next token, resuming from ``checkpoint``."""
    torch.manual_seed(args.seed)
    model = TinyMoE(CONFIG, VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    done, started = 0, time.process_time()
    if checkpoint.is_file():
        state = load_checkpoint(checkpoint, KIND)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["steps"]
    window, mean = torch.arange(LENGTH + 1), 0.0
    while done < args.steps:
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + done)
        batch = tokens[torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=generator) + window]
        warm, left = min(1.0, (done + 1) / 50), 0.5 + 0.5 * math.cos(math.pi * done / args.steps)
        optimizer.param_groups[0]["lr"] = 3e-3 * warm * (0.05 + 0.95 * left)
        activations, balance = model.trunk(batch[:, :-1])
        loss = F.cross_entropy(model.logits(activations).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + args.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done += 1
        mean += loss.item() / SAVE_EVERY
        if done % SAVE_EVERY == 0 or done == args.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": done}
            save_checkpoint(checkpoint, KIND, state)
            print(
                f"step {done}: {mean:.3f} nats per token, balance {balance:.2f}, "
                f"{time.process_time() - started:.0f} s of CPU",
                flush=True,
            )
            mean = 0.0
    return model


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    domain: str
    document: int
    limit: int
    """Maximum length of the answer."""


def make_prompts(reserved: dict[str, list[str]], tokenizer: Tokenizer, per_domain: int, seed: int) -> list[Prompt]:
    """Prompts that begin at random lines of the documents. No two have the same opening.

    The prompts of a domain take turns: one of every document, then a second one of every document.
    """
    rng = random.Random(seed)
    openings: set[tuple[int, ...]] = set()
    found: list[Prompt] = []
    first = 0  # number of the first document of the domain
    for domain, texts in reserved.items():
        starts = [[0, *(m.end() for m in re.finditer(r"\n+", text[:-1]))] for text in texts]
        for lines in starts:
            rng.shuffle(lines)
        wanted = len(found) + per_domain
        while len(found) < wanted and any(starts):
            for document, (text, lines) in enumerate(zip(texts, starts, strict=True), first):
                length = rng.choice(PROMPTS)
                while lines and len(found) < wanted:
                    start = lines.pop()
                    tokens = tokenizer.encode(text[start : start + 12 * length]).ids[:length]
                    opening = tuple(tokens[:OPENING])
                    if len(tokens) == length and opening not in openings:
                        openings.add(opening)
                        found.append(Prompt(tokens, domain, document, rng.randint(*ANSWER)))
                        break
        first += len(texts)
    return found


@dataclass(frozen=True)
class Answer:
    prompt: Prompt
    experts: npt.NDArray[np.uint8]
    """(tokens, L, K), ids sorted."""


@torch.no_grad()
def answer(
    model: TinyMoE, prompts: torch.Tensor, limit: int, generator: torch.Generator
) -> tuple[torch.Tensor, npt.NDArray[np.uint8]]:
    """Sampled answers (B, T) to prompts (B, P) of one length, and the experts (B, T, L, K) of the generated tokens.

    The experts of a token are those of the forward pass that has it as its input, as in a serving engine.
    """
    cache = Cache(model.config, len(prompts), prompts.shape[1] + limit, model.embedding)
    tokens, experts = [], []
    activations = model.trunk(prompts, cache)[0]
    with tapped(model) as taps:
        for _ in range(limit):
            scores = model.logits(activations[:, -1]) / TEMPERATURE
            token = torch.multinomial(scores.softmax(-1), 1, generator=generator)
            for tap in taps:
                tap.chosen.clear()
            activations = model.trunk(token, cache)[0]
            tokens.append(token)
            experts.append(torch.stack([tap.chosen[0] for tap in taps], 1).to(torch.uint8))
    return torch.cat(tokens, 1), torch.stack(experts, 1).numpy()


def distinct_share(tokens: list[int], n: int = 4) -> float:
    """Share of the n-grams of a sequence that are distinct."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / max(len(grams), 1)


def record_answers(model: TinyMoE, prompts: list[Prompt], seed: int, batch: int = 512) -> list[Answer]:
    """Answers that are neither too short nor repetitive, in the order of the prompts."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, Answer] = {}
    dropped = {"short": 0, "repetitive": 0}
    for length in PROMPTS:  # prompts of one length are continued together
        rows = sorted((i for i, p in enumerate(prompts) if len(p.tokens) == length), key=lambda i: prompts[i].limit)
        for part in (rows[i : i + batch] for i in range(0, len(rows), batch)):
            limit = max(prompts[i].limit for i in part)
            tokens, experts = answer(model, torch.tensor([prompts[i].tokens for i in part]), limit, generator)
            for i, written, routed in zip(part, tokens.tolist(), experts, strict=True):
                end = written.index(END) if END in written else limit
                written = written[: min(end, prompts[i].limit)]
                if len(written) < ANSWER[0]:
                    dropped["short"] += 1
                elif distinct_share(written) < DISTINCT:
                    dropped["repetitive"] += 1
                else:
                    # Sorted, because the order of the choice does not matter and sorted ids compress better.
                    found[i] = Answer(prompts[i], np.sort(routed[: len(written)], axis=2))
    print(f"{len(prompts)} prompts, {len(found)} answers kept, dropped: {dropped}", flush=True)
    return [found[i] for i in sorted(found)]


def choose(answers: list[Answer], tokens_per_domain: int) -> list[Answer]:
    """The first answers of every domain that have so many tokens, without answers whose routing begins alike."""
    sizes: dict[str, int] = {}
    seen: set[bytes] = set()
    chosen = []
    for each in answers:
        domain, opening = each.prompt.domain, each.experts[:OPENING].tobytes()
        if sizes.get(domain, 0) < tokens_per_domain and opening not in seen:
            seen.add(opening)
            chosen.append(each)
            sizes[domain] = sizes.get(domain, 0) + len(each.experts)
    return chosen


def deal_splits(answers: list[Answer], seed: int) -> list[str]:
    """The split of each answer. All answers to prompts of one document are in the same split.

    In every domain, the documents are dealt in random order, each to the split that lacks most.
    """
    rng = random.Random(seed)
    sizes: dict[tuple[str, int], int] = {}
    for each in answers:
        key = (each.prompt.domain, each.prompt.document)
        sizes[key] = sizes.get(key, 0) + len(each.experts)
    split: dict[tuple[str, int], str] = {}
    for domain in sorted({domain for domain, _ in sizes}):
        if domain in NEW_DOMAINS:
            split |= {key: "new-domain" for key in sizes if key[0] == domain}
            continue
        filled = dict.fromkeys(SPLITS, 0.0)
        keys = [key for key in sizes if key[0] == domain]
        for key in rng.sample(keys, len(keys)):
            split[key] = min(SPLITS, key=lambda name: filled[name] / SPLITS[name])
            filled[split[key]] += sizes[key]
    return [split[each.prompt.domain, each.prompt.document] for each in answers]


def save(answers: list[Answer], splits: list[str], path: Path) -> TokenTrace:
    """Write the trace, with two arrays more than a TokenTrace has: the document and a hash of the opening."""
    prompts = [each.prompt for each in answers]
    trace = TokenTrace(
        np.concatenate([each.experts for each in answers]),
        n_experts=CONFIG.n_experts,
        seq_lens=np.array([len(each.experts) for each in answers]),
        domains=np.array([p.domain for p in prompts]),
        prompt_lens=np.array([len(p.tokens) for p in prompts]),
        splits=np.array(splits),
        name=path.stem,
    )
    openings = [zlib.crc32(np.array(p.tokens[:OPENING], np.int32).tobytes()) for p in prompts]
    own = {
        "documents": np.array([p.document for p in prompts], np.int32),
        "openings": np.array(openings, np.uint32),
    }
    write_trace(path, trace.arrays() | own)
    return trace


def main(args: Args) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)
    read = {domain: read_documents(domain, args.characters, args.seed) for domain in DOMAINS}
    learn = [text for texts, _ in read.values() for text in texts]
    tokenizer = train_vocabulary(learn)
    tokens = torch.tensor([t for encoded in tokenizer.encode_batch(learn) for t in (*encoded.ids, END)])
    print(f"{len(learn)} documents, {sum(map(len, learn)):,} characters, {len(tokens):,} tokens", flush=True)
    key = hashlib.sha256(tokens.numpy().tobytes() + f"{CONFIG} {args.steps} {args.balance} {args.seed}".encode())
    args.work.mkdir(parents=True, exist_ok=True)
    model = train(tokens, args, args.work / f"model-{key.hexdigest()[:8]}.pt")
    share = args.tokens // len(DOMAINS)
    reserved = {domain: texts for domain, (_, texts) in read.items()}
    prompts = make_prompts(reserved, tokenizer, round(SPARE * share / np.mean(ANSWER)), args.seed)
    answers = choose(record_answers(model, prompts, args.seed), share)
    splits = deal_splits(answers, args.seed)
    trace = save(answers, splits, args.output)
    for name in sorted(set(splits)):
        part = split_trace(trace, name)
        print(f"{name}: {part.n_tokens:,} tokens in {part.n_sequences} sequences of {len(part.domain_names)} domains")
    size = args.output.stat().st_size / 1e6
    print(f"{args.output}: {size:.2f} MB, {trace}\n{time.process_time():.0f} s of CPU in all", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
