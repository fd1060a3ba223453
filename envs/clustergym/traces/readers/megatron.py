"""Megatron-LM: ``--moe-routing-trace-path`` writes ``router_trace_rank*.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clustergym.traces.readers.base import Ids, ReadOptions, expand, lines_of, parse_json, parse_naturals
from clustergym.traces.token_trace import TokenTrace

_FIELD = b'"top_indices"'


@dataclass
class _Line:
    """The routing of one layer in one forward pass of one rank."""

    step: int
    rank: int
    layer: int
    n_tokens: int
    top_k: int
    indices: bytes
    """The nested list of expert ids, not parsed yet."""


def read(paths: Sequence[Path], options: ReadOptions) -> TokenTrace:
    """Read the files twice: first to find the size of the trace, then to fill it. Keeps one line in memory."""
    files = expand(paths, "router_trace_rank*.jsonl")
    # A forward pass is (step, rank, micro-batch). The micro-batch is the number of earlier lines of the same layer.
    passes: dict[tuple[int, int, int], int] = {}
    widths: set[int] = set()
    layers: dict[int, None] = {}
    filled: set[tuple[int, int, int, int]] = set()
    for path, number, line, nth in _lines(files):
        key = (line.step, line.rank, nth)
        if passes.setdefault(key, line.n_tokens) != line.n_tokens:
            raise ValueError(
                f"{path}, line {number}: {line.n_tokens} tokens in layer {line.layer} of step {line.step}, "
                f"rank {line.rank}, but {passes[key]} in another layer"
            )
        widths.add(line.top_k)
        layers[line.layer] = None
        filled.add((*key, line.layer))
    widths.discard(0)  # a forward pass without tokens
    if not widths:
        raise ValueError("no routed tokens in the files: nothing to import")
    top_k = options.expected_top_k
    if len(widths) > 1 or (top_k and widths != {top_k}):
        expected = f", expected {top_k}" if top_k else ": import one model at a time"
        raise ValueError(f"the files have top-k {sorted(widths)}{expected}")
    ordered = sorted(layers)
    for key in passes:
        for layer in ordered:
            if (*key, layer) not in filled:
                step, rank, _ = key
                raise ValueError(f"step {step}, rank {rank} has no line for layer {layer}: is a file truncated?")
    options.check_layer_count(len(ordered))
    order = sorted(passes)
    starts = dict(zip(order, np.cumsum([0] + [passes[k] for k in order[:-1]]).tolist(), strict=True))
    experts = np.empty((sum(passes.values()), len(ordered), widths.pop()), np.int16)
    column = {layer: i for i, layer in enumerate(ordered)}
    for path, number, line, nth in _lines(files):
        start = starts[line.step, line.rank, nth]
        if line.n_tokens:
            ids = _parse(line, f"{path}, line {number}")
            experts[start : start + line.n_tokens, column[line.layer]] = ids
    experts.setflags(write=False)
    return TokenTrace(
        experts,
        n_experts=options.expected_experts,
        layer_ids=np.array(ordered),
        seq_lens=np.array([passes[k] for k in order if passes[k]]),
        model=options.model_name,
        name=options.name,
    )


def _lines(files: Sequence[Path]) -> Iterator[tuple[Path, int, _Line, int]]:
    """(file, line number, line, number of earlier lines with the same step, rank and layer)."""
    seen: dict[tuple[int, int, int], int] = {}
    for path in files:
        for number, text in lines_of(path):
            line = _parse_line(text, f"{path}, line {number}")
            if line is not None:
                key = (line.step, line.rank, line.layer)
                seen[key] = seen.get(key, -1) + 1
                yield path, number, line, seen[key]


def _parse_line(text: bytes, where: str) -> _Line | None:
    """Parse a line, except for its long list of ids. None for lines of other stages than ``pre_dispatch``."""
    at = text.find(_FIELD)
    begin, end = text.find(b"[", at), text.rfind(b"]") + 1
    if at < 0 or begin < 0 or end <= begin:
        raise ValueError(f"{where}: no list 'top_indices': expected a router trace of Megatron, found {text[:60]!r}")
    fields = parse_json(text[:begin] + b"0" + text[end:], where)
    if not isinstance(fields, dict) or fields.get("top_indices") != 0:
        raise ValueError(f"{where}: expected an object with the list 'top_indices'")
    if fields.get("stage") != "pre_dispatch":
        return None
    numbers: dict[str, int] = {}
    for key in ("step", "rank", "layer", "num_tokens", "topk"):
        value = fields.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{where}: {key} is {value!r}: expected an integer of at least 0")
        numbers[key] = value
    indices = text[begin:end].translate(None, b" \t")
    # The result is allocated by num_tokens, so it must match the number of rows in the text.
    rows = indices.count(b"[") - 1
    if rows != numbers["num_tokens"]:
        raise ValueError(f"{where}: num_tokens is {numbers['num_tokens']}, but top_indices has {rows} rows")
    return _Line(numbers["step"], numbers["rank"], numbers["layer"], rows, numbers["topk"] if rows else 0, indices)


def _parse(line: _Line, where: str) -> Ids:
    skeleton = b"[" + b",".join([b"[" + b"," * (line.top_k - 1) + b"]"] * line.n_tokens) + b"]"
    if line.indices.translate(None, b"0123456789") != skeleton:
        raise ValueError(f"{where}: top_indices is not {line.n_tokens} rows of {line.top_k} expert ids")
    values = parse_naturals(line.indices, where)
    if len(values) != line.n_tokens * line.top_k:
        raise ValueError(f"{where}: top_indices has {len(values)} ids: expected {line.n_tokens} × {line.top_k}")
    return values.astype(np.int16).reshape(line.n_tokens, line.top_k)
