"""Token traces: which experts each token was routed to, layer by layer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.traces.arrays import (
    UNGIVEN,
    integers,
    layer_indices,
    names_of_npz,
    one_integer,
    one_string,
    read_npy,
    read_npz,
    write_trace,
)

DEFAULT_TRACE = "tiny_moe"
"""The bundled trace of environments and commands that are given none"""
MAX_EXPERTS = np.iinfo(np.int16).max
# Expert ids validated at a time, few enough that temporary copies fit into the CPU caches.
_CHECK_IDS = 1 << 18


@dataclass(frozen=True, eq=False)
class TokenTrace:
    """Routing decisions of a mixture-of-experts model, one row per token.

    Args:
        experts: (T, L, K) integer array of logical expert ids. −1 is padding for a token that used fewer than K
            experts. A 2-D (T, L) array means K = 1.
        n_experts: experts per layer. Default: the largest id + 1.
        layer_ids: (L,) global index of each recorded layer (dense layers are not recorded). Default: 0 … L−1.
        seq_lens: (S,) tokens in each sequence, in order. They sum to T. Default: one sequence.
        domains: (S,) label of each sequence. Default: all ``"all"``.
        model: name of the model preset that the trace was recorded from, if known.
        name: where the trace came from, for messages.
        prompt_lens: (S,) tokens of the prompt before each sequence, for decode traces. The prompt itself is not in
            ``experts``. Default: None.
        splits: (S,) split of each sequence, if the recording defines splits. :func:`split_trace` follows it.
            Default: None.

    Raises:
        ValueError: something is wrong with the arrays. The message names the place.
    """

    experts: npt.NDArray[np.int16]
    n_experts: int = 0
    layer_ids: npt.NDArray[np.int64] = UNGIVEN
    seq_lens: npt.NDArray[np.int64] = UNGIVEN
    domains: npt.NDArray[np.str_] = UNGIVEN
    model: str | None = None
    name: str = "array"
    prompt_lens: npt.NDArray[np.int64] | None = None
    splits: npt.NDArray[np.str_] | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        experts, n_experts = _checked_experts(self.experts, int(self.n_experts), self.name)
        n_tokens, n_layers, _ = experts.shape
        set_(self, "experts", experts)
        set_(self, "n_experts", n_experts)
        set_(self, "layer_ids", layer_indices(self.layer_ids, n_layers, self.name))
        seq_lens = np.array([n_tokens]) if self.seq_lens is None else integers(self.seq_lens, "seq_lens", self.name)
        if seq_lens.ndim != 1 or (seq_lens < 1).any():
            raise ValueError(
                f"{self.name}: seq_lens must be a list of lengths of at least 1, found {seq_lens.tolist()[:8]}"
            )
        # The second check alone would pass for a sum that overflows.
        if (seq_lens > n_tokens).any() or seq_lens.sum() != n_tokens:
            raise ValueError(f"{self.name}: seq_lens sums to {seq_lens.sum()}, but experts has {n_tokens} tokens")
        set_(self, "seq_lens", seq_lens)
        domains = np.full(len(seq_lens), "all") if self.domains is None else self.domains
        set_(self, "domains", _labels(domains, "domains", len(seq_lens), self.name))
        if self.splits is not None:
            set_(self, "splits", _labels(self.splits, "splits", len(seq_lens), self.name))
        if self.prompt_lens is not None:
            prompt_lens = integers(self.prompt_lens, "prompt_lens", self.name)
            if prompt_lens.shape != seq_lens.shape or (prompt_lens < 0).any():
                raise ValueError(
                    f"{self.name}: prompt_lens must be one length of at least 0 for each of the {len(seq_lens)} "
                    f"sequences, found shape {prompt_lens.shape} and minimum {prompt_lens.min(initial=0)}"
                )
            set_(self, "prompt_lens", prompt_lens)

    @property
    def n_tokens(self) -> int:
        return int(self.experts.shape[0])

    @property
    def n_layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @property
    def n_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def domain_names(self) -> list[str]:
        """The domain labels, sorted."""
        return [str(d) for d in np.unique(self.domains)]

    @property
    def seq_starts(self) -> npt.NDArray[np.int64]:
        """(S,) index of each sequence's first token."""
        return np.concatenate([[0], np.cumsum(self.seq_lens)[:-1]]).astype(np.int64)

    def __repr__(self) -> str:
        return (
            f"TokenTrace({self.name!r}: {self.n_tokens} tokens in {self.n_sequences} sequences, "
            f"{self.n_layers} layers, top-{self.top_k} of {self.n_experts} experts, "
            f"domains {self.domain_names[:6]}, model {self.model})"
        )

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> TokenTrace:
        """Load a ``.npz`` or ``.npy`` file, or a bundled trace by name (``TokenTrace.load("synthetic")``).

        A ``.npy`` file contains the (T, L) or (T, L, K) array. A ``.npz`` file contains ``experts`` and optionally
        ``n_experts``, ``layer_ids``, ``seq_lens``, ``domains`` (or ``category``), ``model``, ``prompt_lens`` and
        ``splits``. Pickled objects are never loaded.
        """
        path = find_trace(source)
        if path.suffix == ".npy":
            with open(path, "rb") as file:
                return cls(read_npy(file, path.stat().st_size, f"{path}"), name=path.stem)
        sizes = ("n_experts", "layer_ids", "seq_lens", "prompt_lens")
        fields = read_npz(path, ("experts", *sizes, "domains", "category", "splits", "model"))
        if "experts" not in fields:
            found = names_of_npz(path)
            hint = ": it is a LoadTrace, counts without tokens" if "counts" in found else ""
            raise ValueError(f"{path}: no array 'experts' in the file, found {sorted(found)}{hint}")
        return cls(
            fields["experts"],
            n_experts=one_integer(fields, "n_experts", path),
            layer_ids=fields.get("layer_ids", UNGIVEN),
            seq_lens=fields.get("seq_lens", UNGIVEN),
            domains=fields.get("domains", fields.get("category", UNGIVEN)),
            model=one_string(fields, "model", path),
            name=path.stem,
            prompt_lens=fields.get("prompt_lens"),
            splits=fields.get("splits"),
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a compressed ``.npz`` file atomically. Returns the path."""
        return write_trace(path, self.arrays())

    def arrays(self) -> dict[str, Any]:
        """The arrays of the file that :meth:`save` writes."""
        fields: dict[str, Any] = {
            "experts": self.experts.astype(self._small_dtype(), copy=False),
            "n_experts": np.int64(self.n_experts),
            "layer_ids": self.layer_ids,
            "seq_lens": self.seq_lens.astype(np.int32),
            "domains": self.domains,
            "model": np.str_(self.model or ""),
        }
        if self.prompt_lens is not None:
            fields["prompt_lens"] = self.prompt_lens.astype(np.int32)
        if self.splits is not None:
            fields["splits"] = self.splits
        return fields

    def _small_dtype(self) -> type[np.integer[Any]]:
        if self.n_experts <= np.iinfo(np.int8).max + 1:
            return np.int8
        # uint8 has room for 256 ids, but not for the padding −1.
        return np.uint8 if self.n_experts <= np.iinfo(np.uint8).max + 1 and self.experts.min() >= 0 else np.int16

    def select(
        self,
        *,
        sequences: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        domains: Sequence[str] | str | None = None,
        layers: Sequence[int] | None = None,
    ) -> TokenTrace:
        """The part of the trace with the given sequences (by index), domains (by label) and layers (by position)."""
        keep = np.arange(self.n_sequences)
        if sequences is not None:
            # Used as indices, a boolean mask would silently repeat sequences 0 and 1.
            if np.asarray(sequences).dtype == bool:
                raise ValueError(f"{self.name}: sequences are chosen by index, found a mask: give np.flatnonzero(mask)")
            keep = np.asarray(sequences, dtype=np.int64)
            bad = keep[(keep < 0) | (keep >= self.n_sequences)]
            if bad.size:
                raise ValueError(
                    f"{self.name}: sequence {bad[0]} asked for, but the ids are 0 … {self.n_sequences - 1}"
                )
        if domains is not None:
            wanted = [domains] if isinstance(domains, str) else list(domains)
            unknown = sorted(set(wanted) - set(self.domain_names))
            if unknown:
                raise ValueError(
                    f"{self.name}: no domain {unknown[0]!r}; the domains are: {', '.join(self.domain_names)}"
                )
            keep = keep[np.isin(self.domains[keep], wanted)]
        if not keep.size:
            raise ValueError(f"{self.name}: no sequence is selected")
        lengths = self.seq_lens[keep]
        tokens = np.repeat(self.seq_starts[keep] - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        experts, positions = self.experts, np.arange(self.n_layers)
        if layers is not None:
            positions = np.asarray(layers, dtype=np.int64)
            if not positions.size or positions.min() < 0 or positions.max() >= self.n_layers:
                raise ValueError(
                    f"{self.name}: layers {list(layers)} asked for, but the positions are 0 … {self.n_layers - 1}"
                )
            experts = experts[:, positions]
        if len(tokens) < self.n_tokens or sequences is not None:
            experts = experts[tokens]
        return TokenTrace(
            experts,
            n_experts=self.n_experts,
            layer_ids=self.layer_ids[positions],
            seq_lens=lengths,
            domains=self.domains[keep],
            model=self.model,
            name=self.name,
            prompt_lens=None if self.prompt_lens is None else self.prompt_lens[keep],
            splits=None if self.splits is None else self.splits[keep],
        )

    def split(self, fraction: float = 0.5, seed: int | None = 0) -> tuple[TokenTrace, TokenTrace]:
        """Split the sequences into a part to plan or train on and a held-out part.

        The first part has about ``fraction`` of the tokens of each domain. With 0.5 and a seed it is never the smaller
        part.

        Args:
            fraction: share of the tokens in the first part.
            seed: for drawing the sequences of the first part. With None, the first part has the earliest sequences of
                each domain, in the order of the trace.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must lie between 0 and 1, found {fraction}")
        if self.n_sequences < 2:
            raise ValueError(
                f"{self.name}: the trace has one sequence, so nothing can be held out: give seq_lens, or cut it into "
                "several sequences"
            )
        rng = np.random.default_rng(seed)
        first = np.zeros(self.n_sequences, dtype=bool)
        for domain in self.domain_names:
            order = np.flatnonzero(self.domains == domain)
            order = order if seed is None else rng.permutation(order)
            before = np.cumsum(self.seq_lens[order]) - self.seq_lens[order]
            first[order[before < fraction * self.seq_lens[order].sum()]] = True
        if first.all():
            # One sequence per domain. Hold out the last one, or the shortest, so that it is the smaller part.
            first[-1 if seed is None else self.seq_lens.argmin()] = False
        return self.select(sequences=np.flatnonzero(first)), self.select(sequences=np.flatnonzero(~first))

    @staticmethod
    def concat(traces: Sequence[TokenTrace], domains: Sequence[str] | None = None) -> TokenTrace:
        """Join traces of one model. ``domains`` gives each trace one domain. Default: each trace keeps its labels.

        Prompt lengths and splits are kept if every trace has them.
        """
        if not traces:
            raise ValueError("nothing to join: the list of traces is empty")
        first = traces[0]
        for other in traces[1:]:
            shapes = [(t.n_layers, t.top_k, t.n_experts) for t in (first, other)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"{other.name} has (layers, top-k, experts) = {shapes[1]} and {first.name} has {shapes[0]}: "
                    "only traces of the same model and layers can be joined"
                )
            if not np.array_equal(first.layer_ids, other.layer_ids):
                raise ValueError(
                    f"{other.name} has layer_ids {other.layer_ids.tolist()} and {first.name} has "
                    f"{first.layer_ids.tolist()}: only traces of the same model and layers can be joined"
                )
        models = sorted({t.model for t in traces if t.model is not None})
        if len(models) > 1:
            raise ValueError(
                f"the traces are from different models ({', '.join(models)}): only traces of one model can be joined"
            )
        if domains is None:
            labels = [t.domains for t in traces]
        elif len(domains) == len(traces):
            labels = [np.full(t.n_sequences, d) for t, d in zip(traces, domains, strict=True)]
        else:
            raise ValueError(f"{len(domains)} domains given for {len(traces)} traces: give one per trace")
        prompt_lens = [t.prompt_lens for t in traces if t.prompt_lens is not None]
        splits = [t.splits for t in traces if t.splits is not None]
        return TokenTrace(
            np.concatenate([t.experts for t in traces]),
            n_experts=first.n_experts,
            layer_ids=first.layer_ids,
            seq_lens=np.concatenate([t.seq_lens for t in traces]),
            domains=np.concatenate(labels),
            model=models[0] if models else None,
            name="+".join(t.name for t in traces),
            prompt_lens=np.concatenate(prompt_lens) if len(prompt_lens) == len(traces) else None,
            splits=np.concatenate(splits) if len(splits) == len(traces) else None,
        )

    def loads(self) -> npt.NDArray[np.int64]:
        """(L, E) tokens routed to each expert of each layer."""
        counts = np.zeros((self.n_layers, self.n_experts), dtype=np.int64)
        for l in range(self.n_layers):
            ids = self.experts[:, l].ravel()
            counts[l] = np.bincount(ids[ids >= 0], minlength=self.n_experts)
        return counts

    def statistics(self, n_gpus: int = 16) -> dict[str, float]:
        """Statistics of the trace that matter for a placement. See :mod:`clustergym.traces.statistics`."""
        from clustergym.traces.statistics import trace_statistics

        return trace_statistics(self, n_gpus=n_gpus)


def load_traces(sources: Sequence[str]) -> TokenTrace:
    """One trace by file or bundled name, or several joined, each as its own domain."""
    twice = sorted({source for source in sources if sources.count(source) > 1})
    if twice:
        raise ValueError(
            f"trace {twice[0]!r} is given twice: sequences held out of one copy would be planned on in the other"
        )
    traces = [TokenTrace.load(source) for source in sources]
    if len(traces) == 1:
        return traces[0]
    names = [trace.name for trace in traces]
    # Files of the same name in different folders are different domains.
    return TokenTrace.concat(traces, domains=names if len(set(names)) == len(names) else sources)


def find_trace(source: str | os.PathLike[str]) -> Path:
    """The file of a trace: a ``.npz`` or ``.npy`` file, or a bundled trace by name. A ValueError if there is none."""
    path = Path(source)
    if path.suffix not in (".npz", ".npy"):
        known = bundled_traces()
        if str(source) not in known:
            raise ValueError(
                f"unknown trace {str(source)!r}: give a .npz or .npy file, or one of the bundled names: "
                f"{', '.join(sorted(known))}"
            )
        path = known[str(source)]
    if not path.is_file():
        raise ValueError(f"no trace file at {path}; the bundled names are: {', '.join(sorted(bundled_traces()))}")
    return path


def bundled_traces() -> dict[str, Path]:
    """Names and files of the sample traces, both in an installed wheel and in a checkout."""
    here = Path(__file__).resolve()
    folders = [here.parent / "bundled", here.parents[3] / "traces"]
    return {path.stem: path for folder in reversed(folders) for path in sorted(folder.glob("[!.]*.npz"))}


def _labels(array: Any, what: str, n_sequences: int, name: str) -> npt.NDArray[np.str_]:
    """(S,) strings, one per sequence."""
    labels = np.asarray(array)
    if labels.shape != (n_sequences,):
        raise ValueError(
            f"{name}: {what} has shape {labels.shape}, but there are {n_sequences} sequences: "
            "give one label per sequence"
        )
    if labels.dtype.kind != "U":
        raise ValueError(f"{name}: {what} must be strings, found dtype {labels.dtype}")
    return labels


def _checked_experts(array: Any, n_experts: int, name: str) -> tuple[npt.NDArray[np.int16], int]:
    experts = np.asarray(array)
    if experts.dtype == object:
        raise ValueError(
            f"{name}: experts has dtype object (rows of different lengths?): give a rectangular integer array, padded "
            "with -1"
        )
    if experts.dtype.kind not in "iu":
        raise ValueError(f"{name}: experts has dtype {experts.dtype}: expert ids must be integers")
    if experts.ndim == 2:
        experts = experts[:, :, None]
    if experts.ndim != 3:
        raise ValueError(
            f"{name}: experts has shape {experts.shape}: expected (tokens, layers) or (tokens, layers, top_k)"
        )
    if 0 in experts.shape:
        raise ValueError(f"{name}: the trace is empty: experts has shape {experts.shape} (tokens, layers, top_k)")
    low, high = int(experts.min()), int(experts.max())
    if low < -1:
        where = np.argwhere(experts < -1)[0]
        raise ValueError(
            f"{name}: trace has expert id {experts[tuple(where)]} at token {where[0]}, layer {where[1]}: "
            "ids are 0 or more, and -1 is padding"
        )
    if high < 0:
        raise ValueError(f"{name}: the trace is empty: every entry is the padding -1")
    if n_experts == 0:
        n_experts = high + 1
    if not 1 <= n_experts <= MAX_EXPERTS:
        raise ValueError(f"{name}: n_experts is {n_experts}: expected 1 … {MAX_EXPERTS}")
    if high >= n_experts:
        where = np.argwhere(experts >= n_experts)[0]
        raise ValueError(
            f"{name}: trace has expert id {experts[tuple(where)]} at token {where[0]}, layer {where[1]}, "
            f"but n_experts is {n_experts}"
        )
    # A read-only array is shared, not copied: readers pass millions of ids this way.
    experts = experts.astype(np.int16, copy=experts.flags.writeable)
    rows = max(1, _CHECK_IDS // (experts.shape[1] * experts.shape[2]))
    for start in range(0, len(experts) if experts.shape[2] > 1 else 0, rows):
        block = experts[start : start + rows]
        if not _has_repeats(block):
            continue
        ordered = np.sort(block, axis=2)
        token, layer, k = np.argwhere((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0))[0]
        raise ValueError(
            f"{name}: expert {ordered[token, layer, k]} appears twice at token {start + token}, layer {layer}: "
            "a token uses each expert once"
        )
    return experts, n_experts


def _has_repeats(block: npt.NDArray[np.int16]) -> bool:
    """Whether some token uses an expert twice. Comparing all pairs of columns is faster than sorting short rows."""
    columns = np.ascontiguousarray(block.reshape(-1, block.shape[2]).T)
    for i, column in enumerate(columns):
        for other in columns[i + 1 :]:
            same = column == other
            if same.any() and (same & (column >= 0)).any():
                return True
    return False
