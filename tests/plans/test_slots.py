"""``plan --slots auto``: time per layer against KV cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustergym import cli
from clustergym.moe_placement import ClusterSpec, ModelSpec
from clustergym.plans.engines import read_plan
from clustergym.plans.slots import SlotCurve, slot_curve
from plans import small_trace

MODEL = ModelSpec("m", 10, 64, 4, 1000, 1000, kv_bytes=1e4)  # 6 MB per expert, 60 MB per slot of all layers
CLUSTER = ClusterSpec("c", 2, 4)


def curve(us: dict[int, float], **options: Any) -> SlotCurve:
    """The curve of a model whose layer takes ``us`` with so many slots."""

    def plan_with(cluster: ClusterSpec) -> Any:
        return SimpleNamespace(best=SimpleNamespace(served_us=us[cluster.slots_per_gpu or 0]))

    given: dict[str, Any] = {"wanted": 10, "context": 1000, "memory_gb": 0.6, "spares": (0, 1, 2, 4)} | options
    return slot_curve(plan_with, MODEL, CLUSTER, 10, **given)


FASTER = {8: 200.0, 9: 180.0, 10: 179.9, 12: 100.0}


def test_memory_that_no_request_needs_costs_nothing() -> None:
    """One request takes 10 MB. All 10 that are wanted fit beside 12 slots (720 MB)."""
    found = curve(FASTER, memory_gb=1.0)
    assert [point.requests for point in found.points] == [10, 10, 10, 10]
    assert (found.chosen.slots, found.chosen.spare) == (12, 4)


def test_requests_that_do_not_fit_are_paid_for() -> None:
    found = curve(FASTER)
    assert [(p.slots, p.kv_tokens, p.kv_lost, p.requests) for p in found.points] == [
        (8, 12_000, 0, 10), (9, 6_000, 6_000, 6),
    ]  # fmt: skip
    assert found.chosen.slots == 8  # 10 / 200 > 6 / 180; 10 slots leave no room for a request


def test_the_fewest_of_nearly_equal_slots_are_taken() -> None:
    assert curve(FASTER, memory_gb=1.0, spares=(0, 1, 2)).chosen.slots == 9


def test_what_cannot_be_chosen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.48 GB per GPU do not hold 0\.5 GB of experts and the KV cache of one"):
        curve(FASTER, memory_gb=0.48)
    with pytest.raises(ValueError, match=r"--context is 0 and --gpu-memory 0\.6"):
        curve(FASTER, context=0)
    with pytest.raises(ValueError, match="needs the bytes of KV cache per token, which m does not tell"):
        slot_curve(lambda _: pytest.fail("planned"), replace(MODEL, kv_bytes=0), CLUSTER, 10, wanted=1, context=1)


def test_command_writes_a_plan_with_the_chosen_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = small_trace().save(tmp_path / "tiny.npz")
    out, report, results = (tmp_path / name for name in ("p.json", "r.html", "r.json"))
    arguments = ["plan", str(trace), "--cluster", "h800-2x4", "--tokens-per-rank", "8", "--passes", "4",
                 "--planner", "eplb", "--slots", "auto", "-o", str(out), "--report", str(report),
                 "--json", str(results)]  # fmt: skip
    assert cli.main(arguments) == 0
    document = json.loads(results.read_text())
    assert document["slots_per_gpu"] * 8 == len(read_plan(out, "sglang")[0])
    points = document["slot_curve"]["points"]
    assert [point["slots"] for point in points] == [1, 2, 3, 4, 5]  # Mixtral: 11.3 GB per slot, so 64 GB hold five
    assert document["slots_per_gpu"] in [point["slots"] for point in points]
    assert f"{document['slots_per_gpu']} slots per GPU are chosen" in capsys.readouterr().out
    assert report.read_text().count('aria-label="µs per layer by spare slots"') == 1
    plan = tmp_path / "live.json"
    assert cli.main([*arguments[:-6], "-o", str(plan), "--from", str(out)]) == 2
