"""The recorder, on tiny models of five families with random weights. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clustergym.cli import main
from clustergym.traces import TokenTrace
from clustergym.traces.record import find_routers, record, text_batches
from tiny_moe import TinyMoE, TinyMoEConfig

transformers = pytest.importorskip("transformers")

VOCABULARY, EXPERTS, TOP_K = 64, 8, 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 8},
    "Olmoe": {"num_experts": EXPERTS},
    "DeepseekV3": {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "GptOss": {"num_local_experts": EXPERTS, "head_dim": 8},
}


def build(family: str, head: bool = True) -> nn.Module:
    """A model with random weights, also in the routers, which some families initialise with zeros."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(COMMON | FAMILIES[family]))
    model = getattr(transformers, f"{family}ForCausalLM" if head else f"{family}Model")(config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        router = any(name.startswith(path + ".") for path in find_routers(model))
        if router:
            # Random correction biases too, so that the choice is not the top-k of the logits.
            nn.init.normal_(tensor, std=0.5)
    return model.eval()


def chosen_by_hand(family: str, router: nn.Module, hidden: torch.Tensor) -> list[set[int]]:
    """The experts of each row by the published rule of the family, one row at a time."""
    rows = hidden.reshape(-1, COMMON["hidden_size"]).float()
    found = []
    for row in rows:
        logits = [float(row @ weight) for weight in router.weight]
        if family == "GptOss":
            logits = [a + float(b) for a, b in zip(logits, router.bias, strict=True)]
        allowed = list(range(EXPERTS))
        if family == "DeepseekV3":
            bias = router.e_score_correction_bias.tolist()
            logits = [1 / (1 + np.exp(-a)) + b for a, b in zip(logits, bias, strict=True)]
            groups = [allowed[i : i + 2] for i in range(0, EXPERTS, 2)]  # 4 groups of 2, of which 2 are allowed
            best = sorted(groups, key=lambda group: -sum(logits[e] for e in group))[:2]
            allowed = [e for group in best for e in group]
        found.append(set(sorted(allowed, key=lambda e: -logits[e])[:TOP_K]))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_recorded_experts_follow_the_published_rule(family: str) -> None:
    model = build(family)
    ids = torch.randint(1, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 5])  # padded on the right and on the left
    inputs: dict[str, torch.Tensor] = {}
    routers = find_routers(model)
    handles = [
        router.register_forward_pre_hook(lambda _, args, path=path: inputs.__setitem__(path, args[0]))
        for path, router in routers.items()
    ]
    trace = record(model, [{"input_ids": ids, "attention_mask": mask, "domains": ["a", "b", "a"]}])
    for handle in handles:
        handle.remove()

    dense = FAMILIES[family].get("first_k_dense_replace", 0)
    assert trace.layer_ids.tolist() == list(range(dense, 3))
    assert (trace.n_experts, trace.top_k, trace.n_tokens) == (EXPERTS, TOP_K, 16)
    assert trace.seq_lens.tolist() == [7, 4, 5]
    assert trace.domains.tolist() == ["a", "b", "a"]
    kept = mask.flatten().nonzero().squeeze(1).tolist()
    for l, (path, router) in enumerate(routers.items()):
        expected = chosen_by_hand(family, router, inputs[path])
        assert [set(row) for row in trace.experts[:, l].tolist()] == [expected[i] for i in kept]


def test_deepseek_v3_is_not_the_top_k_of_its_logits() -> None:
    """This is why the hook reads the choice of the router: the logits would give other experts."""
    model = build("DeepseekV3")
    router = next(iter(find_routers(model).values()))
    logits, _, chosen = router(torch.randn(200, 32, generator=torch.Generator().manual_seed(2)))
    naive = logits.topk(TOP_K).indices
    assert (chosen.sort(1).values != naive.sort(1).values).any(1).float().mean() > 0.3


def test_batches_and_padding_do_not_change_the_routing_of_a_sequence() -> None:
    model = build("Olmoe", head=False)
    ids = torch.randint(1, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(3))
    together = record(model, [{"input_ids": ids}])
    alone = record(model, ({"input_ids": row[None]} for row in ids))
    wide = torch.cat([ids, torch.zeros(4, 3, dtype=ids.dtype)], dim=1)
    padded = record(model, [{"input_ids": wide, "attention_mask": (wide > 0).long()}])
    for other in (alone, padded):
        assert np.array_equal(np.sort(other.experts, 2), np.sort(together.experts, 2))
        assert other.seq_lens.tolist() == [9] * 4


def test_max_tokens_cuts_the_last_sequence_and_stops() -> None:
    model = build("Mixtral")
    ids = torch.randint(1, VOCABULARY, (3, 5))
    calls: list[int] = []
    trace = record(model, [{"input_ids": ids}] * 9, max_tokens=22, on_batch=calls.append)
    assert trace.seq_lens.tolist() == [5, 5, 5, 5, 2]
    assert calls == [15, 22]


def test_the_model_is_left_unchanged() -> None:
    model = build("Qwen3Moe").train()
    record(model, [{"input_ids": torch.ones(1, 3, dtype=torch.long)}])
    assert model.training
    assert not any(router._forward_hooks for router in find_routers(model).values())
    with pytest.raises(ValueError, match="batch 0 has no 'input_ids'"):
        record(model, [{"ids": 1}])
    assert not any(router._forward_hooks for router in find_routers(model).values())


