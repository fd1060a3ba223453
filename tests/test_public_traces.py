"""Readers of data sets that anybody can download, in the schema of their cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine_files as files
from clustergym.moe_placement.specs import ModelSpec, get_model
from clustergym.traces.readers import detect
from recordings import DENSE, EXPERTS, LAYERS, LENS, LOGICAL, SMALL, TOKENS, TOP_K, expect, loads_of, tokens_of


class TestPublicTraces:
    """Data sets that anybody can download, in the schema of their cards."""

    COUNTS = np.random.default_rng(4).integers(0, 90_000, (3, LAYERS, EXPERTS))

    def test_core12345(self, tmp_path: Path) -> None:
        odd = [1, 3, 5, 7]
        files.core12345(tmp_path / "law" / "q1.json", LOGICAL[:25], odd, 8, prompt=20)
        files.core12345(tmp_path / "maths" / "q2.json", LOGICAL[25:], odd, 8, prompt=1)
        assert detect([tmp_path]) == "core12345"
        trace = tokens_of(tmp_path)
        np.testing.assert_array_equal(trace.experts, LOGICAL)
        assert (trace.layer_ids.tolist(), trace.seq_lens.tolist()) == (odd, [25, 35])
        assert trace.domains.tolist() == ["law", "maths"]
        model = ModelSpec("odd", 4, EXPERTS, TOP_K, 64, 32, layers=tuple(odd))
        assert tokens_of(tmp_path, model=model).model == "odd"
        assert tokens_of(tmp_path, max_tokens=10).n_tokens == 25
        with pytest.raises(ValueError, match="layer 2 is missing"):
            tokens_of(tmp_path, model=SMALL)

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ({}, "expected a list"),
            ([], "expected a list"),
            ([1], "expected an object"),
            ([{"0": None}], "no layer has experts"),
            ([{"a": [[1]]}], "'a' is not a layer"),
            ([{"0": [[1], [1, 2]]}], "rows of different lengths"),
            ([{"0": [[1.5]]}], "expected rows of expert ids"),
            ([{"0": [["1"]]}], "expected rows of expert ids"),
            ([{"0": [[-1]]}], "expert -1"),
            ([{"0": [[99999]]}], "expert 99999"),
            ([{"0": [[2**70]]}], "expected rows of expert ids"),
            ([{"0": [[1]], "1": [[1], [2]]}], "different numbers of tokens"),
            ([{"0": [[1]]}, {"1": [[1]]}], r"layers \[1\], but \[0\]"),
            ([{"0": [[1]]}, {"0": [[1, 2]]}], "different numbers of tokens or experts"),
        ],
    )
    def test_core12345_refused(self, document: Any, message: str, tmp_path: Path) -> None:
        (tmp_path / "q.json").write_text(json.dumps(document))
        with pytest.raises(ValueError, match=message):
            tokens_of(tmp_path / "q.json", "core12345")

    def test_load_history(self, tmp_path: Path) -> None:
        path = files.load_history(tmp_path / "expert-load.json", self.COUNTS)
        assert detect([path]) == "load-history"
        np.testing.assert_array_equal(loads_of(path).counts, self.COUNTS)
        trace = loads_of(path, model=SMALL)
        assert (trace.layer_ids.tolist(), trace.top_k, trace.model) == ([2, 3, 4, 5], TOP_K, "small")
        path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
        np.testing.assert_array_equal(loads_of(path).counts, self.COUNTS)
        with pytest.raises(ValueError, match="4 MoE layers recorded, but deepseek-v2-lite has 26"):
            loads_of(path, model=get_model("deepseek-v2-lite"))

    @pytest.mark.parametrize(
        ("loads", "message"),
        [
            ("[]", "one list of counts per layer"),
            ("[[]]", "one list of counts per layer"),
            ("[[1,2],[3]]", r"layers with \[1, 2\] experts"),
            ("[[1,,2]]", "not a count of tokens"),
            ("[[1.5,2]]", "not a count of tokens"),
            ("[[1,2],3]", "one list of counts per layer"),
            ("[[99999999999999999999]]", "not a count of tokens"),
            ("[[0,0]]", "every step of the recording is empty"),
            ("[[-1,0]]", "no 'logical_expert_load'"),
        ],
    )
    def test_load_history_refused(self, loads: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "h.json").write_text('{"load_history": [{"logical_expert_load": ' + loads + "}]}")
        with pytest.raises(ValueError, match=message):
            loads_of(tmp_path / "h.json")

    def test_flame_moe(self, tmp_path: Path) -> None:
        """Files count layers from 1. Checkpoints become domains."""
        files.flame_moe(tmp_path / "iter_0540", LOGICAL, first_layer=1)
        files.flame_moe(tmp_path / "iter_5473", LOGICAL[::-1], first_layer=1)
        assert detect([tmp_path]) == "flame-moe"
        trace = tokens_of(tmp_path)
        expect(trace, np.concatenate([LOGICAL, LOGICAL[::-1]]), first_layer=1, lens=[TOKENS, TOKENS])
        assert trace.domains.tolist() == ["iter_0540", "iter_5473"]
        assert trace.n_experts == 64
        expect(tokens_of(tmp_path, max_tokens=50), LOGICAL[:50], first_layer=1)
        expect(tokens_of(tmp_path, max_tokens=70), np.concatenate([LOGICAL, LOGICAL[::-1][:10]]), first_layer=1)
        path = tmp_path / "iter_0540" / "layer_03.parquet"
        whole = path.read_bytes()
        for cut in (0, 3, 100, len(whole) - 1):
            path.write_bytes(whole[:cut])
            with pytest.raises(ValueError, match=r"layer_03\.parquet: not a readable Parquet file"):
                tokens_of(tmp_path)

    @pytest.mark.parametrize("name", ["loads.csv", "loads.parquet"])
    @pytest.mark.parametrize("wide", [False, True])
    def test_load_table(self, name: str, wide: bool, tmp_path: Path) -> None:
        path = files.load_table(tmp_path / name, self.COUNTS, DENSE, wide)
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


class TestESFT:
    def test_tasks_are_domains(self, tmp_path: Path) -> None:
        files.esft(tmp_path / "law", LOGICAL[:40], [25, 15])
        files.esft(tmp_path / "intent", LOGICAL[40:], [20])
        assert detect([tmp_path]) == "esft"
        trace = tokens_of([tmp_path / "law", tmp_path / "intent"], model=SMALL)
        expect(trace, first_layer=1, lens=LENS)
        assert trace.domains.tolist() == ["law", "law", "intent"]

    def test_deepseek_is_the_default(self, tmp_path: Path) -> None:
        logical = files.routing(9, 26, 6, 64)
        trace = tokens_of(files.esft(tmp_path / "x", logical, [4, 5]), "esft")
        expect(trace, logical, first_layer=1)
        preset = get_model("deepseek-v2-lite")
        assert (trace.model, trace.n_experts) == ("deepseek-v2-lite", preset.n_experts)
        assert (trace.n_layers, trace.top_k) == (preset.n_layers, preset.top_k)

    def test_refused(self, tmp_path: Path) -> None:
        folder = files.esft(tmp_path / "x", LOGICAL, LENS)
        with pytest.raises(ValueError, match="files for 4 layers, expected 26"):
            tokens_of(folder)
        path = folder / "expert_weights_3.txt"
        good = path.read_text()
        first = good.splitlines()[0]
        for text, message in [
            (good[: len(good) // 2], "is the file truncated"),
            (good.replace("\t\t", "\t"), "line 1: expected ids, two tabs"),
            (good.splitlines()[1] + "\n", "its sequences differ from those of expert_weights_1.txt"),
            (first.replace("\t", "\tx", 1), "expert ids must be numbers"),
            ("1\t2\t\t0.5\t0.5\n", "2 ids are not a multiple of top-3"),
            ("", "no sequence"),
        ]:
            path.write_text(text)
            with pytest.raises(ValueError, match=message):
                tokens_of(folder, model=SMALL)
