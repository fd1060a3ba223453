"""Readers of data sets that anybody can download, in the schema of their cards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import engine_files as files
from clustergym.traces import LoadTrace, TokenTrace
from clustergym.traces.readers import detect
from recordings import DENSE, EXPERTS, LAYERS, LOGICAL, SMALL, expect, loads_of

ROOT = Path(__file__).resolve().parents[2]


class TestPublicTraces:
    """Data sets that anybody can download, in the schema of their cards."""

    COUNTS = np.random.default_rng(4).integers(0, 90_000, (3, LAYERS, EXPERTS))

    @pytest.mark.parametrize("wide", [False, True])
    def test_load_table(self, wide: bool, tmp_path: Path) -> None:
        path = files.load_table(tmp_path / "loads.csv", self.COUNTS, DENSE, wide)
        assert detect([path]) == "load-table"
        trace = loads_of(path, model=SMALL)
        np.testing.assert_array_equal(trace.counts, self.COUNTS)
        assert trace.layer_ids.tolist() == [2, 3, 4, 5]

    def test_load_table_of_shares(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("layer_id,expert_id,load\n3,0,0.25\n3,1,0.75\n")
        assert loads_of(tmp_path / "a.csv").counts.tolist() == [[[250_000, 750_000]]]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "the file is empty"),
            ("layer,expert\n1,2", "columns layer, expert: expected layer, expert and num_tokens"),
            ("layer,expert,count\n1,2", "row 2: 2 values for 3 columns"),
            ("layer,expert,count\n1,2,x", "could not convert"),
            ("layer,expert,count\n1,2,-3", "is negative"),
            ("layer,expert,count\n1,2,nan", "not finite"),
            ("layer,expert,count\n1.5,2,3", "no integer"),
            ("layer,expert,count\n1,2,1e30", "out of range"),
            ("layer,expert,count\n1,99999,3", "out of range"),
            ("layer,expert,count\n999999,1,3", "out of range"),
            ("layer,expert,count", "no loads in the files"),
            ("layer,num_tokens_per_expert\n1,hello", "'hello' is not a list of loads"),
            ("layer,num_tokens_per_expert\n1,[[1]]", "holds lists"),
            ("layer,expert,count\n1,2,0", "layer 0 has no token"),
            ("step,layer,expert,count\n" + "".join(f"{i},{i % 99},30000,1\n" for i in range(600)), "600 rows for 600"),
        ],
    )
    def test_load_table_refused(self, text: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            loads_of(tmp_path / "a.csv")


def convert(*arguments: object) -> None:
    subprocess.run([sys.executable, ROOT / "traces" / "convert_public.py", *map(str, arguments)], check=True)


def test_convert_core12345(tmp_path: Path) -> None:
    odd = [1, 3, 5, 7]
    paths = [tmp_path / "law" / "q1.json", tmp_path / "maths" / "q2.json"]
    files.core12345(paths[0], LOGICAL[:25], odd, 8, prompt=20)
    files.core12345(paths[1], LOGICAL[25:], odd, 8, prompt=1)
    convert("core12345", *paths, "-o", tmp_path / "trace.npz")
    trace = TokenTrace.load(tmp_path / "trace.npz")
    np.testing.assert_array_equal(trace.experts, LOGICAL)
    assert (trace.layer_ids.tolist(), trace.seq_lens.tolist()) == (odd, [25, 35])
    assert trace.domains.tolist() == ["law", "maths"]


def test_convert_esft(tmp_path: Path) -> None:
    """Tasks are domains. The model is DeepSeek-V2-Lite: its first layer is dense."""
    logical = files.routing(9, 26, 6, 64)
    files.esft(tmp_path / "law", logical[:5], [2, 3])
    files.esft(tmp_path / "intent", logical[5:], [4])
    convert("esft", tmp_path / "law", tmp_path / "intent", "-o", tmp_path / "trace.npz")
    trace = TokenTrace.load(tmp_path / "trace.npz")
    expect(trace, logical, first_layer=1, lens=[2, 3, 4])
    assert trace.domains.tolist() == ["law", "law", "intent"]
    assert (trace.model, trace.n_experts) == ("deepseek-v2-lite", 64)


def test_convert_load_history(tmp_path: Path) -> None:
    counts = np.random.default_rng(4).integers(0, 90_000, (3, 26, 64))
    convert("load-history", files.load_history(tmp_path / "expert-load.json", counts), "-o", tmp_path / "t.npz",
            "--model", "deepseek-v2-lite")  # fmt: skip
    trace = LoadTrace.load(tmp_path / "t.npz")
    np.testing.assert_array_equal(trace.counts, counts)
    assert trace.layer_ids.tolist() == list(range(1, 27))
