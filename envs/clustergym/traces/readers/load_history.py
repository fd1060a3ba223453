"""Load histories of vLLM's EPLB, as in the public data set abmfy/eplb-openevolve (``expert-load.json``).

``{"load_history": [{"logical_expert_load": [[tokens of each expert] for each MoE layer]}, …]}``, one entry per step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clustergym.traces.load_trace import LoadTrace
from clustergym.traces.readers.base import ReadOptions, expand

KEY = "load_history"
_LOADS = re.compile(rb'"logical_expert_load"\s*:\s*(\[[\[\]0-9,.\s]*\])')
_MAX_DIGITS = 15


def read(paths: Sequence[Path], options: ReadOptions) -> LoadTrace:
    """The loads of every step. Layers are counted without dense ones, so the model tells their global indices."""
    steps = []
    for path in expand(paths, "*.json"):
        text = path.read_bytes()
        if any(text.count(opening) != text.count(closing) for opening, closing in ((b"{", b"}"), (b"[", b"]"))):
            raise ValueError(f"{path}: not a complete JSON object: was it truncated?")
        for i, match in enumerate(_LOADS.finditer(text)):
            steps.append(_loads(match[1], f"{path}, step {i}"))
            if steps[-1].shape != steps[0].shape:
                raise ValueError(f"{path}, step {i}: loads of shape {steps[-1].shape}, but {steps[0].shape} in step 0")
    if not steps:
        raise ValueError(f"no 'logical_expert_load' in the files: expected the {KEY} of vLLM's EPLB")
    counts = np.stack(steps)
    counts = counts[counts.any((1, 2))]
    if not len(counts):
        raise ValueError("every step of the recording is empty: nothing to import")
    options.check_layer_count(counts.shape[1])
    if options.expected_experts not in (0, counts.shape[2]):
        raise ValueError(f"{counts.shape[2]} experts recorded, expected {options.expected_experts}")
    ids = (*options.model.layer_ids, *options.model.mtp_layer_ids) if options.model else range(counts.shape[1])
    layer_ids = np.array(ids[: counts.shape[1]], np.int64)
    return LoadTrace(counts, layer_ids, options.expected_top_k, options.model_name, options.name)


def _loads(text: bytes, where: str) -> npt.NDArray[np.int64]:
    """(L, E) counts from the text of a nested list. Vectorised: such a file has fifty million numbers."""
    plain = text.translate(None, b" \t\r\n")
    if not re.fullmatch(rb"\[\[[0-9.,]+\](,\[[0-9.,]+\])*\]", plain):
        raise ValueError(f"{where}: expected one list of counts per layer")
    rows = plain[2:-2].split(b"],[")
    widths = {row.count(b",") + 1 for row in rows}
    if len(widths) > 1:
        raise ValueError(f"{where}: layers with {sorted(widths)} experts: expected the same number in each")
    numbers = b",".join(rows).split(b",")
    if max(map(len, numbers)) > _MAX_DIGITS or not all(number.removesuffix(b".0").isdigit() for number in numbers):
        raise ValueError(f"{where}: a load is not a count of tokens")
    return np.array(numbers).astype(np.float64).astype(np.int64).reshape(len(rows), -1)
