"""Write the bundled sample trace ``traces/synthetic.npz``: ``python traces/make_synthetic.py``."""

from __future__ import annotations

from pathlib import Path

from clustergym.traces import SyntheticConfig, TokenTrace, synthetic_trace

# 8 of the 26 layers of DeepSeek-V2-Lite keep the file below 900 kB. All other parameters are defaults.
CONFIG = SyntheticConfig(n_tokens=24_000, n_layers=8, first_layer=1)
SEED = 0


def bundled_sample() -> TokenTrace:
    """The trace that ``TokenTrace.load("synthetic")`` returns."""
    return synthetic_trace(CONFIG, seed=SEED)


if __name__ == "__main__":
    path = bundled_sample().save(Path(__file__).with_name("synthetic.npz"))
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
