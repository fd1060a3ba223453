"""Files of TokenTrace: what is saved is loaded again, and every invalid file is refused with a reason."""

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
from small_traces import BLOCKS, same, small_trace, traces


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
