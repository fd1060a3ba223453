"""The benchmark: versioned suites of frozen tasks, runs of built-in and submitted entries, and the leaderboard.

| module | content |
| --- | --- |
| `suites` | frozen tasks, tracks, limits |
| `entries` | who takes part: by name, or submitted code |
| `worker_function` | calls submitted code in a subprocess, with limits |
| `worker` | the program of that subprocess |
| `budget` | planners with as many operations as agents |
| `run_task` | one entry on one task: its scores |
| `results` | result files and their signatures |
| `leaderboard` | tables, places and the plot |
"""
