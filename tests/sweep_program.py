"""A tiny trainer for tests of sweeps. It logs to TensorBoard, saves checkpoints, resumes and prints a result line.

Its final score is −(x − 3)² + seed, and it gets closer to it step by step. Every start adds a line to a file. From
``--hold`` on, a run waits after its first checkpoint until there is a file ``go`` beside the run folders.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path


def write_events(folder: Path, values: list[float], tag: str) -> None:
    """Real event files, as SummaryWriter writes them, without importing torch."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for step, value in enumerate(values):
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    writer.flush()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--x", type=float, required=True)
    parser.add_argument("--kind", default="result", choices=["result", "events", "crash", "silent", "linger"])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--hold", type=float, default=float("inf"))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    with open(args.run_dir.parent / "starts.txt", "a") as file:
        file.write(f"{args.run_dir.name} {os.getpid()} {'resumed' if args.resume else 'fresh'}\n")
    checkpoint = args.run_dir / "checkpoint.pt"
    done = int(checkpoint.read_text()) if args.resume and checkpoint.exists() else 0
    score = -((args.x - 3) ** 2) + args.seed
    for step in range(done, args.steps):
        time.sleep(args.pause)
        checkpoint.write_text(str(step + 1))
        while args.x >= args.hold and not (args.run_dir.parent / "go").exists():
            time.sleep(0.05)
    if args.kind == "crash":
        raise RuntimeError(f"cannot train with x = {args.x}")
    if args.kind in ("events", "linger"):
        write_events(args.run_dir, [score - k for k in range(args.steps, -1, -1)], "eval/score")
    if args.kind == "linger":
        time.sleep(60)
    if args.kind == "result":
        print("training …")
        print("result " + json.dumps({"score": score, "steps": args.steps}))


if __name__ == "__main__":
    main()
