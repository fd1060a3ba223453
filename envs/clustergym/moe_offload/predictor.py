"""The next-use predictor: how likely each expert is needed soon, from what a serving engine knows.

It is fitted once on sequences of its own and then frozen. It never sees hidden states, only which experts were used.
A *visit* is one token in one layer. For a layer that comes 1, 2 or 3 visits later, the predictor gives the probability
that each expert is used there. After a visit it gives the probability that each expert of the layer is used within the
next 1, 2, 4 … 32 tokens.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor, nn

from clustergym.common.extras import require
from clustergym.common.files import atomic_file, write_atomically
from clustergym.traces.token_trace import TokenTrace

WITHIN = (1, 2, 4, 8, 16, 32)
"""Windows in tokens: the predictor says how likely an expert is used within so many tokens."""
HORIZON = 3
"""The predictor looks 1 … 3 visits ahead."""
HALF_LIVES = (0.6, 0.85, 0.95, 0.985)
"""Factors per token of the decayed shares."""
N_FEATURES = 3 + len(HALF_LIVES)
"""Per expert: used by the last token, decayed shares, share since the start, recency."""
LAGS = 4
"""The routing of so many visits before the predicted one is an input, as far as it is known."""
PRIOR_TOKENS = 8.0
FORMAT = 1
MAX_WEIGHTS_BYTES = 1 << 30
MAX_FIT_TOKENS = 60_000
WEIGHTS, CONFIG = "predictor.safetensors", "predictor.json"

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in total, and a text."""


@njit(cache=True)
def _describe(used, decayed, counts, last, token, popularity, features):  # type: ignore[no-untyped-def]
    """Features (N_FEATURES, E) of one layer before its next token, number ``token`` of the sequence."""
    n_decays = decayed.shape[0]
    for e in range(len(used)):
        features[0, e] = used[e]
        for d in range(n_decays):
            features[1 + d, e] = decayed[d, e]
        features[1 + n_decays, e] = (counts[e] + PRIOR_TOKENS * popularity[e]) / (token + PRIOR_TOKENS)
        features[2 + n_decays, e] = 1.0 / (token - last[e])


@njit(cache=True)
def _record(ids, used, decayed, counts, last, token, factors):  # type: ignore[no-untyped-def]
    """Token number ``token`` used the experts ``ids`` in this layer."""
    used[:] = 0
    for e in ids:
        if e >= 0:
            used[e] = 1
    for e in range(len(used)):
        for d in range(decayed.shape[0]):
            decayed[d, e] = factors[d] * decayed[d, e] + (1 - factors[d]) * used[e]
        counts[e] += used[e]
        if used[e]:
            last[e] = token


LONG_AGO = -1000


@njit(cache=True)
def _features(experts, starts, popularity, factors, features):  # type: ignore[no-untyped-def]
    """Features (T + S, L, N_FEATURES, E) before each token, and one more row after the last token of a sequence."""
    n_layers, n_experts = popularity.shape
    decayed = np.empty((len(factors), n_experts), np.float32)
    for s in range(len(starts) - 1):
        for l in range(n_layers):
            used = np.zeros(n_experts, np.float32)
            counts = np.zeros(n_experts, np.float32)
            last = np.full(n_experts, LONG_AGO)
            for d in range(len(factors)):
                decayed[d] = popularity[l]
            for t in range(starts[s], starts[s + 1]):
                _describe(used, decayed, counts, last, t - starts[s], popularity[l], features[t + s, l])
                _record(experts[t, l], used, decayed, counts, last, t - starts[s], factors)
            end = starts[s + 1]
            _describe(used, decayed, counts, last, end - starts[s], popularity[l], features[end + s, l])


@njit(cache=True)
def _next_use(experts, starts, n_experts, distance, left):  # type: ignore[no-untyped-def]
    """Tokens until the next use of each expert, 1 being this token and 0 never; tokens left of the sequence."""
    n_layers = experts.shape[1]
    for s in range(len(starts) - 1):
        for l in range(n_layers):
            upcoming = np.full(n_experts, -1)
            for t in range(starts[s + 1] - 1, starts[s] - 1, -1):
                left[t] = starts[s + 1] - t
                for e in experts[t, l]:
                    if e >= 0:
                        upcoming[e] = t
                for e in range(n_experts):
                    distance[t, l, e] = 0 if upcoming[e] < 0 else upcoming[e] - t + 1


