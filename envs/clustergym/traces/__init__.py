"""Token traces: loading, checks, slices, statistics, a synthetic generator, and readers for recordings of engines."""

from clustergym.traces.load_trace import LoadTrace, load_any_trace
from clustergym.traces.splits import SPLITS, split_trace
from clustergym.traces.synthetic import SyntheticConfig, synthetic_trace
from clustergym.traces.token_trace import TokenTrace, bundled_traces, load_traces

__all__ = [
    "SPLITS",
    "LoadTrace",
    "SyntheticConfig",
    "TokenTrace",
    "bundled_traces",
    "load_any_trace",
    "load_traces",
    "split_trace",
    "synthetic_trace",
]
