"""The benchmark: versioned suites of frozen tasks, runs of built-in and submitted entries, and the leaderboard."""