class NextUseNet(nn.Module):
    """One small network per layer: a hidden layer, a linear path, and a linear path per expert that all experts share.

    Inputs are the features of the layer's experts and the routing of the last visits, 0 where it is not known yet.
    """

    def __init__(self, n_layers: int, n_experts: int, hidden: int) -> None:
        super().__init__()
        self.n_layers, self.n_experts, self.hidden = n_layers, n_experts, hidden
        inputs, outputs = (N_FEATURES + LAGS) * n_experts, len(WITHIN) * n_experts
        self.hidden_weight = nn.Parameter(torch.randn(n_layers, inputs, hidden) * 0.03)
        self.hidden_bias = nn.Parameter(torch.zeros(n_layers, 1, hidden))
        self.out_weight = nn.Parameter(torch.randn(n_layers, hidden, outputs) * 0.02)
        self.out_bias = nn.Parameter(torch.full((n_layers, 1, outputs), -1.5))
        self.linear_weight = nn.Parameter(torch.zeros(n_layers, inputs, outputs))
        self.expert_weight = nn.Parameter(torch.zeros(n_layers, N_FEATURES, len(WITHIN)))

    def forward(
        self, features: Tensor, before: Tensor, layers: slice = slice(None), heads: int = len(WITHIN)
    ) -> Tensor:
        """Logits (layers, B, E, heads) from features (layers, B, N_FEATURES, E) and routing (layers, B, LAGS, E)."""
        n_layers, batch = features.shape[:2]
        x = torch.cat([features, before], 2).flatten(2)
        out_weight, linear_weight, bias = self.out_weight[layers], self.linear_weight[layers], self.out_bias[layers]
        if heads < len(WITHIN):
            columns = slice(0, heads * self.n_experts)
            out_weight, linear_weight, bias = out_weight[..., columns], linear_weight[..., columns], bias[..., columns]
        hidden = torch.relu(torch.baddbmm(self.hidden_bias[layers], x, self.hidden_weight[layers]))
        out = torch.baddbmm(bias, hidden, out_weight) + torch.bmm(x, linear_weight)
        # Columns are head by head, so that the first heads can be computed alone.
        out = out.view(n_layers, batch, heads, self.n_experts)
        own = self.expert_weight[layers][..., :heads]
        return (out + torch.einsum("lbfe,lfk->lbke", torch.log(features + 0.02), own)).transpose(2, 3)


@dataclass
class Predictions:
    """Probabilities for a whole sequence or trace.

    Args:
        ahead: (HORIZON, T, L, E): ``ahead[h - 1, t, l]`` is for token t in layer l, from what is known h visits before.
        keep: (T, L, E, len(WITHIN)): after the visit of token t in layer l, the expert is used by one of the next
            1, 2, 4 … tokens.
    """

    ahead: npt.NDArray[np.float32]
    keep: npt.NDArray[np.float32]


@dataclass
class UseHistory:
    """What a predictor remembers of B sequences while they are served. :meth:`Predictor.visit` updates it."""

    used: npt.NDArray[np.float32]
    decayed: npt.NDArray[np.float32]
    counts: npt.NDArray[np.float32]
    last: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]
    recent: npt.NDArray[np.float32]


