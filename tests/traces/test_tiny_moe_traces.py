"""The traces recorded from the small language model agree with their data card."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from clustergym.moe_placement.specs import model_for
from clustergym.traces import TokenTrace
from clustergym.traces.token_trace import DEFAULT_TRACE
from texts import tidy
from tiny_moe import END, TinyMoE, TinyMoEConfig, decode, encode
from tiny_moe_traces import layer_information

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("tiny_moe", "tiny_moe_ppo")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny_moe", ROOT / "traces" / "make_tiny_moe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def test_default_trace_is_the_recorded_one() -> None:
    assert DEFAULT_TRACE == "tiny_moe"


@pytest.mark.parametrize("name", NAMES)
def test_shape_and_domains(name: str, maker: ModuleType) -> None:
    trace = TokenTrace.load(name)
    config = TinyMoEConfig()
    assert (trace.n_layers, trace.n_experts, trace.top_k) == (config.n_layers, config.n_experts, config.top_k)
    assert list(dict.fromkeys(trace.domains.tolist())) == [*maker.DOMAINS, "generated"]
    for domain in trace.domain_names:
        assert trace.select(domains=domain).n_tokens == maker.Args().tokens
    assert trace.seq_lens.max() <= maker.SEQUENCE[1]
    assert (trace.experts >= 0).all()
    assert (trace.loads() > 0).all(), "an expert that nobody uses: routing has collapsed"
    assert model_for(trace, None).name == "tiny-moe"


def test_both_traces_are_of_the_same_text() -> None:
    before, after = (TokenTrace.load(name) for name in NAMES)
    text = before.domains != "generated"
    assert np.array_equal(before.seq_lens[text], after.seq_lens[after.domains != "generated"])
    n = int(before.seq_lens[text].sum())
    same = (before.experts[:n, :, :, None] == after.experts[:n, :, None, :]).any(3).mean()
    assert 0.5 < same < 1.0


@pytest.mark.parametrize("column", [0, 1])
def test_the_data_card_has_the_statistics_of_the_files(column: int) -> None:
    trace = TokenTrace.load(NAMES[column])
    card = (ROOT / "traces" / "README.md").read_text().split("## The small language model")[1]
    rows = re.findall(r"^\| `(\w+)` \| ([-.\d]+) \| ([-.\d]+) \|$", card, flags=re.M)
    said = {key: values[column] for key, *values in rows}
    found = trace.statistics()
    information, shuffled = layer_information(trace)
    found |= {"layer_information": information, "layer_information_shuffled": shuffled}
    assert said.keys() == found.keys()
    for key, text in said.items():
        assert float(text) == pytest.approx(found[key], abs=0.6 * 10 ** -len(text.split(".")[1])), key


def test_layer_information_by_hand() -> None:
    here = np.repeat(np.arange(8), 500)
    copied, shuffled = layer_information(TokenTrace(np.stack([here, (here + 3) % 8], 1)))
    assert copied == pytest.approx(3.0)  # one of eight experts determines the other: 3 bits
    assert 0 < shuffled < 0.02
    grid = np.stack(np.meshgrid(np.arange(8), np.arange(8)), -1).reshape(-1, 2)
    assert layer_information(TokenTrace(grid))[0] == pytest.approx(0.0, abs=1e-6)
    blocks = np.array([[[0, 1], [2, 3]], [[2, 3], [0, 1]]])
    assert layer_information(TokenTrace(blocks))[0] == pytest.approx(1.0)  # which of two blocks
    assert layer_information(TokenTrace(np.array([[0], [1]]))) == (0.0, 0.0)  # one layer has no next layer


def test_reserved_text_is_not_trained_on(maker: ModuleType) -> None:
    pieces = [f"piece {i}" for i in range(100)]
    learn, reserved = maker.reserve(pieces, random.Random(0))
    assert sorted(learn + reserved) == sorted(pieces)
    assert not set(learn) & set(reserved)
    assert len(reserved) >= 12
    assert maker.paragraphs(iter(["a\n\nb\n \na", "b\n\nc\n"])) == ["a", "b", "c"]


def test_sequences_keep_the_order_of_the_text(maker: ModuleType) -> None:
    rows = maker.sequences(["ab" * 150, "cd" * 40], 350, random.Random(1))
    assert sum(map(len, rows)) == 350
    assert all(48 <= len(row) <= 128 for row in rows[:-1])
    joined = [token for row in rows for token in row]
    assert joined == [*encode("ab" * 150), END, *encode("cd" * 40)][:350]
    with pytest.raises(ValueError, match="3 tokens are reserved, but 10 are to be recorded"):
        maker.sequences(["ab"], 10, random.Random(1))


def test_paths_and_addresses_are_removed() -> None:
    assert tidy("<object at 0x7f0123456789>") == "<object at 0x0>"
    assert tidy('<code f at 0x7fffffff, file "/somewhere/a.py", line 3>') == "<code f at 0x0, line 3>"
    assert tidy('<a href="file:/somewhere/a.py">/somewhere/a.py</a>x') == "x"


def test_every_domain_has_enough_text(maker: ModuleType) -> None:
    for name in ("help", "names"):
        pieces = maker.paragraphs(maker.DOMAINS[name]())
        _, reserved = maker.reserve(pieces, random.Random(0))
        assert sum(map(len, reserved)) > maker.Args().tokens


def test_generated_sequences_start_with_prompts_and_stop_at_the_end(maker: ModuleType) -> None:
    torch.manual_seed(0)
    model = TinyMoE(TinyMoEConfig(n_layers=1, n_experts=4, top_k=2, hidden=16, intermediate=4, n_heads=2))
    rows = {"a": [encode("some text that is long enough to be a prompt") for _ in range(40)]}
    found = maker.generated(model, rows, 1000, seed=3)
    assert sum(map(len, found)) == 1000
    assert all(decode(row).startswith("some text that is long") for row in found[:-1])
    assert all(END not in row[:-1] for row in found)


def test_routing_of_a_small_run(maker: ModuleType) -> None:
    torch.manual_seed(0)
    model = TinyMoE(TinyMoEConfig(n_layers=2, n_experts=4, top_k=2, hidden=16, intermediate=4, n_heads=2))
    rows = {"a": [encode("x" * 60)] * 10, "b": [encode("y" * 50)] * 12}
    trace = maker.routing(model, rows, maker.Args(tokens=400), "toy")
    assert trace.domain_names == ["a", "b", "generated"]
    assert trace.select(domains="generated").n_tokens == 400
    assert trace.model == "tiny-moe"
