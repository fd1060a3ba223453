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
from torch import Tensor, nn

from clustergym.common.extras import require
from clustergym.common.files import atomic_file, write_atomically
from clustergym.moe_offload.tables import first_tokens
from clustergym.moe_offload.uses import HORIZON, WITHIN, next_use, recall, use
from clustergym.traces.token_trace import TokenTrace

DECAYS = np.array([0.6, 0.85, 0.95, 0.985], np.float32)
"""Factors per token of the decayed shares."""
N_FEATURES = 3 + len(DECAYS)
"""Per expert: used by the last token, decayed shares, share since the start, recency."""
LAGS = 4
"""The routing of so many visits before the predicted one is an input, as far as it is known."""
PRIOR_TOKENS = 8.0
LONG_AGO = -1000.0
FORMAT = 1
MAX_WEIGHTS_BYTES = 1 << 30
MAX_SIZE = 1 << 15
MAX_FIT_TOKENS = 60_000
WEIGHTS, CONFIG = "predictor.safetensors", "predictor.json"

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in total, and a text."""


@dataclass
class UseHistory:
    """What is remembered of how experts were used: arrays (…, E), changed in place.

    The leading dimensions are sequences and layers that are served side by side.
    """

    popularity: npt.NDArray[np.float32]
    used: npt.NDArray[np.float32]
    decayed: npt.NDArray[np.float32]
    """(…, decays, E)"""
    counts: npt.NDArray[np.float32]
    last: npt.NDArray[np.float32]
    token: npt.NDArray[np.float32]
    """(…, 1) tokens so far"""

    @classmethod
    def start(cls, popularity: npt.NDArray[np.float32], batch: tuple[int, ...] = ()) -> UseHistory:
        """The history of sequences of which nothing was served yet, with popularity (L, E)."""
        shape = (*batch, *popularity.shape)
        decayed = np.broadcast_to(popularity[..., None, :], (*shape[:-1], len(DECAYS), shape[-1]))
        zeros = np.zeros(shape, np.float32)
        return cls(
            popularity=np.broadcast_to(popularity, shape),
            used=zeros,
            decayed=decayed.copy(),
            counts=zeros.copy(),
            last=np.full(shape, LONG_AGO, np.float32),
            token=np.zeros((*shape[:-1], 1), np.float32),
        )

    def layer(self, layer: int) -> UseHistory:
        """The part of one layer, sharing memory."""
        return UseHistory(*(getattr(self, name)[:, layer] for name in self.__dataclass_fields__))

    def record(self, used: npt.NDArray[np.float32]) -> None:
        """The next token used the experts that are 1 in ``used`` (…, E)."""
        self.used[...] = used
        self.decayed *= DECAYS[:, None]
        self.decayed += (1 - DECAYS)[:, None] * used[..., None, :]
        self.counts += used
        np.copyto(self.last, self.token, where=used > 0)
        self.token += 1

    def features(self) -> npt.NDArray[np.float32]:
        """(…, N_FEATURES, E) before the next token."""
        share = (self.counts + PRIOR_TOKENS * self.popularity) / (self.token + PRIOR_TOKENS)
        recency = 1 / (self.token - self.last)
        return np.concatenate([self.used[..., None, :], self.decayed, np.stack([share, recency], -2)], -2)


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
            1, 2, 4 … tokens. Before the first token it is :meth:`Predictor.at_start`.
    """

    ahead: npt.NDArray[np.float32]
    keep: npt.NDArray[np.float32]


