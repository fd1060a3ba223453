"""What several commands need."""

from __future__ import annotations

from clustergym.traces import TokenTrace


def load_traces(sources: list[str]) -> TokenTrace:
    """One trace, or several joined with one domain each."""
    twice = sorted({source for source in sources if sources.count(source) > 1})
    if twice:
        raise ValueError(f"trace {twice[0]!r} is given twice: what is held out of one would be planned on in the other")
    traces = [TokenTrace.load(source) for source in sources]
    if len(traces) == 1:
        return traces[0]
    names = [t.name for t in traces]
    # Files of the same name in different folders are still domains of their own.
    return TokenTrace.concat(traces, domains=names if len(set(names)) == len(names) else sources)