@dataclass
class Predictor:
    """A fitted predictor. ``about`` says what it was fitted on."""

    net: NextUseNet
    popularity: npt.NDArray[np.float32]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of layers and experts."""
        return self.net.n_layers, self.net.n_experts

    def check(self, trace: TokenTrace) -> None:
        """Raise a ValueError if the predictor is for another model."""
        if self.shape != (trace.n_layers, trace.n_experts):
            raise ValueError(
                f"the predictor is for {self.shape[0]} layers of {self.shape[1]} experts, but {trace.name} has "
                f"{trace.n_layers} layers of {trace.n_experts}: run clustergym offload fit on a trace of this model"
            )

    # ---- prediction

    def predict(self, trace: TokenTrace, chunk: int = 256) -> Predictions:
        """Probabilities for all tokens of a trace."""
        self.check(trace)
        batches = _Batches(trace, self.popularity, np.float32)
        n, (n_layers, n_experts) = trace.n_tokens, self.shape
        ahead = np.zeros((HORIZON, n, n_layers, n_experts), np.float32)
        keep = np.zeros((n, n_layers, n_experts, len(WITHIN)), np.float32)
        with torch.inference_mode():
            for start in range(0, n, chunk):
                tokens = torch.arange(start, min(n, start + chunk))
                for h in range(1, HORIZON + 1):
                    logits = self.net(*batches.inputs(tokens, torch.full_like(tokens, h)), heads=1)
                    ahead[h - 1, start : start + chunk] = torch.sigmoid(logits[..., 0]).transpose(0, 1).numpy()
                features, before = batches.after(tokens)
                out = torch.sigmoid(self.net(features, before)).transpose(0, 1)
                keep[start : start + chunk] = out.numpy()
        return Predictions(ahead, keep)

    def start(self, batch: int) -> UseHistory:
        """The history of B sequences of which no token was served yet."""
        n_layers, n_experts = self.shape
        decayed = np.broadcast_to(self.popularity[None, :, None], (batch, n_layers, len(HALF_LIVES), n_experts))
        return UseHistory(
            used=np.zeros((batch, n_layers, n_experts), np.float32),
            decayed=decayed.copy(),
            counts=np.zeros((batch, n_layers, n_experts), np.float32),
            last=np.full((batch, n_layers, n_experts), LONG_AGO),
            token=np.zeros((batch, n_layers), np.int64),
            recent=np.zeros((batch, LAGS, n_experts), np.float32),
        )

    def visit(
        self, history: UseHistory, layer: int, experts: npt.NDArray[np.integer[Any]]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Record that the sequences used ``experts`` (B, K) in ``layer``, and predict.

        Returns (B, HORIZON, E) probabilities for the next visits and (B, E, len(WITHIN)) for this layer's next tokens.
        They equal ``ahead`` and ``keep`` of :meth:`predict`.
        """
        batch, (n_layers, n_experts) = len(experts), self.shape
        factors = np.array(HALF_LIVES, np.float32)
        ids = np.ascontiguousarray(experts, np.int64)
        layers = [(layer + h) % n_layers for h in range(HORIZON + 1)]
        features = np.empty((HORIZON + 1, batch, N_FEATURES, n_experts), np.float32)
        for b in range(batch):
            own = history.used[b], history.decayed[b], history.counts[b], history.last[b]
            _record(ids[b], *(array[layer] for array in own), int(history.token[b, layer]), factors)
            history.token[b, layer] += 1
            for h, l in enumerate(layers):
                token = int(history.token[b, l])
                _describe(*(array[l] for array in own), token, self.popularity[l], features[h, b])
        history.recent[:, 1:] = history.recent[:, :-1].copy()
        history.recent[:, 0] = history.used[:, layer]
        ahead = np.zeros((batch, HORIZON, n_experts), np.float32)
        with torch.inference_mode():
            inputs, recent = torch.from_numpy(features), torch.from_numpy(history.recent)
            for h in range(1, HORIZON + 1):
                before = torch.zeros(1, batch, LAGS, n_experts)
                before[0, :, h - 1 :] = recent[:, : LAGS - h + 1]
                part = slice(layers[h], layers[h] + 1)
                logits = self.net(inputs[h : h + 1], before, part, heads=1)
                ahead[:, h - 1] = torch.sigmoid(logits[0, ..., 0]).numpy()
            own_logits = self.net(inputs[:1], torch.zeros(1, batch, LAGS, n_experts), slice(layer, layer + 1))
            keep = torch.sigmoid(own_logits[0]).numpy()
        return ahead, keep

    def recall(self, trace: TokenTrace, max_tokens: int = 6000) -> list[float]:
        """Share of the used experts among the top-k predictions, for 1 … HORIZON visits ahead."""
        part = trace if trace.n_tokens <= max_tokens else _first_tokens(trace, max_tokens)
        return [recall(scores, part) for scores in self.predict(part).ahead]

    # ---- files

    def save(self, folder: str | Path) -> None:
        """Write ``predictor.safetensors`` and ``predictor.json`` to a folder, each file atomically."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().contiguous() for name, value in self.net.state_dict().items()}
        tensors["popularity"] = torch.from_numpy(self.popularity)
        sizes = {"n_layers": self.net.n_layers, "n_experts": self.net.n_experts, "hidden": self.net.hidden}
        with atomic_file(folder / WEIGHTS) as file:
            file.write(require("safetensors.torch", "train").save(tensors))
        write_atomically(folder / CONFIG, json.dumps({"format": FORMAT, **sizes, "about": self.about}, indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> Predictor:
        """Read a folder that :meth:`save` wrote. A ValueError says what is wrong with it."""
        folder = Path(folder)
        config_path, weights_path = folder / CONFIG, folder / WEIGHTS
        for path in (config_path, weights_path):
            if not path.is_file():
                raise ValueError(f"{folder} is no predictor: {path.name} is missing; clustergym offload fit writes it")
        try:
            config = json.loads(config_path.read_bytes())
            found = config["format"]
            sizes = {key: int(config[key]) for key in ("n_layers", "n_experts", "hidden")}
            about = dict(config["about"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{config_path}: not the description of a predictor: {error!r}") from error
        if found != FORMAT:
            raise ValueError(f"{config_path}: format {found!r}, this version reads {FORMAT}: fit the predictor again")
        # Sizes are compared with those in the file before anything is allocated.
        if weights_path.stat().st_size > MAX_WEIGHTS_BYTES:
            raise ValueError(f"{weights_path}: larger than {MAX_WEIGHTS_BYTES >> 20} MB")
        expected = _weight_shapes(**sizes)
        try:
            with require("safetensors", "train").safe_open(weights_path, framework="pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                if shapes != expected:
                    wrong = sorted(set(shapes.items()) ^ set(expected.items()))[0]
                    raise ValueError(f"the sizes in {CONFIG} do not fit {wrong[0]} of shape {list(wrong[1])}")
                tensors = {name: file.get_tensor(name) for name in expected}
        except Exception as error:  # safetensors raises exceptions of its own without a common base
            raise ValueError(f"{weights_path}: not the weights of a predictor: {error}") from error
        for name, value in tensors.items():
            if value.dtype != torch.float32 or not bool(torch.isfinite(value).all()):
                raise ValueError(f"{weights_path}: {name} must be finite numbers of type float32")
        popularity = tensors.pop("popularity").numpy()
        with torch.random.fork_rng(devices=[]):  # the initial weights are replaced
            net = NextUseNet(**sizes)
        net.load_state_dict(tensors)
        return cls(net.eval(), popularity, about)


def _weight_shapes(n_layers: int, n_experts: int, hidden: int) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        net = NextUseNet(n_layers, n_experts, hidden)
    return {name: tuple(value.shape) for name, value in net.state_dict().items()} | {
        "popularity": (n_layers, n_experts)
    }


class _Batches:
    """Network inputs for any tokens of a trace."""

    def __init__(self, trace: TokenTrace, popularity: npt.NDArray[np.float32], dtype: type) -> None:
        n, n_layers, n_experts = trace.n_tokens, trace.n_layers, trace.n_experts
        starts = np.append(trace.seq_starts, n)
        self.n_layers = n_layers
        features = np.empty((n + trace.n_sequences, n_layers, N_FEATURES, n_experts), dtype)
        _in_parts(trace, starts, popularity, features)
        self.features = torch.from_numpy(features)
        sequence = np.repeat(np.arange(trace.n_sequences), trace.seq_lens)
        self.row = torch.from_numpy(np.arange(n) + sequence)
        self.first_visit = torch.from_numpy(starts[sequence] * n_layers)
        # Routing by visit, after LAGS empty visits.
        used = np.zeros((n * n_layers, n_experts + 1), np.uint8)
        np.put_along_axis(used, trace.experts.reshape(n * n_layers, -1).astype(np.int64), 1, axis=1)
        used = used[:, :n_experts]
        self.used = torch.from_numpy(np.concatenate([np.zeros((LAGS, n_experts), np.uint8), used]))

    def inputs(self, tokens: Tensor, horizon: Tensor) -> tuple[Tensor, Tensor]:
        """Features (L, B, N_FEATURES, E) and routing (L, B, LAGS, E) known ``horizon`` (B,) visits before."""
        features = self.features[self.row[tokens]].float().transpose(0, 1)
        visits = tokens[:, None] * self.n_layers + torch.arange(self.n_layers)
        lags = []
        for lag in range(1, LAGS + 1):
            known = (visits - lag >= self.first_visit[tokens][:, None]) & (horizon[:, None] <= lag)
            lags.append((self.used[visits - lag + LAGS].float() * known[..., None]).transpose(0, 1))
        return features, torch.stack(lags, 2)

    def after(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Features after the visits of the tokens, with nothing known of the visits to come."""
        features = self.features[self.row[tokens] + 1].float().transpose(0, 1)
        n_layers, batch, _, n_experts = features.shape
        return features, torch.zeros(n_layers, batch, LAGS, n_experts)