@dataclass
class ServedSequences:
    """What a predictor remembers of B sequences while they are served. :meth:`Predictor.visit` updates it."""

    history: UseHistory
    recent: npt.NDArray[np.float32]
    """(B, LAGS, E) routing of the last visits, the latest first"""


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
                keep[start : start + chunk] = self._keep(batches.features[batches.row[tokens] + 1]).numpy()
        return Predictions(ahead, keep)

    def at_start(self) -> npt.NDArray[np.float32]:
        """(L, E, len(WITHIN)) ``keep`` before the first token of any sequence."""
        with torch.inference_mode():
            found: npt.NDArray[np.float32] = self._keep(
                torch.from_numpy(UseHistory.start(self.popularity).features())[None]
            )[0].numpy()
        return found

    def _keep(self, features: Tensor) -> Tensor:
        """(B, L, E, len(WITHIN)) from features (B, L, N_FEATURES, E), with nothing known of the visits to come."""
        features = features.transpose(0, 1)
        nothing = torch.zeros(*features.shape[:2], LAGS, self.net.n_experts)
        return torch.sigmoid(self.net(features, nothing)).transpose(0, 1)

    def start(self, batch: int) -> ServedSequences:
        """The memory of B sequences of which no token was served yet."""
        history = UseHistory.start(self.popularity, (batch,))
        return ServedSequences(history, np.zeros((batch, LAGS, self.net.n_experts), np.float32))

    def visit(
        self, served: ServedSequences, layer: int, experts: npt.NDArray[np.integer[Any]]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Record that B sequences used ``experts`` (B, K) in ``layer``, and predict.

        Returns (B, HORIZON, E) probabilities for the next visits and (B, E, len(WITHIN)) for this layer's next tokens.
        They equal ``ahead`` and ``keep`` of :meth:`predict`.
        """
        batch, (n_layers, n_experts) = len(experts), self.shape
        used = use(experts, n_experts)
        served.history.layer(layer).record(used)
        served.recent = np.concatenate([used[:, None], served.recent[:, :-1]], 1)
        ahead = np.empty((batch, HORIZON, n_experts), np.float32)
        recent = torch.from_numpy(served.recent)
        with torch.inference_mode():
            for h in range(HORIZON + 1):
                l = (layer + h) % n_layers
                features = torch.from_numpy(served.history.layer(l).features())[None]
                before = torch.zeros(1, batch, LAGS, n_experts)
                if h == 0:
                    keep = torch.sigmoid(self.net(features, before, slice(l, l + 1))[0]).numpy()
                    continue
                before[0, :, h - 1 :] = recent[:, : LAGS - h + 1]
                logits = self.net(features, before, slice(l, l + 1), heads=1)
                ahead[:, h - 1] = torch.sigmoid(logits[0, ..., 0]).numpy()
        return ahead, keep

    def recall(self, trace: TokenTrace, max_tokens: int = 6000) -> list[float]:
        """Share of the used experts among the top-k predictions, for 1 … HORIZON visits ahead."""
        part = first_tokens(trace, max_tokens)
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
            if not all(1 <= size <= MAX_SIZE for size in sizes.values()):
                raise ValueError(f"sizes must lie between 1 and {MAX_SIZE}")
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
        used = use(trace.experts, n_experts)
        # One more row after the last token of each sequence.
        features: npt.NDArray[Any] = np.empty((n + trace.n_sequences, n_layers, N_FEATURES, n_experts), dtype)
        for s in range(trace.n_sequences):
            history = UseHistory.start(popularity)
            for t in range(starts[s], starts[s + 1]):
                features[t + s] = history.features()
                history.record(used[t])
            features[starts[s + 1] + s] = history.features()
        self.features = torch.from_numpy(features)
        sequence = np.repeat(np.arange(trace.n_sequences), trace.seq_lens)
        self.row = torch.from_numpy(np.arange(n) + sequence)
        self.first_visit = torch.from_numpy(starts[sequence] * n_layers)
        # Routing by visit, after LAGS empty visits.
        by_visit = used.astype(np.uint8).reshape(n * n_layers, n_experts)
        self.used = torch.from_numpy(np.concatenate([np.zeros((LAGS, n_experts), np.uint8), by_visit]))

    def inputs(self, tokens: Tensor, horizon: Tensor) -> tuple[Tensor, Tensor]:
        """Features (L, B, N_FEATURES, E) and routing (L, B, LAGS, E) known ``horizon`` (B,) visits before."""
        features = self.features[self.row[tokens]].float().transpose(0, 1)
        visits = tokens[:, None] * self.n_layers + torch.arange(self.n_layers)
        lags = []
        for lag in range(1, LAGS + 1):
            known = (visits - lag >= self.first_visit[tokens][:, None]) & (horizon[:, None] <= lag)
            lags.append((self.used[visits - lag + LAGS].float() * known[..., None]).transpose(0, 1))
        return features, torch.stack(lags, 2)


def fit_predictor(
    trace: TokenTrace,
    validation: TokenTrace | None = None,
    steps: int = 1500,
    hidden: int = 96,
    batch: int = 192,
    learning_rate: float = 5e-3,
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
    trace = first_tokens(trace, MAX_FIT_TOKENS, seed)
    started = time.perf_counter()
    n, n_layers, n_experts = trace.n_tokens, trace.n_layers, trace.n_experts
    counts = trace.loads()
    popularity = (counts / n).astype(np.float32)
    batches = _Batches(trace, popularity, np.float16)
    used = use(trace.experts, n_experts)
    # Counted from before the token, so that a use by the token itself is at distance 1.
    distance_ = np.where(used > 0, 1, np.minimum(next_use(used, trace.seq_starts) + 1, 1000)).astype(np.int16)
    ends = np.repeat(trace.seq_starts + trace.seq_lens, trace.seq_lens)
    distance, left = torch.from_numpy(distance_), torch.from_numpy(ends - np.arange(n))
    within = torch.tensor(WITHIN)
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
        target = (ahead <= within).float()
        # Where the sequence ends inside the window, only a use is known, not its absence.
        known = (target > 0) | (left[tokens][None, :, None, None] >= within)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
        loss = (losses * known).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
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