def test_tiny_moe_is_recorded_by_the_same_hook() -> None:
    torch.manual_seed(0)
    model = TinyMoE(TinyMoEConfig(n_layers=2, n_experts=6, top_k=3, hidden=16, intermediate=4, n_heads=2))
    ids = torch.randint(1, 90, (2, 11))
    trace = record(model, [{"input_ids": ids}], preset="toy")
    assert trace.experts.shape == (22, 2, 3)
    assert (trace.n_experts, trace.model) == (6, "toy")
    with torch.no_grad():
        layer = model.layers[0]
        x = model.embedding[ids]
        x = x + layer.attention(layer.norm_attention(x), model.rotations[:, :11], None, 0)
        logits = layer.norm_experts(x).flatten(0, 1) @ layer.router.weight.T
    assert [set(row) for row in trace.experts[:, 0].tolist()] == [set(row.topk(3).indices.tolist()) for row in logits]


def test_text_batches_cut_pad_and_divide_tokens_equally() -> None:
    batches = list(text_batches({"a": range(1, 8), "b": range(10, 13)}, sequence_length=3, batch_size=2))
    assert [batch["input_ids"].tolist() for batch in batches] == [[[1, 2, 3], [4, 5, 6]], [[7]], [[10, 11, 12]]]
    assert [batch["domains"] for batch in batches] == [["a", "a"], ["a"], ["b"]]
    (short,) = text_batches({"a": range(1, 6)}, sequence_length=3, batch_size=4)
    assert short["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert short["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    shared = text_batches({"a": range(9), "b": range(9)}, sequence_length=9, batch_size=1, max_tokens=8)
    assert [batch["input_ids"].shape[1] for batch in shared] == [4, 4]


class PairTopKRouter(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.long(), x.long()


class Odd(nn.Module):
    """A model whose router has an unknown output, or (``twice``) with two routers in one layer."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        names = ["text", "image"] if twice else ["text"]
        self.parts = nn.ModuleDict({name: nn.ModuleList([PairTopKRouter()]) for name in names})

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return self.parts["text"][0](input_ids.float())


def test_unsupported_models_and_batches_are_refused() -> None:
    batch = [{"input_ids": torch.ones(1, 2, dtype=torch.long)}]
    with pytest.raises(ValueError, match=r"Linear has no router to record.*TopKRouter"):
        record(nn.Linear(2, 2), batch)
    with pytest.raises(
        ValueError, match=r"router parts.text.0 \(PairTopKRouter\) gave 2 two-dimensional integer outputs"
    ):
        record(Odd(twice=False), batch)
    with pytest.raises(ValueError, match=r"2 routers in layer 0 \(parts.text.0, parts.image.0\)"):
        record(Odd(twice=True), batch)
    model = build("Mixtral")
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 3\), but input_ids has \(1, 2\)"):
        record(model, [batch[0] | {"attention_mask": torch.ones(1, 3)}])
    with pytest.raises(ValueError, match="2 domains for 1 sequences"):
        record(model, [batch[0] | {"domains": ["a", "b"]}])
    with pytest.raises(ValueError, match="the batches contain no tokens"):
        record(model, [])


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that save_pretrained wrote, with a character tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    build("Qwen3Moe").save_pretrained(folder)
    characters = {character: i for i, character in enumerate("?abcdefghijklmnopqrstuvwxyz .\n")}
    words = Tokenizer(models.WordLevel(characters, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


def test_command_records_text_files(saved_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "law.txt").write_text("the party of the first part. " * 4)
    (tmp_path / "code.txt").write_text("def f a b return a.b\n" * 4)
    output = tmp_path / "trace.npz"
    files = [str(tmp_path / name) for name in ("law.txt", "code.txt")]
    flags = ["--sequence-length", "20", "--max-tokens", "100", "--batch-size", "2", "-o", str(output)]
    assert main(["trace", "record", "--model", str(saved_model), "--text", *files, *flags]) == 0
    trace = TokenTrace.load(output)
    assert trace.domain_names == ["code", "law"]
    assert trace.seq_lens.tolist() == [20, 20, 10] * 2
    assert (trace.n_layers, trace.n_experts, trace.top_k, trace.model) == (3, EXPERTS, TOP_K, None)

    text = "the party of the first part. " * 4
    characters = "?abcdefghijklmnopqrstuvwxyz .\n"
    ids = torch.tensor([[max(characters.find(c), 0) for c in text[:20]]])
    again = record(build("Qwen3Moe", head=True), [{"input_ids": ids}])
    assert np.array_equal(trace.experts[:20], again.experts)

    for change, said in (
        (["--preset", "gpt-9"], "unknown model 'gpt-9'"),
        (["--dtype", "float7"], "unknown dtype 'float7'"),
        (["--text", files[0], files[0]], "two text files are called 'law'"),
        (["-o", "trace.txt"], "saved as .npz, found 'trace.txt'"),
    ):
        assert main(["trace", "record", "--model", str(saved_model), "--text", *files, *flags, *change]) == 2
        assert said in capsys.readouterr().err.replace("\n", " ")
