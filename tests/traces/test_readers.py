"""Readers of engines: a recording in the format of each engine gives back its routing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engine_files as files
from clustergym import TokenTrace, cli
from clustergym.moe_placement.specs import get_model
from clustergym.traces import LoadTrace, load_any_trace
from clustergym.traces.readers import ReadOptions, detect, read_trace
from clustergym.traces.readers.base import natural
from recordings import (
    DENSE,
    EXPERTS,
    LAYERS,
    LENS,
    LOGICAL,
    PASSES,
    SLOTS,
    SMALL,
    TOKENS,
    TOP_K,
    counts_of,
    expect,
    loads_of,
    tokens_of,
)


class TestSGLang:
    def test_per_token(self, tmp_path: Path) -> None:
        """Physical ids are mapped, dense layers and padding removed, 8 columns cut to 3. Phases become domains."""
        path = files.sglang_per_token(tmp_path / "r.pt", LOGICAL, DENSE, SLOTS, PASSES)
        trace = tokens_of(path)
        expect(trace, lens=[25, 15] + [1] * 20)
        assert trace.n_experts == EXPERTS
        assert trace.domains.tolist() == ["prefill"] * 2 + ["decode"] * 20

    def test_recorded_ids_are_physical(self, tmp_path: Path) -> None:
        """The ids in the file differ from the logical ids, so the test above does test the mapping."""
        path = files.sglang_per_token(tmp_path / "r.pt", LOGICAL, DENSE, SLOTS, PASSES)
        dump = torch.load(path, weights_only=True)
        routed = dump["records"][0]["topk_ids_of_layer"]
        assert routed.shape == (DENSE + LAYERS, 45, 8)
        assert (routed[:DENSE] == -1).all()
        assert not np.array_equal(routed[DENSE:, :40, :3].numpy().transpose(1, 0, 2), LOGICAL[:40])

    def test_ranks_are_ordered_by_forward_pass(self, tmp_path: Path) -> None:
        """Two ranks record passes 7, 8 and 9. The trace has pass 7 of both ranks first, then pass 8, then pass 9."""
        passes = [{"n": 10, "mode": 1, "lens": [10], "id": i} for i in (7, 8, 9)]
        paths = [
            files.sglang_per_token(tmp_path / f"r{r}.pt", LOGICAL[30 * r : 30 * (r + 1)], DENSE, SLOTS, passes, rank=r)
            for r in range(2)
        ]
        order = [start for i in range(3) for start in (10 * i, 30 + 10 * i)]
        expected = np.concatenate([LOGICAL[start : start + 10] for start in order])
        expect(tokens_of(paths), expected, lens=[10] * 6)
        expect(tokens_of(paths[::-1]), np.concatenate([expected[s : s + 10] for s in (10, 0, 30, 20, 50, 40)]))

    def test_counts_are_ordered_by_forward_pass(self, tmp_path: Path) -> None:
        counts = np.zeros((3, DENSE + LAYERS, SLOTS.shape[1]), int)
        counts[:, DENSE:] = np.array([1, 2, 3])[:, None, None]
        path = files.sglang_per_pass(tmp_path / "a.pt", counts, SLOTS)
        dump = torch.load(path, weights_only=True)
        dump["records"].reverse()
        torch.save(dump, path)
        assert (np.diff(loads_of(path).counts.sum((1, 2))) > 0).all()

    def test_target_verify_is_speculative(self, tmp_path: Path) -> None:
        passes = [{"n": 50, "mode": 5, "lens": None}, {"n": 10, "mode": 2, "lens": None}]
        path = files.sglang_per_token(tmp_path / "r.pt", LOGICAL, DENSE, SLOTS, passes)
        assert tokens_of(path).domains.tolist() == ["speculative"] * 50 + ["decode"] * 10

    def test_ranks_are_joined_and_copies_are_dropped(self, tmp_path: Path) -> None:
        one = [{"n": 30, "mode": 1, "lens": [30], "id": 7}]
        paths = [
            files.sglang_per_token(tmp_path / "r0.pt", LOGICAL[:30], DENSE, SLOTS, one, rank=0),
            files.sglang_per_token(tmp_path / "r1.pt", LOGICAL[30:], DENSE, SLOTS, one, rank=1),
            files.sglang_per_token(tmp_path / "r2.pt", LOGICAL[30:], DENSE, SLOTS, one, rank=2),
        ]
        expect(tokens_of(paths), lens=[30, 30])

    def test_per_pass(self, tmp_path: Path) -> None:
        """Counts per slot become counts per expert, summed over ranks. Dense layers are removed."""
        physical = files.to_physical(LOGICAL, SLOTS[DENSE:])
        per_pass = np.zeros((2, 2, DENSE + LAYERS, SLOTS.shape[1]), int)
        for rank in range(2):
            for p in range(2):
                part = physical[rank * 30 + p * 15 : rank * 30 + p * 15 + 15]
                for l in range(LAYERS):
                    per_pass[rank, p, DENSE + l] = np.bincount(part[:, l].ravel(), minlength=SLOTS.shape[1])
        paths = [files.sglang_per_pass(tmp_path / f"r{r}.pt", per_pass[r], SLOTS, r) for r in range(2)]
        trace = loads_of(paths, model=SMALL)
        assert trace.counts.shape == (2, LAYERS, EXPERTS)
        np.testing.assert_array_equal(trace.loads(), counts_of(LOGICAL, EXPERTS))
        np.testing.assert_array_equal(
            trace.counts[0], counts_of(np.concatenate([LOGICAL[:15], LOGICAL[30:45]]), EXPERTS)
        )
        assert (trace.layer_ids.tolist(), trace.top_k, trace.model) == ([2, 3, 4, 5], TOP_K, "small")

    def test_stat_drops_unused_steps_and_dense_layers(self, tmp_path: Path) -> None:
        counts = np.zeros((3, DENSE + LAYERS, EXPERTS), int)
        counts[:, DENSE:] = np.random.default_rng(1).integers(0, 9, (3, LAYERS, EXPERTS))
        trace = loads_of(files.sglang_stat(tmp_path / "s.pt", counts, buffer=10))
        np.testing.assert_array_equal(trace.counts, counts[:, DENSE:])
        assert trace.layer_ids.tolist() == [2, 3, 4, 5]

    @pytest.mark.parametrize("layout", ["json", "jsonl", "lines"])
    def test_routed_experts_over_http(self, tmp_path: Path, layout: str) -> None:
        answers = [files.sglang_base64(LOGICAL[a:b], DENSE) for a, b in ((0, 25), (25, 40), (40, 60))]
        if layout == "json":
            path = tmp_path / "answers.json"
            path.write_text(json.dumps([{"text": "…", "meta_info": {"routed_experts": a, "id": "x"}} for a in answers]))
        elif layout == "jsonl":
            path = tmp_path / "answers.jsonl"
            path.write_text("".join(json.dumps({"meta_info": {"routed_experts": a}}) + "\n" for a in answers))
        else:
            path = tmp_path / "answers.txt"
            path.write_text("\n".join(answers) + "\n\n")
        assert detect([path]) == "sglang"
        expect(tokens_of(path, model=SMALL), lens=LENS)
        expect(tokens_of(path, n_layers=DENSE + LAYERS, top_k=TOP_K), lens=LENS)
        with pytest.raises(ValueError, match="give --model, or --n-layers"):
            tokens_of(path)
        with pytest.raises(ValueError, match="not a multiple of 7 layers"):
            tokens_of(path, n_layers=7, top_k=TOP_K)

    @pytest.mark.parametrize("kind", ["tokens", "passes", "stat"])
    def test_dumps_of_another_model_are_refused(self, kind: str, tmp_path: Path) -> None:
        path, counts = tmp_path / "r.pt", np.ones((2, DENSE + LAYERS, EXPERTS), int)
        counts[:, :DENSE] = 0
        if kind == "tokens":
            files.sglang_per_token(path, LOGICAL, DENSE, SLOTS, PASSES)
        elif kind == "passes":
            files.sglang_per_pass(path, np.repeat(counts[:, :, :1], SLOTS.shape[1], axis=2), SLOTS)
        else:
            files.sglang_stat(path, counts, 2)
        trace = read_trace([path], None, ReadOptions(model=SMALL))
        assert (trace.layer_ids.tolist(), trace.n_experts) == ([2, 3, 4, 5], EXPERTS)
        others: list[tuple[dict[str, int], str]] = [
            ({"n_experts": 16}, "12 experts recorded, expected 16"),
            ({"n_dense": 1}, "4 MoE layers recorded, but small has 4: layer 1 is missing"),
            ({"n_layers": 5}, "4 MoE layers recorded, but small has 5: layer 6 is missing"),
        ]
        if kind == "tokens":
            others += [
                ({"top_k": 4}, "tokens use at most 3 experts, expected top-4"),
                ({"top_k": 2}, "more than top-2"),
            ]
        for changes, message in others:
            with pytest.raises(ValueError, match=message):
                read_trace([path], None, ReadOptions(model=replace(SMALL, **changes)))

    def test_wrong_shapes_and_kinds(self, tmp_path: Path) -> None:
        stat = files.sglang_stat(tmp_path / "s.pt", np.ones((1, LAYERS, EXPERTS), int), 2)
        token = files.sglang_per_token(tmp_path / "r.pt", LOGICAL, DENSE, SLOTS, PASSES)
        for given_, message in [
            ([1, 2], "contains a list"),
            ({"a": 1}, r"has the keys \['a'\]"),
            ({"logical_count": torch.zeros(2, 2)}, r"logical_count .* is shape \(2, 2\)"),
            ({"logical_count": torch.zeros(1, 2, 2)}, "expected an integer tensor"),
            ({"logical_count": torch.zeros(1, 2, 2, dtype=torch.int32)}, "every step of the recording is empty"),
            ({"records": [], "last_physical_to_logical_map": torch.zeros(1, 1)}, "'records' is empty"),
            ({"records": [{"global_physical_count": torch.ones(2, 9, dtype=torch.int32)}],
              "last_physical_to_logical_map": torch.from_numpy(SLOTS)}, r"counts of shape \(2, 9\)"),
            ({"records": [{"global_physical_count": torch.ones(6, 16, dtype=torch.int32)}],
              "last_physical_to_logical_map": torch.from_numpy(SLOTS + 900)}, "map of 16 slots names experts"),
        ]:  # fmt: skip
            torch.save(given_, tmp_path / "bad.pt")
            with pytest.raises(ValueError, match=message):
                read_trace([tmp_path / "bad.pt"])
        with pytest.raises(ValueError, match=r"stat dump and .* a per_token dump"):
            read_trace([stat, token])
        dump = torch.load(token, weights_only=True)
        dump["records"][1]["topk_ids_of_layer"][3, 0, 0] = 99
        torch.save(dump, token)
        with pytest.raises(ValueError, match=r"r\.pt, record 1: physical expert 99 in layer 3, but there are 16 slots"):
            read_trace([token])


class TestVLLM:
    @pytest.mark.parametrize(("n_experts", "dtype"), [(12, np.uint8), (256, np.uint8), (384, np.uint16)])
    def test_npy(self, tmp_path: Path, n_experts: int, dtype: Any) -> None:
        logical = files.routing(TOKENS, LAYERS, TOP_K, n_experts)
        for i, (a, b) in enumerate(((0, 25), (25, 40), (40, 60))):
            array = files.vllm_array(logical[a:b], DENSE, n_experts)
            assert array.dtype == dtype
            np.save(tmp_path / f"answer{i}.npy", array)
        trace = tokens_of(tmp_path, n_experts=n_experts)  # dense layers are detected by their zeros
        expect(trace, logical, lens=LENS)
        assert trace.n_experts == n_experts

    def test_files_are_sorted_by_number(self) -> None:
        assert sorted([Path("r10"), Path("r9"), Path("r1")], key=natural) == [Path("r1"), Path("r9"), Path("r10")]

    def test_base64_over_http(self, tmp_path: Path) -> None:
        path = tmp_path / "answers.jsonl"
        answers = [files.vllm_base64(LOGICAL[a:b], DENSE, EXPERTS) for a, b in ((0, 25), (25, 40), (40, 60))]
        path.write_text("".join(json.dumps({"choices": [{"text": "", "routed_experts": a}]}) + "\n" for a in answers))
        assert detect([path]) == "vllm"
        expect(tokens_of(path, model=SMALL), lens=LENS)

    def test_dense_layers(self, tmp_path: Path) -> None:
        path = tmp_path / "a.npy"
        np.save(path, files.vllm_array(LOGICAL, DENSE, EXPERTS))
        expect(tokens_of(path, dense_layers=(0, 1)))
        with pytest.raises(ValueError, match=r"layer 3 is treated as dense, but token 0 uses expert"):
            tokens_of(path, dense_layers=(0, 1, 3))
        with pytest.raises(ValueError, match="dense layer 9 given, but layers 0 … 5 were recorded"):
            tokens_of(path, dense_layers=(9,))
        with pytest.raises(ValueError, match="6 layers recorded, but mixtral-8x7b has 32 MoE layers"):
            tokens_of(path, model=get_model("mixtral-8x7b"), top_k=TOP_K)
        with pytest.raises(ValueError, match="3 experts per token recorded, expected top-2"):
            tokens_of(path, top_k=2)
        np.save(path, LOGICAL)  # an engine that does not record dense layers
        expect(tokens_of(path, model=SMALL), first_layer=DENSE)

    def test_top_1_cannot_tell_dense_from_expert_0(self, tmp_path: Path) -> None:
        one = np.array([[[0], [1]], [[0], [2]]], np.uint8)
        np.save(tmp_path / "a.npy", one)
        with pytest.raises(ValueError, match="layer 0 is 0 for every token: is it dense"):
            tokens_of(tmp_path / "a.npy")
        expect(tokens_of(tmp_path / "a.npy", dense_layers=()), one, first_layer=0)

    def test_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.npy"
        for array, message in [
            (np.zeros((3, 2)), "float64"),
            (np.zeros((3, 2), np.uint8), r"shape \(3, 2\)"),
            (np.zeros((0, 2, 2), np.uint8), "no tokens in the files"),
            (np.full((2, 2, 1), 70_000), "not routed experts"),
            (np.full((2, 2, 2), 3, np.uint8), "appears twice"),
        ]:
            np.save(path, array)
            with pytest.raises(ValueError, match=message):
                tokens_of(path, dense_layers=())


class TestUncapturedTokens:
    """A token whose experts are all 0 was not captured by the engine."""

    ARRAY = files.vllm_array(LOGICAL[:20], DENSE, EXPERTS)

    def lose(self, *tokens: int) -> Any:
        array = self.ARRAY.copy()
        array[list(tokens)] = 0
        return array

    def test_dropped_and_counted_by_place(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", self.lose(3, 7))
        np.save(tmp_path / "b.npy", self.lose())
        np.save(tmp_path / "c.npy", self.lose(19))
        paths = [tmp_path / name for name in ("a.npy", "b.npy", "c.npy")]
        for model in (SMALL, None):
            options = ReadOptions(model=model)
            trace = read_trace(paths, "vllm", options)
            assert isinstance(trace, TokenTrace)
            kept = [i for i in range(20) if i not in (3, 7)]
            expect(trace, np.concatenate([LOGICAL[kept], LOGICAL[:20], LOGICAL[:19]]), lens=[18, 20, 19])
            assert options.dropped.by_place == {str(tmp_path / "a.npy"): 2, str(tmp_path / "c.npy"): 1}

    def test_one_layer_is_enough(self, tmp_path: Path) -> None:
        array = self.lose()
        array[5, DENSE + 1] = 0
        np.save(tmp_path / "a.npy", array)
        expect(tokens_of(tmp_path / "a.npy", model=SMALL), np.delete(LOGICAL[:20], 5, axis=0))

    def test_sglang_names_the_request(self, tmp_path: Path) -> None:
        lost = LOGICAL[:20].copy()
        lost[2] = 0
        lines = [files.sglang_base64(LOGICAL[:20], DENSE), files.sglang_base64(lost, DENSE)]
        (tmp_path / "r.txt").write_text("\n".join(lines))
        options = ReadOptions(model=SMALL)
        read_trace([tmp_path / "r.txt"], "sglang", options)
        assert options.dropped.by_place == {f"{tmp_path / 'r.txt'}, line 2": 1}

    def test_strict_refuses(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", self.lose(3))
        with pytest.raises(ValueError, match=r"a\.npy: token 3 was not captured, its experts are all 0"):
            tokens_of(tmp_path / "a.npy", model=SMALL, strict=True)

    def test_top_1_may_use_expert_0(self, tmp_path: Path) -> None:
        one = np.zeros((4, 2, 1), np.uint8)
        np.save(tmp_path / "a.npy", one)
        assert tokens_of(tmp_path / "a.npy", dense_layers=()).n_tokens == 4

    def test_more_lost_than_kept_is_refused(self, tmp_path: Path) -> None:
        """A dense layer that is taken for an MoE layer looks like tokens that were never captured."""
        np.save(tmp_path / "a.npy", self.ARRAY)
        with pytest.raises(ValueError, match=r"dropped 20 tokens .* is a layer dense\? Give --model or --dense-layers"):
            tokens_of(tmp_path / "a.npy", dense_layers=(0,))
        np.save(tmp_path / "a.npy", self.lose(*range(20)))
        with pytest.raises(ValueError, match="every layer is 0 for every token"):
            tokens_of(tmp_path / "a.npy")

    def test_command_reports(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        np.save(tmp_path / "a.npy", self.lose(3, 7))
        out = tmp_path / "t.npz"
        command = ["trace", "import", "vllm", str(tmp_path / "a.npy"), "-o", str(out), "--dense-layers", "0", "1"]
        assert cli.main(command) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"dropped 2 tokens that the engine did not capture (all experts are 0): {tmp_path / 'a.npy'} (2)" in said
        assert TokenTrace.load(out).n_tokens == 18
        out.unlink()
        assert cli.main([*command, "--strict"]) == 2
        assert "was not captured" in capsys.readouterr().err
        assert not out.exists()


class TestTensorRTLLM:
    COUNTS = np.random.default_rng(2).integers(0, 50, (2, 3, LAYERS, EXPERTS))

    def test_ranks_are_summed_and_raw_files_skipped(self, tmp_path: Path) -> None:
        folder = files.tensorrt_llm(tmp_path / "stats", self.COUNTS, EXPERTS, DENSE, TOP_K)
        assert detect([folder]) == "tensorrt-llm"
        trace = loads_of(folder)
        np.testing.assert_array_equal(trace.counts, self.COUNTS.sum(0))
        assert (trace.layer_ids.tolist(), trace.top_k) == ([2, 3, 4, 5], TOP_K)
        only = loads_of([folder / "rank1.safetensors"])  # meta_info.json is in the same folder
        np.testing.assert_array_equal(only.counts, self.COUNTS[1])

    def test_iterations_are_sorted_as_numbers(self, tmp_path: Path) -> None:
        counts = np.arange(1, 13)[None, :, None, None] * np.ones((1, 12, 1, EXPERTS), int)
        trace = loads_of(files.tensorrt_llm(tmp_path / "s", counts, EXPERTS, 0, TOP_K))
        assert trace.counts[:, 0, 0].tolist() == list(range(1, 13))

    def test_counts_per_slot_need_the_slot_plan(self, tmp_path: Path) -> None:
        slots = SLOTS[DENSE:]
        per_slot = np.random.default_rng(3).integers(0, 50, (1, 2, LAYERS, slots.shape[1]))
        folder = files.tensorrt_llm(tmp_path / "s", per_slot, EXPERTS, DENSE, TOP_K)
        with pytest.raises(ValueError, match=r"layer 2 has 16 counts for 12 experts.*--slot-plan"):
            loads_of(folder)
        plan = tmp_path / "plan.yaml"
        rows = "\n".join(f"  {DENSE + l}: {row.tolist()}" for l, row in enumerate(slots))
        plan.write_text(f"num_slots: 16\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n{rows}\n")
        trace = loads_of(folder, slot_plan=plan)
        expected = np.zeros((LAYERS, EXPERTS), int)
        for l in range(LAYERS):
            for p, e in enumerate(slots[l]):
                expected[l, e] += per_slot[0, :, l, p].sum()
        np.testing.assert_array_equal(trace.loads(), expected)

    def test_with_the_balancer_on_meta_info_counts_slots(self, tmp_path: Path) -> None:
        """``num_experts`` is then the number of slots. The slot plan and the model give the number of experts."""
        slots = SLOTS[DENSE:]
        per_slot = np.random.default_rng(3).integers(0, 50, (2, 2, LAYERS, slots.shape[1]))
        folder = files.tensorrt_llm(tmp_path / "s", per_slot, slots.shape[1], DENSE, TOP_K)
        plan = files.tensorrt_llm_plan(tmp_path / "plan.yaml", slots, DENSE)
        expected = np.zeros((LAYERS, EXPERTS), int)
        for l in range(LAYERS):
            np.add.at(expected[l], slots[l], per_slot.sum((0, 1))[l])
        for options in ({}, {"model": SMALL}):
            trace = loads_of(folder, slot_plan=plan, **options)
            np.testing.assert_array_equal(trace.loads(), expected)
            assert trace.n_experts == EXPERTS
        with pytest.raises(ValueError, match=r"16 experts recorded, expected 12: .* give --slot-plan"):
            loads_of(folder, model=SMALL)
        files.tensorrt_llm_plan(plan, slots[:, :-1], DENSE)
        with pytest.raises(ValueError, match="16 slots recorded, but the slot plan has 15"):
            loads_of(folder, slot_plan=plan)
        files.tensorrt_llm_plan(plan, slots[:-1], DENSE)
        with pytest.raises(ValueError, match="layer 5 was recorded, but the slot plan has no such layer"):
            loads_of(folder, slot_plan=plan)
        files.tensorrt_llm_plan(plan, slots + 1, DENSE)
        with pytest.raises(ValueError, match=r"layer 2: slots hold experts 0 … 11, found"):
            loads_of(folder, slot_plan=plan, model=SMALL)
        with pytest.raises(ValueError, match="no slot plan at"):
            loads_of(folder, slot_plan=tmp_path / "absent.yaml")

    def test_mtp_layers_may_follow(self, tmp_path: Path) -> None:
        counts = np.random.default_rng(2).integers(1, 50, (1, 3, LAYERS + 1, EXPERTS))
        folder = files.tensorrt_llm(tmp_path / "s", counts, EXPERTS, DENSE, TOP_K)
        trace = loads_of(folder, model=replace(SMALL, n_mtp=1))
        assert trace.layer_ids.tolist() == [2, 3, 4, 5, 6]
        with pytest.raises(ValueError, match="5 MoE layers recorded, but small has 4: layer 6 is not one of them"):
            loads_of(folder, model=SMALL)
        with pytest.raises(ValueError, match="5 MoE layers recorded, but small has 6: layer 7 is missing"):
            loads_of(folder, model=replace(SMALL, n_layers=6))

    def test_refused(self, tmp_path: Path) -> None:
        from safetensors.numpy import save_file

        folder = files.tensorrt_llm(tmp_path / "s", self.COUNTS, EXPERTS, DENSE, TOP_K)
        with pytest.raises(ValueError, match="12 experts recorded, expected 64"):
            loads_of(folder, model=get_model("deepseek-v2-lite"))
        whole = (folder / "rank0.safetensors").read_bytes()
        for cut in (0, 4, 100, len(whole) - 1):
            (folder / "rank0.safetensors").write_bytes(whole[:cut])
            with pytest.raises(ValueError, match=r"rank0\.safetensors: not a complete \.safetensors file"):
                loads_of(folder)
        save_file({"weights": np.zeros(3, np.int32)}, folder / "rank0.safetensors")
        with pytest.raises(ValueError, match="tensor 'weights': expected ITERATION_LAYER"):
            loads_of(folder)
        save_file({"7_5": np.zeros(EXPERTS, np.int32)}, folder / "rank0.safetensors")
        with pytest.raises(ValueError, match="iteration 7 has no counts for layer 2"):
            loads_of(folder)
        (folder / "meta_info.json").write_text("{}")
        with pytest.raises(ValueError, match="expected positive num_experts"):
            loads_of(folder)


def test_detection_errors_name_the_problem(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text("1,2")
    (tmp_path / "b.json").write_text("{}")
    np.save(tmp_path / "c.npy", np.zeros(3))
    torch.save({}, tmp_path / "d.pt")
    (tmp_path / "empty").mkdir()
    for names, message in [
        (["a.xml"], "not a recording of a known engine"),
        (["b.json"], "not a recording of a known engine"),
        (["c.npy", "d.pt"], r"different engines: .*d\.pt from sglang, .*c\.npy from vllm"),
        (["empty"], "no recording"),
        (["absent"], "no file or folder"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_trace([tmp_path / n for n in names])
    with pytest.raises(ValueError, match="unknown engine 'tgi'; the engines are: sglang, vllm"):
        read_trace([tmp_path], "tgi")


def test_import_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logical = files.routing(20, 26, 6, 64)
    source = tmp_path / "a.npy"
    np.save(source, files.vllm_array(logical, 1, 64))
    for engine in (["vllm"], []):
        out = tmp_path / f"trace{len(engine)}.npz"
        assert cli.main(["trace", "import", *engine, str(source), "--model", "deepseek-v2-lite", "-o", str(out)]) == 0
        trace = TokenTrace.load(out)
        expect(trace, logical, first_layer=1)
        assert trace.model == "deepseek-v2-lite"
        assert "vllm: TokenTrace" in capsys.readouterr().out.replace("\n", "")
    counts = np.random.default_rng(0).integers(1, 9, (1, 4, 26, 64))
    folder = files.tensorrt_llm(tmp_path / "stats", counts, 64, 1, 6)
    assert cli.main(["trace", "import", str(folder), "-o", str(tmp_path / "loads.npz")]) == 0
    loaded = load_any_trace(tmp_path / "loads.npz")
    assert isinstance(loaded, LoadTrace)
    np.testing.assert_array_equal(loaded.counts, counts[0])
    assert cli.main(["trace", "info", str(tmp_path / "loads.npz")]) == 0
    assert "counts only" in capsys.readouterr().out
    with pytest.raises(ValueError, match="it is a LoadTrace, counts without tokens"):
        TokenTrace.load(tmp_path / "loads.npz")
