"""TokenTrace: files, slices, statistics calculated by hand, and every input that must be refused."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.traces import TokenTrace, arrays, bundled_traces
from clustergym.traces.statistics import (
    coactivation_groups,
    domain_divergence,
    next_layer_predictability,
    next_token_overlap,
    window_divergence,
)

# Two blocks of experts, {0, 1} and {2, 3}: a token uses one block in layer 0 and the other in layer 1.
BLOCKS = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[2, 3], [0, 1]], [[2, 3], [0, 1]]])


def small_trace(**changes: Any) -> TokenTrace:
    """Six tokens in three sequences of two domains; token t uses experts t and t + 1 (mod 6) in both layers."""
    tokens = np.arange(6)
    experts = np.stack([tokens, (tokens + 1) % 6], axis=1)[:, None, :].repeat(2, axis=1)
    given_ = {"n_experts": 6, "layer_ids": [3, 5], "seq_lens": [1, 2, 3], "domains": np.array(["a", "b", "a"])}
    return TokenTrace(experts, **{**given_, "model": "toy", "name": "small", **changes})  # type: ignore[arg-type]


def same(a: TokenTrace, b: TokenTrace) -> bool:
    arrays = ("experts", "layer_ids", "seq_lens", "domains")
    return (a.n_experts, a.model) == (b.n_experts, b.model) and all(
        np.array_equal(getattr(a, field), getattr(b, field)) for field in arrays
    )


@st.composite
def traces(draw: st.DrawFn, min_sequences: int = 1) -> TokenTrace:
    """Valid traces of every small shape, with padding, up to three domains, and sometimes ids beyond int8."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_experts = draw(st.sampled_from([2, 5, 127, 128, 129, 300]))
    n_layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, min(4, n_experts)))
    seq_lens = draw(st.lists(st.integers(1, 5), min_size=min_sequences, max_size=6))
    shape = (sum(seq_lens), n_layers)
    experts = rng.random((*shape, n_experts)).argsort(2)[:, :, :top_k]
    experts[rng.random(experts.shape) < draw(st.sampled_from([0.0, 0.4]))] = -1
    # Every sequence keeps one id, because a trace with only padding is refused.
    experts[:, 0, 0] = np.where(experts[:, 0, 0] < 0, experts[:, 0].max(1), experts[:, 0, 0])
    experts[:, 0, 1:][experts[:, 0, 1:] == experts[:, 0, :1]] = -1
    experts[:, 0, 0] = np.maximum(experts[:, 0, 0], 0)
    labels = draw(st.lists(st.sampled_from(["a", "b", "ccc"]), min_size=len(seq_lens), max_size=len(seq_lens)))
    return TokenTrace(
        experts,
        n_experts=n_experts,
        layer_ids=rng.permutation(50)[:n_layers],
        seq_lens=np.array(seq_lens),
        domains=np.array(labels),
        model=draw(st.sampled_from([None, "toy"])),
    )


