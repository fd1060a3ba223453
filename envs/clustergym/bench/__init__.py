"""The benchmark: versioned suites of frozen tasks, runs of anybody's planner or agent, and the leaderboard."""
