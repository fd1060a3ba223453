"""Shared helpers: atomic files, threads, statistics, checkpoints, drawing. Imports nothing else of clustergym."""
