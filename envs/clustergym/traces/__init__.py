"""Token traces: loading, checking, slicing, statistics, a synthetic generator, and readers for what engines record."""

from clustergym.traces.load_trace import LoadTrace, load_any_trace
from clustergym.traces.synthetic import SyntheticConfig, synthetic_trace
from clustergym.traces.token_trace import TokenTrace, bundled_traces

__all__ = ["LoadTrace", "SyntheticConfig", "TokenTrace", "bundled_traces", "load_any_trace", "synthetic_trace"]
