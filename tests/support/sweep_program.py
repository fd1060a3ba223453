"""A tiny trainer for tests of sweeps: scalars, checkpoints, --resume, a result line. Its score is −(x − 3)² + seed."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

parser = argparse.ArgumentParser()
for flag, kind in (("--x", float), ("--steps", int), ("--pause", float), ("--seed", int), ("--run-dir", Path)):
    parser.add_argument(flag, type=kind, default=0)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
with open(args.run_dir / "starts.txt", "a") as file:
    file.write(f"{os.getpid()} {os.getppid()} {'resumed' if args.resume else 'fresh'}\n")
if args.x == 9:
    raise RuntimeError(f"cannot train with x = {args.x}")
score = -((args.x - 3) ** 2) + args.seed
checkpoint = args.run_dir / "checkpoint.pt"
writer = EventFileWriter(str(args.run_dir))
for step in range(int(checkpoint.read_text()) if args.resume else 0, args.steps):
    time.sleep(args.pause)
    summary = Summary(value=[Summary.Value(tag="score", simple_value=score + step - args.steps)])
    writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    writer.flush()
    checkpoint.write_text(str(step + 1))
print("result " + json.dumps({"score": score, "steps": args.steps}))
