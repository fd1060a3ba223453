"""The trainer of this name is ppo_lstm.py now; that of GPU allocation with an LSTM is ppo_gpu_alloc_lstm.py."""

import sys

sys.exit(print(f"error: {__doc__}", file=sys.stderr) or 2)
