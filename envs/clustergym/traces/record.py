"""Record token traces from a PyTorch model: Hugging Face Transformers, or the small model of ``traces/tiny_moe.py``.

A forward hook on every router (a module whose class name ends in ``TopKRouter``, ``TopkRouter`` or ``TopKGating``)
reads the integer tensor in its output: the chosen experts. The top-k of the logits would be wrong for models that
choose by other values, such as DeepSeek-V3 with its correction bias and its groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from clustergym.traces.token_trace import TokenTrace

ROUTER_CLASSES = ("TopKRouter", "TopkRouter", "TopKGating")


@dataclass
class RouterTap:
    """Forward hook of one router. Keeps the experts that it chose in the current forward pass."""

    path: str
    """Name of the module in the model, such as ``model.layers.3.mlp.gate``."""
    layer: int
    """Global index of its layer: the first number in the path."""
    n_experts: int = 0
    chosen: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [each for each in (output if isinstance(output, tuple | list) else [output]) if _is_matrix(each)]
        integers = [each for each in tensors if not each.is_floating_point() and each.dtype != torch.bool]
        if len(integers) != 1:
            found = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in tensors) or "none"
            raise ValueError(
                f"router {self.path} ({type(module).__name__}) gave {len(integers)} two-dimensional integer outputs, "
                f"expected one with the chosen experts (tokens, top-k); its two-dimensional outputs: {found}"
            )
        scores = [each.shape[1] for each in tensors if each.is_floating_point()]
        self.n_experts = int(getattr(module, "num_experts", 0) or max(scores, default=0))
        self.chosen.append(integers[0].detach().to("cpu", torch.int16))


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """The routers of a model by module name, in the order of their layers.

    Raises:
        ValueError: there is no router, or a layer has several.
    """
    found = {path: module for path, module in model.named_modules() if type(module).__name__.endswith(ROUTER_CLASSES)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no router to record: no class name of a module ends in "
            f"{', '.join(ROUTER_CLASSES)} (is it a mixture-of-experts model?)"
        )
    layers = {path: _layer_of(path, ordinal) for ordinal, path in enumerate(found)}
    for layer in layers.values():
        paths = [path for path, other in layers.items() if other == layer]
        if len(paths) > 1:
            raise ValueError(
                f"{type(model).__name__} has {len(paths)} routers in layer {layer} ({', '.join(paths)}): pass the part "
                "of the model to record, such as model.language_model"
            )
    return {path: found[path] for path in sorted(found, key=layers.__getitem__)}


def _layer_of(path: str, ordinal: int) -> int:
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(number[1]) if number else ordinal


@contextmanager
def tapped(model: nn.Module) -> Iterator[list[RouterTap]]:
    """Context in which every router has a hook and the model is in evaluation mode."""
    taps, handles = [], []
    was_training = model.training
    model.eval()
    try:
        for ordinal, (path, router) in enumerate(find_routers(model).items()):
            tap = RouterTap(path, _layer_of(path, ordinal))
            taps.append(tap)
            handles.append(router.register_forward_hook(tap))
        yield taps
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)


@torch.no_grad()
def record(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    max_tokens: int | None = None,
    preset: str | None = None,
    name: str = "recorded",
    on_batch: Callable[[int], None] | None = None,
) -> TokenTrace:
    """Run the batches through the model and return which experts every token used.

    Args:
        model: a Transformers model (``AutoModel`` is enough: the output head is not needed), or any module with similar
            routers. It is called with ``input_ids`` and ``attention_mask``.
        batches: mappings with ``input_ids`` (B, T) and, if rows are padded, ``attention_mask`` (B, T), as a tokenizer
            returns them. ``domains`` may give one label per row. Each row becomes a sequence of the trace, without its
            padding on either side.
        max_tokens: stop after this number of tokens. The last sequence is cut to fit.
        preset: name of the model preset to write into the trace.
        name: name of the trace, for messages.
        on_batch: called after each batch with the number of tokens recorded so far.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: expected at least 1")
    blocks: list[npt.NDArray[np.int16]] = []
    seq_lens: list[int] = []
    domains: list[str] = []
    n_experts: list[int] = []
    device = next(model.parameters()).device
    with tapped(model) as taps:
        layer_ids = [tap.layer for tap in taps]
        for number, batch in enumerate(batches):
            ids, mask, labels = _checked_batch(batch, number)
            for tap in taps:
                tap.chosen.clear()
            model(input_ids=ids.to(device), attention_mask=mask.to(device).long(), use_cache=False)
            experts = _stack(taps, ids.numel())
            # The rows of a router output are the flattened batch, including padding.
            experts = experts[mask.flatten().numpy()]
            lengths = mask.sum(1).tolist()
            room = len(experts) if max_tokens is None else max_tokens - sum(seq_lens)
            blocks.append(experts[:room])
            for length, label in zip(lengths, labels, strict=True):
                kept = min(length, room)
                room -= kept
                if kept:
                    seq_lens.append(kept)
                    domains.append(label)
            n_experts = [tap.n_experts for tap in taps]
            if on_batch is not None:
                on_batch(sum(seq_lens))
            if max_tokens is not None and sum(seq_lens) >= max_tokens:
                break
    if not seq_lens:
        raise ValueError("nothing was recorded: the batches contain no tokens")
    if len(set(n_experts)) > 1:
        raise ValueError(f"the layers have different numbers of experts ({n_experts}): a trace needs the same in all")
    width = max(block.shape[2] for block in blocks)
    padded = [np.pad(b, ((0, 0), (0, 0), (0, width - b.shape[2])), constant_values=-1) for b in blocks]
    return TokenTrace(
        np.concatenate(padded),
        n_experts=n_experts[0],
        layer_ids=np.array(layer_ids),
        seq_lens=np.array(seq_lens),
        domains=np.array(domains),
        model=preset,
        name=name,
    )