def _in_parts(
    trace: TokenTrace, starts: npt.NDArray[np.int64], popularity: npt.NDArray[np.float32], features: npt.NDArray[Any]
) -> None:
    """Fill the features sequence by sequence: numba has no half precision, numpy has."""
    factors = np.array(HALF_LIVES, np.float32)
    for s in range(trace.n_sequences):
        start, end = int(starts[s]), int(starts[s + 1])
        part = np.empty((end - start + 1, *features.shape[1:]), np.float32)
        _features(trace.experts[start:end], np.array([0, end - start]), popularity, factors, part)
        features[start + s : end + s + 1] = part


def recall(scores: npt.NDArray[np.floating[Any]], trace: TokenTrace) -> float:
    """Share of the used experts of a trace that are among its top-k largest scores (T, L, E)."""
    best = np.argpartition(-scores, trace.top_k - 1, axis=2)[..., : trace.top_k]
    hits = (best[..., :, None] == trace.experts[..., None, :]).sum()
    return float(hits / (trace.experts >= 0).sum())


def _first_tokens(trace: TokenTrace, max_tokens: int, seed: int = 0) -> TokenTrace:
    """Randomly drawn sequences with about so many tokens."""
    order = np.random.default_rng(seed).permutation(trace.n_sequences)
    n = int(np.searchsorted(np.cumsum(trace.seq_lens[order]), max_tokens)) + 1
    return trace.select(sequences=np.sort(order[:n]))