class TestConstruction:
    def test_defaults(self) -> None:
        trace = TokenTrace(np.array([[0, 4], [2, 1], [3, 3]]))
        assert trace.experts.shape == (3, 2, 1)
        assert trace.experts.dtype == np.int16
        assert trace.n_experts == 5
        assert trace.layer_ids.tolist() == [0, 1]
        assert trace.seq_lens.tolist() == [3]
        assert trace.domain_names == ["all"]
        assert trace.model is None

    def test_shape_and_starts(self) -> None:
        trace = small_trace()
        assert (trace.n_tokens, trace.n_layers, trace.top_k, trace.n_sequences) == (6, 2, 2, 3)
        assert trace.seq_starts.tolist() == [0, 1, 3]
        assert trace.domain_names == ["a", "b"]

    def test_repr_names_the_shape(self) -> None:
        assert "6 tokens in 3 sequences, 2 layers, top-2 of 6 experts" in repr(small_trace())

    def test_a_writable_array_is_copied(self) -> None:
        mine = np.zeros((2, 1, 1), dtype=np.int16)
        trace = TokenTrace(mine, n_experts=4)
        mine[:] = 3
        assert trace.experts.max() == 0

    def test_padding_may_repeat(self) -> None:
        assert TokenTrace(np.array([[[-1, 2, -1]]])).loads().tolist() == [[0, 0, 1]]

    @pytest.mark.parametrize(
        ("experts", "message"),
        [
            (np.zeros(3, dtype=int), r"shape \(3,\): expected \(tokens, layers\) or \(tokens, layers, top_k\)"),
            (np.zeros((1, 1, 1, 1), dtype=int), "expected"),
            (np.zeros((2, 2)), "dtype float64: expert ids must be integers"),
            (np.zeros((2, 2), dtype=bool), "dtype bool"),
            (np.array([[0, None]], dtype=object), "dtype object"),
            (np.array([["0"]]), "integers"),
            (np.zeros((0, 2, 2), dtype=int), "the trace is empty"),
            (np.zeros((2, 0, 2), dtype=int), "the trace is empty"),
            (np.zeros((2, 2, 0), dtype=int), "the trace is empty"),
            (np.full((2, 2, 2), -1), "every entry is the pad"),
            (np.array([[0], [-2]]), "expert id -2 at token 1, layer 0: ids are 0 or more"),
            (np.array([[0], [40_000]]), "n_experts is 40001: expected 1 … 32767"),
            (np.array([[0], [2**63]], dtype=np.uint64), "n_experts is"),
            (np.array([[[0, 1]], [[3, 3]]]), "expert 3 appears twice at token 1, layer 0"),
            (np.array([[[0, 1, 2], [4, 2, 4]]]), "expert 4 appears twice at token 0, layer 1"),
        ],
    )
    def test_bad_experts(self, experts: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            TokenTrace(experts)

    def test_a_repeated_expert_is_found_after_the_first_block_of_rows(self) -> None:
        experts = np.tile(np.array([[[0, 1]]]), (70_000, 1, 1))
        experts[69_999] = 1
        with pytest.raises(ValueError, match="expert 1 appears twice at token 69999, layer 0"):
            TokenTrace(experts)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"n_experts": 5}, "expert id 5 at token 4, layer 0, but n_experts is 5"),
            ({"n_experts": -1}, "n_experts is -1"),
            ({"layer_ids": [1]}, r"layer_ids has shape \(1,\), but the trace has 2 layers"),
            ({"layer_ids": [1, 1]}, "distinct"),
            ({"layer_ids": [-1, 1]}, "not negative"),
            ({"layer_ids": [0.0, 1.0]}, "layer_ids has dtype float64"),
            ({"seq_lens": [1, 2, 4]}, "seq_lens sums to 7, but experts has 6 tokens"),
            ({"seq_lens": [0, 3, 3]}, "at least 1"),
            ({"seq_lens": [[1, 2, 3]]}, "at least 1"),
            ({"seq_lens": [1.0, 2.0, 3.0]}, "seq_lens has dtype float64"),
            ({"seq_lens": [2**62, 2**62, 2**62, 2**62 - 6, 6, 6]}, "seq_lens sums to"),
            ({"domains": np.array(["a", "b"])}, r"domains has shape \(2,\), but there are 3 sequences"),
            ({"domains": np.array([0, 1, 0])}, "domains must be strings"),
        ],
    )
    def test_bad_labels(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            small_trace(**changes)


class TestFiles:
    @settings(max_examples=40, deadline=None)
    @given(trace=traces())
    def test_npz_round_trip(self, trace: TokenTrace, tmp_path_factory: pytest.TempPathFactory) -> None:
        path = trace.save(tmp_path_factory.mktemp("trace") / "t.npz")
        assert same(TokenTrace.load(path), trace)
        assert TokenTrace.load(path).name == "t"
        assert [p.name for p in path.parent.iterdir()] == ["t.npz"]

    @pytest.mark.parametrize("highest", [126, 127, 128, 129, 32766])
    def test_the_highest_id_fits_the_small_dtype(self, tmp_path: Path, highest: int) -> None:
        trace = TokenTrace(np.array([[highest], [-1]]))
        assert same(TokenTrace.load(trace.save(tmp_path / "t.npz")), trace)

    @pytest.mark.parametrize("shape", [(4, 3), (4, 3, 1)])
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_npy_contains_the_array(self, tmp_path: Path, shape: tuple[int, ...], order: Any) -> None:
        experts = np.asarray(np.arange(12).reshape(shape), order=order)
        np.save(tmp_path / "bare.npy", experts)
        trace = TokenTrace.load(tmp_path / "bare.npy")
        assert np.array_equal(trace.experts, np.arange(12).reshape(4, 3, 1))
        assert (trace.n_experts, trace.n_sequences, trace.name) == (12, 1, "bare")

    def test_npz_of_another_tool(self, tmp_path: Path) -> None:
        """Only ``experts`` is required, ``category`` is read as ``domains``, and unknown arrays are ignored."""
        np.savez(
            tmp_path / "t.npz", experts=BLOCKS.astype(np.uint8), category=np.array(["x"]), weights=np.ones((4, 2, 2))
        )
        trace = TokenTrace.load(str(tmp_path / "t.npz"))
        assert np.array_equal(trace.experts, BLOCKS)
        assert trace.domain_names == ["x"]

    def test_saving_replaces_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "t.npz"
        path.write_bytes(b"old")
        small_trace().save(path)
        assert same(TokenTrace.load(path), small_trace())

    def test_bundled_name(self) -> None:
        assert "synthetic" in bundled_traces()
        trace = TokenTrace.load("synthetic")
        assert trace.experts.shape == (24_000, 8, 6)
        assert trace.layer_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        assert (trace.n_experts, trace.model) == (64, "deepseek-v2-lite")
        assert trace.domain_names == ["domain0", "domain1", "domain2", "domain3"]

    def test_unknown_name_lists_the_bundled_names(self) -> None:
        with pytest.raises(ValueError, match=r"unknown trace 'sinthetic'.*bundled names: .*synthetic"):
            TokenTrace.load("sinthetic")

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"no trace file at .*absent\.npz"):
            TokenTrace.load(tmp_path / "absent.npz")

    def test_only_npz_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"saved as \.npz, found 't\.npy'"):
            small_trace().save(tmp_path / "t.npy")
        assert not list(tmp_path.iterdir())

    def test_save_into_a_missing_folder_creates_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            small_trace().save(tmp_path / "absent" / "t.npz")
        assert not list(tmp_path.iterdir())

    def test_a_failed_save_keeps_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = small_trace().save(tmp_path / "t.npz")
        before = path.read_bytes()

        def full_disk(file: Any, array: Any, allow_pickle: bool) -> None:
            file.write(b"half of it")
            raise OSError("no space left on device")

        monkeypatch.setattr("numpy.lib.format.write_array", full_disk)
        with pytest.raises(OSError, match="no space"):
            small_trace(model="other").save(path)
        assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]
        assert path.read_bytes() == before

    @pytest.mark.parametrize("suffix", [".npz", ".npy"])
    def test_every_truncation_is_refused(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"t{suffix}"
        if suffix == ".npz":
            small_trace().save(path)
        else:
            np.save(path, BLOCKS.astype(np.int8))
        whole = path.read_bytes()
        for length in {0, 1, 5, 20, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:length])
            with pytest.raises(ValueError, match=rf"t\{suffix}"):
                TokenTrace.load(path)

    def test_trailing_bytes_are_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "t.npy", BLOCKS.astype(np.int8))
        with open(tmp_path / "t.npy", "ab") as file:
            file.write(b"xx")
        with pytest.raises(ValueError, match="the header announces 16 bytes, found 18"):
            TokenTrace.load(tmp_path / "t.npy")

    @settings(max_examples=60, deadline=None)
    @given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
    def test_a_flipped_byte_gives_a_value_error_or_a_valid_trace(
        self, position: float, value: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        path = small_trace().save(tmp_path_factory.mktemp("flip") / "t.npz")
        data = bytearray(path.read_bytes())
        data[int(position * len(data))] = value
        path.write_bytes(data)
        try:
            loaded = TokenTrace.load(path)
        except ValueError:
            return
        assert loaded.n_tokens == 6

    @pytest.mark.parametrize("kind", ["npy", "npz member", "raw pickle named .npz", "raw pickle named .npy"])
    def test_pickles_are_never_run(self, tmp_path: Path, kind: str) -> None:
        witness = tmp_path / "witness"
        bomb = np.array([[Touch(witness)]], dtype=object)
        path = tmp_path / ("t.npy" if kind in ("npy", "raw pickle named .npy") else "t.npz")
        if kind == "npy":
            np.save(path, bomb, allow_pickle=True)
        elif kind == "npz member":
            np.savez(path, allow_pickle=True, experts=bomb)
        else:
            path.write_bytes(pickle.dumps(bomb))
        why = "not a" if kind.startswith("raw") else "pickled Python objects, which are never loaded"
        with pytest.raises(ValueError, match=rf"t\.np.*{why}"):
            TokenTrace.load(path)
        assert not witness.exists()
        with open(path, "rb") as file:  # the pickle does run when it is loaded
            if kind.startswith("raw"):
                pickle.load(file)
                assert witness.exists()

    def test_a_false_header_allocates_no_memory(self, tmp_path: Path) -> None:
        member = io.BytesIO()
        np.lib.format.write_array_header_1_0(member, {"descr": "|i1", "fortran_order": False, "shape": (10**12, 26, 6)})
        with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
            archive.writestr("experts.npy", member.getvalue() + b"\0" * 12)
        with pytest.raises(ValueError, match="the header announces 156000000000000 bytes, found 12"):
            TokenTrace.load(tmp_path / "t.npz")

    def test_a_zip_bomb_is_refused_by_its_directory(self, tmp_path: Path) -> None:
        """Zeros compress a thousand times: 300 MB in 300 kB are refused before anything is unpacked."""
        path, tokens = tmp_path / "t.npz", 300_000_000
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|i1", "fortran_order": False, "shape": (tokens, 1)})
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("experts.npy", "w", force_zip64=True) as member,
        ):
            member.write(header.getvalue())
            for _ in range(tokens // 1_000_000):
                member.write(bytes(1_000_000))
        assert path.stat().st_size < 400_000
        with pytest.raises(ValueError, match=r"t\.npz: \d+ bytes would unpack to 3000001\d\d, .* zip bomb"):
            TokenTrace.load(path)

    def test_small_files_and_ordinary_compression_are_accepted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "t.npz"
        np.savez_compressed(path, experts=np.zeros((100_000, 1), np.int8))
        assert TokenTrace.load(path).n_tokens == 100_000  # above the ratio, but small
        monkeypatch.setattr(arrays, "SMALL_BYTES", 50_000)
        with pytest.raises(ValueError, match="zip bomb"):
            TokenTrace.load(path)
        ids = np.random.default_rng(0).integers(0, 64, (100_000, 1)).astype(np.int8)
        np.savez_compressed(path, experts=ids)
        assert np.array_equal(TokenTrace.load(path).experts[:, :, 0], ids)

    def test_a_member_longer_than_its_announced_size_is_refused(self, tmp_path: Path) -> None:
        """The directory announces too small a size: bytes after it are never unpacked."""
        path = tmp_path / "t.npz"
        np.savez_compressed(path, experts=np.zeros((1000, 1), np.int8))
        with zipfile.ZipFile(path) as archive:
            size = archive.infolist()[0].file_size
        correct = path.read_bytes()
        changed = correct.replace(size.to_bytes(4, "little"), (size - 500).to_bytes(4, "little"))
        assert changed != correct
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"not a readable \.npy array"):
            TokenTrace.load(path)

    def test_a_read_only_array_is_shared(self) -> None:
        ids = np.arange(8, dtype=np.int16).reshape(4, 2, 1)
        assert not np.shares_memory(TokenTrace(ids).experts, ids)
        ids.setflags(write=False)
        assert np.shares_memory(TokenTrace(ids).experts, ids)

    @pytest.mark.parametrize(
        ("n_experts", "pad", "stored"), [(128, True, "i1"), (256, False, "u1"), (256, True, "i2"), (257, False, "i2")]
    )
    def test_ids_are_stored_in_the_smallest_dtype(self, tmp_path: Path, n_experts: int, pad: bool, stored: str) -> None:
        trace = TokenTrace(np.array([[n_experts - 1], [-1 if pad else 0]]))
        path = trace.save(tmp_path / "t.npz")
        with np.load(path) as fields:
            assert fields["experts"].dtype.str[1:] == stored
        assert same(TokenTrace.load(path), trace)

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"routes": BLOCKS}, r"no array 'experts' in the file, found \['routes'\]"),
            ({"experts": BLOCKS, "n_experts": 0}, "n_experts must be one positive integer"),
            ({"experts": BLOCKS, "n_experts": 4.0}, "n_experts must be one positive integer"),
            ({"experts": BLOCKS, "n_experts": [4, 4]}, "n_experts must be one positive integer"),
            ({"experts": BLOCKS, "n_experts": 3}, "but n_experts is 3"),
            ({"experts": BLOCKS, "model": ["a", "b"]}, "model must be one string"),
            ({"experts": BLOCKS, "model": 7}, "model must be one string"),
            ({"experts": BLOCKS, "seq_lens": [3]}, "seq_lens sums to 3, but experts has 4 tokens"),
            ({"experts": BLOCKS.astype(float)}, "integers"),
        ],
    )
    def test_bad_fields(self, tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
        np.savez(tmp_path / "t.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            TokenTrace.load(tmp_path / "t.npz")


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class TestSlices:
    def test_select_keeps_the_given_order(self) -> None:
        part = small_trace().select(sequences=[2, 0])
        assert part.experts[:, 0, 0].tolist() == [3, 4, 5, 0]
        assert part.seq_lens.tolist() == [3, 1]
        assert part.n_experts == 6
        assert part.model == "toy"

    def test_select_domain(self) -> None:
        part = small_trace().select(domains="b")
        assert part.experts[:, 0, 0].tolist() == [1, 2]
        assert part.domain_names == ["b"]
        assert small_trace().select(domains=["a", "b"]).n_tokens == 6

    def test_select_layers_by_position(self) -> None:
        trace = TokenTrace(BLOCKS, layer_ids=np.array([3, 5]))
        part = trace.select(layers=[1])
        assert part.layer_ids.tolist() == [5]
        assert np.array_equal(part.experts, BLOCKS[:, 1:])

    def test_select_everything_at_once(self) -> None:
        part = small_trace().select(sequences=[1, 2], domains="a", layers=[0])
        assert part.experts[:, 0, 0].tolist() == [3, 4, 5]
        assert part.layer_ids.tolist() == [3]

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            ({"sequences": [3]}, "sequence 3 asked for, but the ids are 0 … 2"),
            ({"sequences": [-1, 2]}, "sequence -1 asked for"),
            ({"sequences": []}, "no sequence is selected"),
            ({"sequences": np.array([True, False, True])}, "found a mask"),
            ({"sequences": [1], "domains": "a"}, "no sequence is selected"),
            ({"domains": "c"}, "no domain 'c'; the domains are: a, b"),
            ({"layers": [2]}, "the positions are 0 … 1"),
            ({"layers": []}, "the positions are 0 … 1"),
            ({"layers": [0, 0]}, "distinct"),
        ],
    )
    def test_bad_selections(self, what: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            small_trace().select(**what)

    @settings(max_examples=60, deadline=None)
    @given(trace=traces(min_sequences=2), seed=st.integers(0, 5), data=st.data())
    def test_split_is_a_partition(self, trace: TokenTrace, seed: int, data: st.DataObject) -> None:
        fraction = data.draw(st.sampled_from([0.1, 0.5, 0.9]))
        marked = mark(trace)
        first, second = marked.split(fraction, seed=seed)
        ids = sorted([*first.domains, *second.domains])
        assert ids == sorted(marked.domains)
        assert not set(first.domains) & set(second.domains)
        assert first.n_tokens + second.n_tokens == trace.n_tokens
        again = marked.split(fraction, seed=seed)
        assert same(again[0], first)
        assert same(again[1], second)

    @settings(max_examples=60, deadline=None)
    @given(trace=traces(min_sequences=2), seed=st.integers(0, 5))
    def test_the_first_half_is_never_smaller(self, trace: TokenTrace, seed: int) -> None:
        first, second = trace.split(0.5, seed=seed)
        assert first.n_tokens >= second.n_tokens

    def test_split_divides_every_domain(self) -> None:
        trace = TokenTrace(
            np.zeros((40, 1), dtype=int), seq_lens=np.full(20, 2), domains=np.array(["a"] * 12 + ["b"] * 8)
        )
        first, second = trace.split(0.75, seed=1)
        assert [(first.domains == d).sum() for d in "ab"] == [9, 6]
        assert [(second.domains == d).sum() for d in "ab"] == [3, 2]

    def test_one_sequence_per_domain_splits_with_the_larger_part_first(self) -> None:
        trace = TokenTrace(np.zeros((9, 1), dtype=int), seq_lens=np.array([1, 8]), domains=np.array(["a", "b"]))
        first, second = trace.split()
        assert (first.n_tokens, second.n_tokens) == (8, 1)

    @pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, float("nan")])
    def test_bad_fraction(self, fraction: float) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            small_trace().split(fraction)

    def test_one_sequence_cannot_be_split(self) -> None:
        with pytest.raises(ValueError, match="the trace has one sequence, so nothing can be held out"):
            TokenTrace(BLOCKS).split()


