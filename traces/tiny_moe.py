"""A small mixture-of-experts language model over characters.

A decoder-only transformer with pre-norm, rotary position embeddings and top-k routed SwiGLU experts. It trains on one
CPU thread in minutes, and its router learns like that of a large model. ``cleanrl_ppo/ppo_llm.py`` trains it, and
``traces/make_tiny_moe.py`` records its routing as the bundled traces ``tiny_moe`` and ``tiny_moe_ppo``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

END = 0
"""Token that ends a paragraph or a response."""
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = 1 + len(ALPHABET)
_TOKEN = {character: i + 1 for i, character in enumerate(ALPHABET)}


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character. Characters outside printable ASCII become ``?``."""
    unknown = _TOKEN["?"]
    return [_TOKEN.get(character, unknown) for character in text]


def decode(tokens: list[int] | torch.Tensor) -> str:
    """Text of token ids up to the first :data:`END`."""
    ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
    if END in ids:
        ids = ids[: ids.index(END)]
    return "".join(ALPHABET[i - 1] for i in ids)


@dataclass(frozen=True)
class TinyMoEConfig:
    """Sizes of a :class:`TinyMoE`. The bundled traces use the defaults."""

    n_layers: int = 4
    """Number of transformer layers, each with attention and experts."""
    n_experts: int = 64
    """Number of experts per layer."""
    top_k: int = 4
    """Number of experts per token and layer."""
    hidden: int = 96
    """Width of an activation, a multiple of 2·``n_heads``."""
    intermediate: int = 16
    """Width of the hidden layer of an expert."""
    n_heads: int = 4
    """Number of attention heads."""
    context: int = 256
    """Maximum number of tokens in a sequence."""

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"tiny MoE: {key} is {value}: expected at least 1")
        if self.top_k > self.n_experts:
            raise ValueError(f"tiny MoE: top_k is {self.top_k}, but there are only {self.n_experts} experts")
        if self.hidden % (2 * self.n_heads):
            raise ValueError(
                f"tiny MoE: hidden is {self.hidden}: expected a multiple of 2·n_heads = {2 * self.n_heads}"
            )


class TinyMoETopKRouter(nn.Module):
    """Chooses the ``top_k`` experts with the largest logits and weights them by a softmax over these logits.

    Returns logits (N, E), weights (N, K) and experts (N, K), like the routers of Hugging Face Transformers. This lets
    :func:`clustergym.traces.record.record` use the same hook for both.
    """

    def __init__(self, config: TinyMoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.randn(config.n_experts, config.hidden) / math.sqrt(config.hidden))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden, self.weight)
        best, experts = logits.topk(self.top_k, dim=-1)
        return logits, best.softmax(-1), experts


class Experts(nn.Module):
    """The experts of one layer: SwiGLU feed-forward networks whose weights are stacked in two tensors."""

    def __init__(self, config: TinyMoEConfig) -> None:
        super().__init__()
        e, d, h = config.n_experts, config.hidden, config.intermediate
        self.w_in = nn.Parameter(torch.randn(e, d, 2 * h) / math.sqrt(d))
        # Scaled down by the depth, as in GPT-2, so that the residual sum over layers keeps its scale.
        self.w_out = nn.Parameter(torch.randn(e, h, d) / math.sqrt(h * 2 * config.n_layers))

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum (N, D) of the outputs of each token's experts (N, K).

        Token-expert pairs are sorted by expert, so that each expert processes its tokens in one matrix multiplication.
        """
        flat = experts.flatten()
        order = torch.argsort(flat, stable=True)
        ends = torch.bincount(flat, minlength=self.w_in.shape[0]).cumsum(0)
        token = order // experts.shape[1]
        gate, up = grouped_mm(hidden[token], self.w_in, ends).chunk(2, dim=-1)
        inside = F.silu(gate) * up * weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, token, grouped_mm(inside, self.w_out, ends))


def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the rows ``ends[e−1]:ends[e]`` by ``weights[e]``, for every e."""
    if rows.device.type == "cpu" and hasattr(F, "grouped_mm"):
        return F.grouped_mm(rows, weights, offs=ends.to(torch.int32))
    return grouped_mm_loop(rows, weights, ends)