def fit_predictor(
    trace: TokenTrace,
    validation: TokenTrace | None = None,
    steps: int = 1500,
    hidden: int = 96,
    batch: int = 192,
    learning_rate: float = 2e-3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Predictor:
    """Fit a predictor on all sequences of a trace.

    Args:
        trace: the sequences to fit on, and no others.
        validation: sequences for the recall in ``about``.
        steps: gradient steps of Adam; the learning rate falls to 2 % of its start.
        hidden: width of the hidden layer.
        batch: tokens per step. Each comes with all its layers and with one of four states of knowledge.
        learning_rate: at the start.
        seed: of weights and batches.
        progress: called about every second.
    """
    if steps < 1 or hidden < 1 or batch < 1:
        raise ValueError(f"steps {steps}, hidden {hidden} and batch {batch} must be at least 1")
    trace = trace if trace.n_tokens <= MAX_FIT_TOKENS else _first_tokens(trace, MAX_FIT_TOKENS, seed)
    started = time.perf_counter()
    n, n_layers, n_experts = trace.n_tokens, trace.n_layers, trace.n_experts
    counts = trace.loads()
    popularity = (counts / n).astype(np.float32)
    batches = _Batches(trace, popularity, np.float16)
    distance_, left_ = np.zeros((n, n_layers, n_experts), np.int16), np.zeros(n, np.int32)
    _next_use(trace.experts, np.append(trace.seq_starts, n), n_experts, distance_, left_)
    distance, left, within = torch.from_numpy(distance_), torch.from_numpy(left_), torch.tensor(WITHIN)
    horizons = torch.tensor([*range(1, HORIZON + 1), LAGS + 1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = NextUseNet(n_layers, n_experts, hidden)
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=learning_rate)
    order, shown, loss_mean = np.empty(0, np.int64), 0.0, math.nan
    for step in range(steps):
        if len(order) < batch:
            order = np.concatenate([order, rng.permutation(n)])
        tokens, order = torch.from_numpy(order[:batch]), order[batch:]
        horizon = horizons[torch.from_numpy(rng.integers(len(horizons), size=len(tokens)))]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * max(0.02, 1 - step / steps)
        logits = net(*batches.inputs(tokens, horizon))
        ahead = distance[tokens].transpose(0, 1)[..., None]
        target = ((ahead > 0) & (ahead <= within)).float()
        # Where the sequence ends inside the window, only a use is known, not its absence.
        known = (target > 0) | (left[tokens][None, :, None, None] >= within)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
        loss = (losses * known).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        value = float(loss.detach())
        loss_mean = value if math.isnan(loss_mean) else 0.98 * loss_mean + 0.02 * value
        if progress is not None and (time.perf_counter() - shown > 1 or step == steps - 1):
            shown = time.perf_counter()
            progress(step + 1, steps, f"loss {loss_mean:.4f}")
    predictor = Predictor(net.eval(), popularity)
    predictor.about = {
        "trace": trace.name, "sequences": trace.n_sequences, "tokens": n, "steps": steps, "seed": seed,
        "loss": loss_mean, "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    if validation is not None:
        predictor.check(validation)
        predictor.about["recall"] = [round(value, 4) for value in predictor.recall(validation)]
    return predictor