def mark(trace: TokenTrace) -> TokenTrace:
    """The same trace with a different domain label for each sequence."""
    labels = np.array([f"{d}-{i}" for i, d in enumerate(trace.domains)])
    return TokenTrace(trace.experts, trace.n_experts, trace.layer_ids, trace.seq_lens, labels, trace.model)


class TestConcat:
    def test_keeps_or_replaces_the_labels(self) -> None:
        joined = TokenTrace.concat([small_trace(), small_trace().select(domains="b")])
        assert joined.domains.tolist() == ["a", "b", "a", "b"]
        assert joined.seq_lens.tolist() == [1, 2, 3, 2]
        assert joined.experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 1, 2]
        assert (joined.name, joined.model) == ("small+small", "toy")
        named = TokenTrace.concat([small_trace(), small_trace()], ["first", "2nd"])
        assert named.domains.tolist() == ["first"] * 3 + ["2nd"] * 3

    @settings(max_examples=30, deadline=None)
    @given(trace=traces())
    def test_concat_inverts_select(self, trace: TokenTrace) -> None:
        parts = [trace.select(sequences=[i]) for i in range(trace.n_sequences)]
        assert same(TokenTrace.concat(parts), trace)

    def test_concat_refuses_different_models(self) -> None:
        with pytest.raises(ValueError, match="empty"):
            TokenTrace.concat([])
        with pytest.raises(ValueError, match=r"\(2, 2, 7\) and small has \(2, 2, 6\)"):
            TokenTrace.concat([small_trace(), small_trace(n_experts=7)])
        with pytest.raises(ValueError, match=r"layer_ids \[3, 6\] and small has \[3, 5\]"):
            TokenTrace.concat([small_trace(), small_trace(layer_ids=[3, 6])])
        with pytest.raises(ValueError, match="1 domains given for 2 traces"):
            TokenTrace.concat([small_trace(), small_trace()], ["one"])
        with pytest.raises(ValueError, match="different models"):
            TokenTrace.concat([small_trace(model="mixtral-8x7b"), small_trace(model="deepseek-v3")])
        assert TokenTrace.concat([small_trace(model=None), small_trace(model="deepseek-v3")]).model == "deepseek-v3"


