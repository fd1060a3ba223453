"""An expert cache that uses the exported files, in plain numpy: ``python cache_example.py TRACE.npz``."""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class ExpertCache:
    """Decayed counts decide what is evicted, counts × transitions what is loaded before the router asks for it."""

    def __init__(self, folder: Path) -> None:
        tables, self.rule = load_file(folder / "tables.safetensors"), json.loads((folder / "cache.json").read_text())
        self.popularity, self.lifts = tables["popularity"], tables["lifts"]
        self.resident = np.zeros(self.popularity.shape, bool)
        for layer, experts in enumerate(json.loads((folder / "hot_set.json").read_text())["experts"]):
            self.resident[layer, experts] = True
        self.counts, self.tokens = np.zeros(self.popularity.shape), np.zeros(len(self.popularity))
        self.last = np.full(self.popularity.shape, -1000.0)

    def _evict(self, layer: int, spared: list[int]) -> None:
        """Drop the resident with the lowest score. Experts of layers that come later in the token go first."""
        n, rule = len(self.resident), self.rule
        recent = rule["recency"] / (self.tokens[:, None] - self.last)
        score = self.counts + rule["prior"] * self.popularity + recent
        score = score - rule["distance"] / n * ((np.arange(n) - layer - 1) % n)[:, None]
        score[~self.resident] = np.inf
        score[spared] = np.inf
        self.resident[np.unravel_index(score.argmin(), score.shape)] = False

    def visit(self, layer: int, experts: np.ndarray, max_prefetches: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """The router chose ``experts``. Returns those to load now, and (layer, expert) to load while it computes."""
        missing = experts[~self.resident[layer, experts]]
        self.counts[layer] *= self.rule["decay"]
        self.counts[layer, experts] += 1
        self.last[layer, experts] = self.tokens[layer]
        self.tokens[layer] += 1
        self.resident[layer, missing] = True
        for _ in missing:
            self._evict(layer, [])
        loads: list[tuple[int, int]] = []
        coming = [(layer + h) % len(self.resident) for h in (1, 2, 3)]
        for h, (l, threshold) in enumerate(zip(coming, self.rule["thresholds"], strict=True)):
            seen = (1 - self.rule["decay"] ** self.tokens[l]) / (1 - self.rule["decay"])
            share = 0.98 * (self.counts[l] + 8 * self.popularity[l]) / (seen + 8) + 0.002
            odds = np.log(share / (1 - share)) + 0.6 * self.lifts[h, layer][experts].sum(0)
            chance = np.where(self.resident[l], 0, 1 / (1 + np.exp(-odds)))
            for e in np.argsort(-chance)[: max_prefetches - len(loads)]:
                if chance[e] > threshold + self.rule["backlog"] * len(loads):
                    self.resident[l, e] = True
                    self._evict(layer, coming)
                    loads.append((l, int(e)))
        return missing, loads


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("give a trace: python cache_example.py TRACE.npz")
    cache, experts = ExpertCache(Path(__file__).parent), np.load(sys.argv[1])["experts"].astype(int)[:2000]
    n = sum(len(cache.visit(l, e[e >= 0], 1)[0]) for token in experts for l, e in enumerate(token))
    print(f"{n / len(experts):.2f} of {experts[0].size} experts per token had to be waited for")
