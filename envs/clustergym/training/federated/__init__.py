"""Federated learning: communication matrices, exchange of policies between agents, replayable environments, plots."""
