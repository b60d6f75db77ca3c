"""Numbers of attention and FFN instances, by the formulas of attention-FFN disaggregation (Step-3,
arXiv:2507.19427).

A pass is a pipeline of several micro-batches through attention, network and FFNs, layer by layer.
Each of these stages may take the time per token divided by the layers and the micro-batches. An
instance is one machine: the sums of the rates of its devices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from anydecode.errors import InvalidRequestError
from anydecode.models.ffn_split import check_split
from anydecode.models.network import Experts, Network, mlp_matrices

#: Maximum number of instances of each kind.
MAX_INSTANCES = 1 << 20


@dataclass(frozen=True)
class Instance:
    """What a machine can do per second.

    Attributes:
        flops: Floating-point operations.
        bandwidth: Bytes that it reads from its memory.
        network: Bytes that it receives, or sends.
    """

    flops: float
    bandwidth: float
    network: float

    def __post_init__(self) -> None:
        if not all(0 < value < float("inf") for value in vars(self).values()):
            raise InvalidRequestError(
                "an instance needs flops, bandwidth and network above 0, per second"
            )

    def seconds(self, flops: float, num_bytes: float) -> float:
        """The time to read so many bytes and to compute so many operations, which overlap."""
        return max(flops / self.flops, num_bytes / self.bandwidth)


@dataclass(frozen=True)
class SplitCosts:
    """What one token costs in all layers together, at a length of the context.

    Attributes:
        num_layers: The layers.
        hidden_size: Numbers of a hidden state.
        core_flops: Operations of the products of queries with keys, and of weights with values.
        cache_bytes: Bytes of the keys and values that these read.
        projections: Entries of the matrices of the attention.
        projection_bytes: Their size in bytes.
        ffn_active: Entries of the matrices of the FFNs that a token uses.
        ffn_entries: Entries of all matrices of the FFNs.
        ffn_bytes: Their size in bytes.
        sparsity: The smallest share of a layer's experts that a token uses; 1 for dense FFNs.
    """

    num_layers: int
    hidden_size: int
    core_flops: float
    cache_bytes: float
    projections: int
    projection_bytes: int
    ffn_active: float
    ffn_entries: int
    ffn_bytes: int
    sparsity: float

    @property
    def intensity(self) -> float:
        """Operations of the attention per byte of keys and values."""
        return self.core_flops / self.cache_bytes


def split_costs(network: Network, name: str, context: float, number_bytes: float) -> SplitCosts:
    """The costs of a model whose matrices have not been packed or freed.

    Args:
        network: The model.
        name: Its name, for messages.
        context: Mean number of positions that a token attends to.
        number_bytes: Bytes of one number in the key-value cache.

    Raises:
        UnsupportedCombinationError: The model cannot be split.
    """
    check_split(network.spec, name)
    core = cached = active = 0.0
    projections = projection_bytes = entries = num_bytes = 0
    sparsity = 1.0
    for spec, weights in zip(network.spec.layers, network.weights.layers, strict=True):
        shape, mlp = spec.attention, weights.mlp
        assert shape is not None and mlp is not None, "checked by `check_split`"
        limits = (shape.window, shape.chunk, shape.top_k)
        positions = min(context, *(limit or context for limit in limits))
        core += 2 * shape.num_heads * (shape.head_dim + shape.value_dim) * positions
        own_value = 0 if shape.latent_dim is not None else shape.head_dim
        numbers = shape.num_kv_heads * (shape.head_dim + own_value) * positions
        if spec.indexer is not None:
            core += 2 * spec.indexer.num_heads * spec.indexer.head_dim * context
            numbers += spec.indexer.head_dim * context
        cached += numbers * number_bytes
        ffn = {id(weight): weight for weight in mlp_matrices(mlp)}
        for weight in weights.matrices:
            if id(weight) not in ffn:
                projections += weight.out_features * weight.in_features
                projection_bytes += weight.num_bytes
        routed = {id(weight) for weight in mlp.routed.matrices} if isinstance(mlp, Experts) else {}
        share = 1.0
        if spec.routing is not None:
            share = spec.routing.experts_per_token / spec.num_experts
            sparsity = min(sparsity, share)
        for key, weight in ffn.items():
            size = weight.out_features * weight.in_features
            entries, num_bytes = entries + size, num_bytes + weight.num_bytes
            active += size * (share if key in routed else 1.0)
    return SplitCosts(
        network.spec.num_layers, network.spec.hidden_size, core, cached, projections,
        projection_bytes, active, entries, num_bytes, sparsity,
    )  # fmt: skip


@dataclass(frozen=True)
class SplitSize:
    """How many instances serve a model within a time per token.

    Attributes:
        stage_seconds: The time of a stage in one layer.
        tokens_per_expert: Tokens of a micro-batch for each expert (or dense FFN) from which on its
            products take longer than reading its matrices.
        network_tokens: The largest micro-batch whose hidden states an FFN instance can receive and
            send back within a stage.
        min_sparsity: The smallest share of experts per token at which the network can bring each
            expert enough tokens.
        micro_batch: Tokens of a micro-batch: enough for the experts, or what the network can bring.
        attention: Attention instances; None: no number is enough.
        ffn: FFN instances; None: no number is enough.
        tokens_per_second: Of all answers together.
    """

    stage_seconds: float
    tokens_per_expert: float
    network_tokens: float
    min_sparsity: float
    micro_batch: float
    attention: int | None
    ffn: int | None
    tokens_per_second: float


def split_size(
    costs: SplitCosts,
    attention: Instance,
    ffn: Instance,
    tpot: float,
    micro_batches: int,
    hidden_bytes: float,
) -> SplitSize:
    """The numbers of instances.

    Args:
        costs: The costs of the model at a mean length of the context.
        attention: An attention instance.
        ffn: An FFN instance; several of them divide the experts.
        tpot: Maximum time per token, in seconds.
        micro_batches: Micro-batches on their way: the paper has 3.
        hidden_bytes: Bytes of a number of a hidden state, to an FFN instance and back together: 3
            in the paper, which sends 8 and 16 bits, and 8 here.
    """
    layers = costs.num_layers
    stage = tpot / (micro_batches * layers)
    entry_bytes = costs.ffn_bytes / costs.ffn_entries
    per_expert = ffn.flops * entry_bytes / (2 * ffn.bandwidth)
    state_bytes = costs.hidden_size * hidden_bytes
    network_tokens = stage * ffn.network / state_bytes
    batch = min(per_expert / costs.sparsity, network_tokens)

    def attention_fits(count: int) -> bool:
        each = batch / count
        core = attention.seconds(each * costs.core_flops, each * costs.cache_bytes)
        products = attention.seconds(2 * each * costs.projections, costs.projection_bytes)
        sent = each * state_bytes / attention.network
        return (core + products) / layers <= stage and sent <= stage

    def ffn_fits(count: int) -> bool:
        seconds = ffn.seconds(2 * batch * costs.ffn_active, costs.ffn_bytes)
        return seconds / count / layers <= stage

    return SplitSize(
        stage,
        per_expert,
        network_tokens,
        per_expert / network_tokens,
        batch,
        _smallest(attention_fits),
        _smallest(ffn_fits),
        batch / (layers * stage),
    )


def report(costs: SplitCosts, size: SplitSize, attention: Instance) -> list[str]:
    """The formulas' results in words, one line each."""
    balance = attention.flops / attention.bandwidth
    bound = "memory" if costs.intensity < balance else "compute"
    counts = [
        "no number of" if number is None else str(number) for number in (size.attention, size.ffn)
    ]
    lines = [
        f"stage: {1e6 * size.stage_seconds:.3g} us in each of {costs.num_layers} layers",
        f"attention: {costs.intensity:.3g} operations per byte of keys and values; an instance has"
        f" {balance:.3g} per byte, so it is bound by {bound}",
        f"FFNs: bound by compute from {size.tokens_per_expert:.3g} tokens per expert on; the"
        f" network brings {size.network_tokens:.3g} tokens per stage",
        f"experts: a token uses {costs.sparsity:.3g} of a layer's; below {size.min_sparsity:.3g} of"
        " them, the network cannot bring each enough tokens",
        f"instances: {counts[0]} attention and {counts[1]} FFN, for micro-batches of"
        f" {size.micro_batch:.0f} tokens",
    ]
    if size.attention is not None and size.ffn is not None:
        each = size.tokens_per_second / (size.attention + size.ffn)
        lines.append(f"tokens/s: {size.tokens_per_second:.3g}, {each:.3g} per instance")
    return lines


def _smallest(fits: Callable[[int], bool]) -> int | None:
    """The smallest number that fits, if all larger ones fit too; None: none does."""
    if not fits(MAX_INSTANCES):
        return None
    return bisect_left(range(1, MAX_INSTANCES), True, key=fits) + 1
