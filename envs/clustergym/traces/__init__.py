"""Token traces: loading, checking, slicing, statistics, and a synthetic generator."""

from clustergym.traces.synthetic import SyntheticConfig, synthetic_trace
from clustergym.traces.token_trace import TokenTrace, bundled_traces

__all__ = ["SyntheticConfig", "TokenTrace", "bundled_traces", "synthetic_trace"]