class TestStatistics:
    def test_loads(self) -> None:
        assert small_trace().loads().tolist() == [[2] * 6] * 2
        padded = TokenTrace(np.array([[[0, -1]], [[2, 0]]]), n_experts=4)
        assert padded.loads().tolist() == [[2, 0, 1, 0]]

    def test_statistics_of_two_blocks_of_experts_by_hand(self) -> None:
        trace = TokenTrace(BLOCKS, seq_lens=np.array([2, 2]), domains=np.array(["a", "b"]))
        assert trace.statistics(n_gpus=2) == pytest.approx(
            {
                "max_mean_load": 1.0,
                "load_gini": 0.0,
                "gpus_per_token": 1.0,
                # A GPU is not visited if neither of its two experts, each used by half of the tokens, is drawn.
                "gpus_per_token_independent": 2 * (1 - 0.5 * 0.5),
                "gpus_per_token_grouped": 1.0,
                # Held-out tokens all use the block of one GPU.
                "grouped_max_mean_load": 2.0,
                # P(0, 1) = 1/2, independent experts would give 1/4; times K / (K − 1) = 2.
                "coactivation_lift": 4.0,
                "next_layer_predictability": 1.0,
                "next_layer_chance": 0.5,
                "next_token_overlap": 1.0,
                # With one sequence per domain, shuffling the labels changes nothing.
                "domain_divergence": 0.0,
                "domain_divergence_shuffled": 1.0,
                "window_divergence": 1.0,
            }
        )

    def test_statistics_of_uneven_loads_by_hand(self) -> None:
        stats = TokenTrace(np.array([[0], [1], [1], [1]])).statistics(n_gpus=2)
        assert stats["max_mean_load"] == 1.5
        assert stats["load_gini"] == 0.25
        assert stats["coactivation_lift"] == 1.0
        assert stats["next_layer_predictability"] == stats["next_layer_chance"] == 0.0

    def test_scattered_blocks_can_be_grouped(self) -> None:
        """Experts 0 and 2, and 1 and 3, are used together. Grouping puts each pair on one GPU."""
        experts = np.tile(np.array([[[0, 2]], [[1, 3]]]), (8, 1, 1))
        stats = TokenTrace(experts, seq_lens=np.full(4, 4)).statistics(n_gpus=2)
        assert stats["gpus_per_token"] == 2.0
        assert stats["gpus_per_token_grouped"] == 1.0
        assert stats["grouped_max_mean_load"] == 1.0

    def test_grouping_is_measured_on_held_out_sequences(self) -> None:
        """In the longer sequence, 0 is used with 2. In the held-out one, 0 is used with 1."""
        trace = TokenTrace(
            np.array([[[0, 1]], [[0, 2]], [[0, 2]]]),
            n_experts=4,
            seq_lens=np.array([1, 2]),
            domains=np.array(["a", "b"]),
        )
        assert trace.statistics(n_gpus=2)["gpus_per_token_grouped"] == 2.0

    def test_coactivation_groups_by_hand(self) -> None:
        together = np.array([[5, 0, 1, 4, 0], [0, 4, 3, 0, 1], [1, 3, 4, 0, 0], [4, 0, 0, 4, 0], [0, 1, 0, 0, 1]])
        # 0 is the busiest. It takes 3 and then 2 (used once with 0). Of the others, 1 is busier than 4.
        assert coactivation_groups(together, 2).tolist() == [0, 1, 0, 0, 1]
        assert coactivation_groups(together, 5).tolist() == [0, 1, 2, 3, 4]

    @settings(max_examples=30, deadline=None)
    @given(seed=st.integers(0, 1000), n_experts=st.integers(1, 20), n_gpus=st.integers(1, 24))
    def test_coactivation_groups_have_equal_sizes(self, seed: int, n_experts: int, n_gpus: int) -> None:
        counts = np.random.default_rng(seed).integers(0, 9, (n_experts, n_experts))
        gpu = coactivation_groups(counts + counts.T, n_gpus)
        contiguous = np.arange(n_experts) * n_gpus // n_experts
        assert np.bincount(gpu, minlength=n_gpus).tolist() == np.bincount(contiguous, minlength=n_gpus).tolist()

    def test_divergence_of_a_known_pair(self) -> None:
        """Between (1, 0) and (1/2, 1/2): (log2(4/3) + log2(2/3)/2 + log2(2)/2) / 2 bits."""
        trace = TokenTrace(np.array([[0]] * 4 + [[0], [0], [1], [1]]))
        expected = (np.log2(4 / 3) + 0.5 * np.log2(2 / 3) + 0.5) / 2
        assert window_divergence(trace) == pytest.approx(expected)
        assert expected == pytest.approx(0.3113, abs=1e-4)

    def test_domain_divergence_of_disjoint_and_equal_domains(self) -> None:
        experts = np.repeat([0, 1], 40)[:, None]
        apart = TokenTrace(experts, seq_lens=np.full(40, 2), domains=np.repeat(["a", "b"], 20))
        found, shuffled = domain_divergence(apart)
        assert found == 1.0
        assert shuffled < 0.1
        equal = TokenTrace(experts, seq_lens=np.full(40, 2), domains=np.tile(["a", "b"], 20))
        assert domain_divergence(equal)[0] == 0.0

    def test_the_largest_domains_are_compared(self) -> None:
        """Twelve domains are compared. The two large ones, 1 bit apart, are among them whatever their names."""
        sizes = [1] * 20 + [50, 50]
        experts = np.concatenate([np.zeros(20 + 50, int), np.ones(50, int)])[:, None]
        labels = np.array([f"a{i:02d}" for i in range(20)] + ["y", "z"])
        trace = TokenTrace(experts, seq_lens=np.array(sizes), domains=labels)
        # Of the 66 pairs of {y, z and ten small ones}, those 11 with z are 1 bit apart.
        assert domain_divergence(trace)[0] == pytest.approx(11 / 66)

    def test_next_token_overlap_stays_within_a_sequence(self) -> None:
        assert next_token_overlap(TokenTrace(BLOCKS)) == pytest.approx(2 / 3)
        assert next_token_overlap(TokenTrace(BLOCKS, seq_lens=np.array([2, 2]))) == 1.0
        assert next_token_overlap(TokenTrace(BLOCKS, seq_lens=np.array([1, 1, 1, 1]))) == 0.0
        padded = TokenTrace(np.array([[[0, -1]], [[1, 0]], [[-1, 1]]]))
        assert next_token_overlap(padded) == pytest.approx((1 + 1) / (2 + 1))

    def test_a_shifted_copy_of_a_layer_is_predictable_and_noise_is_not(self) -> None:
        rng = np.random.default_rng(0)
        here = rng.integers(0, 8, 4000)
        copied = TokenTrace(np.stack([here, (here + 3) % 8], 1))
        assert next_layer_predictability(copied)[0] == 1.0
        noise = TokenTrace(np.stack([here, rng.integers(0, 8, 4000)], 1))
        assert next_layer_predictability(noise) == pytest.approx((1 / 8, 1 / 8), abs=0.02)

    def test_independent_experts_have_no_lift(self) -> None:
        experts = np.random.default_rng(0).random((20_000, 1, 16)).argsort(2)[:, :, :4]
        stats = TokenTrace(experts, n_experts=16).statistics(n_gpus=4)
        # Drawn without repeats, a pair is more likely by E / (E − 1) than the correction K / (K − 1) assumes.
        assert stats["coactivation_lift"] == pytest.approx(16 / 15, abs=0.01)

    @settings(max_examples=40, deadline=None)
    @given(trace=traces(), n_gpus=st.integers(1, 5))
    def test_statistics_are_finite_and_within_bounds(self, trace: TokenTrace, n_gpus: int) -> None:
        stats = trace.statistics(n_gpus)
        assert all(np.isfinite(value) for value in stats.values())
        shares = ("load_gini", "next_layer_predictability", "next_layer_chance", "next_token_overlap")
        bits = ("domain_divergence_shuffled", "window_divergence")
        assert all(-1e-6 <= stats[key] <= 1 + 1e-6 for key in shares + bits)
        most = min(n_gpus, trace.top_k)
        assert all(0 <= stats[key] <= most for key in ("gpus_per_token", "gpus_per_token_grouped"))
        assert 1 - 1e-6 <= stats["grouped_max_mean_load"] <= n_gpus + 1e-6
