"""What a layer costs on a cluster, and the topology as the kernels read it: the numbers behind the simulator."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.presets.cluster_spec import ClusterSpec
from clustergym.moe_placement.presets.clusters import CLUSTERS, get_cluster
from clustergym.moe_placement.presets.model_spec import ModelSpec
from clustergym.moe_placement.presets.models import MODELS, get_model

__all__ = ["CLUSTERS", "MODELS", "ClusterSpec", "Costs", "ModelSpec", "Network", "get_cluster", "get_model"]

# Kernel constants of a model are those of an H100.
H100_HBM_GB_S, H100_BF16_TFLOPS = 3350.0, 989.0
# The old simulator stores a GPU in a byte, and one value marks a pad.
_MAX_GPUS = 254


class Costs(NamedTuple):
    """Everything that turns counts into µs."""

    dispatch_us: float
    """Start of the dispatch exchange"""
    dispatch_intra_us: float
    """One copy of an activation to a GPU of the same node"""
    dispatch_inter_us: float
    """One copy to another node"""
    combine_us: float
    """Start of the combine exchange"""
    combine_intra_us: float
    combine_inter_us: float
    kernel_us: float
    """Start of the expert kernel"""
    expert_us: float
    """One more active expert"""
    pair_us: float
    """One more token-expert pair"""
    receive_intra_us: float
    """Receiving one expert's weights from the same node, spread over the passes of a window"""
    receive_inter_us: float
    """Receiving one expert's weights from another node, spread over the passes of a window"""

    @classmethod
    def of(cls, model: ModelSpec, cluster: ClusterSpec, passes_per_window: int) -> Costs:
        if passes_per_window < 1:
            raise ValueError(f"passes_per_window is {passes_per_window}: expected at least 1")
        intra_us_per_byte, inter_us_per_byte = 1e-3 / cluster.intra_gb_s, 1e-3 / cluster.inter_gb_s
        latency_us = cluster.intra_latency_us * (cluster.gpus_per_node > 1) + cluster.inter_latency_us * (
            cluster.n_nodes > 1
        )
        values = (
            latency_us,
            model.hidden * model.dispatch_bytes * intra_us_per_byte,
            model.hidden * model.dispatch_bytes * inter_us_per_byte,
            latency_us,
            model.hidden * model.combine_bytes * intra_us_per_byte,
            model.hidden * model.combine_bytes * inter_us_per_byte,
            model.kernel_start_us,
            model.kernel_expert_us * H100_HBM_GB_S / cluster.hbm_gb_s,
            model.kernel_pair_us * H100_BF16_TFLOPS / cluster.bf16_tflops,
            model.expert_bytes * intra_us_per_byte / passes_per_window,
            model.expert_bytes * inter_us_per_byte / passes_per_window,
        )
        return cls(*map(float, values))

    def weigh_tokens(self, scale: float) -> Costs:
        """The same costs with each token weighed by ``scale``; latencies, active experts and migration stay."""
        per_token = ("dispatch_intra_us", "dispatch_inter_us", "combine_intra_us", "combine_inter_us", "pair_us")
        return self._replace(**{name: getattr(self, name) * scale for name in per_token})


class Network(NamedTuple):
    """The topology as the kernels read it, and how the counts of a token's experts are packed into integers.

    How many of a token's experts run on each GPU is packed into a few 63-bit words, one bit field per GPU. Changing one
    count, and testing a GPU or a whole node for zero, then takes a handful of instructions for any K. The fields of a
    node share one word, or fill words of their own. Lookup tables replace integer division, which would dominate the
    run time.
    """

    node_of: npt.NDArray[np.int64]
    """(G,) node of each GPU"""
    word_of: npt.NDArray[np.int64]
    """(G,) word that holds the GPU's field"""
    shift_of: npt.NDArray[np.int64]
    """(G,) lowest bit of the GPU's field in that word"""
    node_mask: npt.NDArray[np.int64]
    """(G,) bits of all fields of the GPU's node, if they lie in one word"""
    gpus_per_node: int
    field_bits: int
    """Width of a field: enough to count K"""
    words_per_node: int
    """Words over which the fields of one node are spread"""
    n_words: int
    mode: int
    """How tokens travel: MODE_DEDUP, MODE_PER_EXPERT or MODE_STAY"""

    @classmethod
    def of(cls, cluster: ClusterSpec, top_k: int, mode: int) -> Network:
        if cluster.n_gpus > _MAX_GPUS:
            raise ValueError(
                f"cluster {cluster.name!r} has {cluster.n_gpus} GPUs: this simulator takes at most {_MAX_GPUS}"
            )
        field_bits, per_node = top_k.bit_length(), cluster.gpus_per_node
        fields_per_word = 63 // field_bits  # 63, so that a word is never negative
        gpu = np.arange(cluster.n_gpus, dtype=np.int64)
        node, rank = gpu // per_node, gpu % per_node
        if per_node <= fields_per_word:
            nodes_per_word = fields_per_word // per_node
            word, field = node // nodes_per_word, node % nodes_per_word * per_node + rank
            mask = ((1 << per_node * field_bits) - 1) << (field - rank) * field_bits
        else:
            word, field = node * ceil(per_node / fields_per_word) + rank // fields_per_word, rank % fields_per_word
            mask = np.full(len(gpu), -1)
        return cls(
            node_of=node,
            word_of=word,
            shift_of=field * field_bits,
            node_mask=mask,
            gpus_per_node=per_node,
            field_bits=field_bits,
            words_per_node=int(word[per_node - 1] - word[0]) + 1,
            n_words=int(word[-1]) + 1,
            mode=mode,
        )