def grouped_mm_loop(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Same as :func:`grouped_mm`, for CUDA (torch supports only bfloat16 there) and for older versions of torch."""
    counts = [b - a for a, b in pairwise([0, *ends.tolist()])]
    parts = zip(rows.split(counts), weights.unbind(0), strict=True)
    return torch.cat([part @ weight for part, weight in parts])


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings and a key-value cache for generation."""

    def __init__(self, config: TinyMoEConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        d = config.hidden
        self.w_qkv = nn.Parameter(torch.randn(3 * d, d) / math.sqrt(d))
        self.w_out = nn.Parameter(torch.randn(d, d) / math.sqrt(d * 2 * config.n_layers))

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, cache: Cache | None, layer: int) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = F.linear(x, self.w_qkv).view(b, t, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            start = cache.length
            cache.keys[layer][:, :, start : start + t], cache.values[layer][:, :, start : start + t] = k, v
            seen = (cache.keys[layer][:, :, : start + t], cache.values[layer][:, :, : start + t])
            # One new token attends to all others. A prompt fills an empty cache with causal attention.
            out = F.scaled_dot_product_attention(q, *seen, is_causal=t > 1)
        return F.linear(out.transpose(1, 2).reshape(b, t, d), self.w_out)


class Cache:
    """Keys and values of previous tokens: one tensor (B, heads, length, head width) per layer."""

    def __init__(self, config: TinyMoEConfig, batch: int, length: int, like: torch.Tensor) -> None:
        shape = (batch, config.n_heads, length, config.hidden // config.n_heads)
        self.keys = [like.new_zeros(shape) for _ in range(config.n_layers)]
        self.values = [like.new_zeros(shape) for _ in range(config.n_layers)]
        self.length = 0


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + half]) of each head by the angles of the positions."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Layer(nn.Module):
    def __init__(self, config: TinyMoEConfig) -> None:
        super().__init__()
        self.norm_attention, self.norm_experts = nn.RMSNorm(config.hidden), nn.RMSNorm(config.hidden)
        self.attention, self.experts = Attention(config), Experts(config)
        self.router = TinyMoETopKRouter(config)

    def forward(
        self, x: torch.Tensor, rotation: torch.Tensor, cache: Cache | None, layer: int, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.norm_attention(x), rotation, cache, layer)
        rows = self.norm_experts(x).flatten(0, 1)
        logits, weights, experts = self.router(rows)
        x = x + self.experts(rows, experts, weights).view_as(x)
        return x, balance_loss(logits, experts) if mask is None else balance_loss(logits[mask], experts[mask])


def balance_loss(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Load-balancing loss of the Switch Transformer: E · Σ_e share_e · probability_e, which is 1 for equal loads."""
    n_experts = logits.shape[1]
    share = torch.bincount(experts.flatten(), minlength=n_experts) / experts.numel()
    return n_experts * (share * logits.softmax(-1).mean(0)).sum()


class TinyMoE(nn.Module):
    """The language model. ``forward`` returns logits, ``trunk`` the activations before the last layer."""

    rotations: torch.Tensor

    def __init__(self, config: TinyMoEConfig, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.randn(vocabulary, config.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.hidden)
        half = config.hidden // config.n_heads // 2
        angles = torch.arange(config.context)[:, None] * 1000.0 ** (-torch.arange(half) / half)
        self.register_buffer("rotations", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def trunk(
        self, tokens: torch.Tensor, cache: Cache | None = None, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Activations (B, T, D) of tokens (B, T), and the load-balancing loss (mean over layers).

        Tokens where ``mask`` (B, T) is False are padding and left out of the load-balancing loss.
        With a cache, the tokens follow those in the cache. Pass a prompt with an empty cache, then one token at a time.
        """
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        if end > self.config.context:
            raise ValueError(
                f"a sequence of {end} tokens is longer than the context of the model, {self.config.context}"
            )
        if start and tokens.shape[1] > 1:
            raise ValueError(f"{tokens.shape[1]} tokens after {start} in the cache: pass them one at a time")
        rotation = self.rotations[:, start:end]
        x = self.embedding[tokens]
        losses = []
        for i, layer in enumerate(self.layers):
            x, loss = layer(x, rotation, cache, i, None if mask is None else mask.flatten())
            losses.append(loss)
        if cache is not None:
            cache.length = end
        return self.norm(x), torch.stack(losses).mean()

    def logits(self, activations: torch.Tensor) -> torch.Tensor:
        """Logits (…, V) of the next token, from activations (…, D). The weights are tied to the embedding."""
        return F.linear(activations, self.embedding)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """Logits (B, T, V) of tokens (B, T).

        Other arguments of Transformers models (``attention_mask``) are ignored: attention is causal, so padding on the
        right has no effect on the tokens before it.
        """
        return self.logits(self.trunk(input_ids)[0])

    @torch.no_grad()
    def generate(
        self, prompts: torch.Tensor, n_tokens: int, generator: torch.Generator | None = None, temperature: float = 1.0
    ) -> torch.Tensor:
        """Sample responses (B, n_tokens) to prompts (B, P). All tokens after the first :data:`END` are :data:`END`."""
        cache = Cache(self.config, len(prompts), prompts.shape[1] + n_tokens, self.embedding)
        new, sampled = prompts, []
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
        for _ in range(n_tokens):
            scores = self.logits(self.trunk(new, cache)[0][:, -1])
            token = torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)
            token = token.masked_fill(ended[:, None], END)
            ended = ended | (token[:, 0] == END)
            sampled.append(token)
            new = token
        return torch.cat(sampled, dim=1)