def text_batches(
    token_ids: Mapping[str, Sequence[int]], sequence_length: int, batch_size: int, max_tokens: int | None = None
) -> Iterator[dict[str, Any]]:
    """Batches for :func:`record` from tokenised texts, one domain per text.

    Every text is cut into sequences of ``sequence_length``. The last one may be shorter and is padded. Each domain gets
    an equal share of ``max_tokens``. If a text is shorter than its share, the rest of the share is not used.
    """
    if sequence_length < 1 or batch_size < 1:
        raise ValueError(f"sequence_length {sequence_length} and batch_size {batch_size} must be at least 1")
    share = None if max_tokens is None else max(max_tokens // max(len(token_ids), 1), 1)
    for domain, tokens in token_ids.items():
        kept = list(tokens[:share])
        rows = [kept[i : i + sequence_length] for i in range(0, len(kept), sequence_length)]
        yield from row_batches(rows, domain, batch_size)


def row_batches(rows: Sequence[Sequence[int]], domain: str, batch_size: int) -> Iterator[dict[str, Any]]:
    """Batches for :func:`record` from tokenised sequences of one domain, padded on the right."""
    for i in range(0, len(rows), batch_size):
        part = rows[i : i + batch_size]
        width = max(map(len, part))
        yield {
            "input_ids": torch.tensor([[*row, *[0] * (width - len(row))] for row in part]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in part]),
            "domains": [domain] * len(part),
        }


def _checked_batch(batch: Mapping[str, Any], number: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    if "input_ids" not in batch:
        raise ValueError(f"batch {number} has no 'input_ids', found {', '.join(map(str, batch))}")
    ids = torch.as_tensor(batch["input_ids"])
    if ids.ndim != 2:
        raise ValueError(f"batch {number}: input_ids has shape {tuple(ids.shape)}: expected (sequences, tokens)")
    given = batch.get("attention_mask")
    mask = torch.ones_like(ids, dtype=torch.bool) if given is None else torch.as_tensor(given).cpu().bool()
    if mask.shape != ids.shape:
        raise ValueError(
            f"batch {number}: attention_mask has shape {tuple(mask.shape)}, but input_ids has {tuple(ids.shape)}"
        )
    labels = [str(label) for label in batch.get("domains", ["all"] * len(ids))]
    if len(labels) != len(ids):
        raise ValueError(f"batch {number}: {len(labels)} domains for {len(ids)} sequences: give one per sequence")
    return ids, mask, labels


def _stack(taps: Sequence[RouterTap], n_rows: int) -> npt.NDArray[np.int16]:
    """(rows, L, K) experts chosen in one forward pass. A layer with a smaller top-k is padded with −1."""
    for tap in taps:
        rows = [len(each) for each in tap.chosen]
        if rows != [n_rows]:
            raise ValueError(
                f"router {tap.path} saw {rows or 'no'} rows in a forward pass over {n_rows} tokens: "
                "every router must see each token once"
            )
    width = max(tap.chosen[0].shape[1] for tap in taps)
    stacked = np.full((n_rows, len(taps), width), -1, dtype=np.int16)
    for l, tap in enumerate(taps):
        stacked[:, l, : tap.chosen[0].shape[1]] = tap.chosen[0].numpy()
    return stacked
