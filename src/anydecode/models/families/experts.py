"""Reads mixtures of experts in the layouts in which checkpoints store them.

Experts are stored as one module each, as stacks of matrices, or (gpt-oss) as stacks in MXFP4.
"""

from __future__ import annotations

import numpy as np

from anydecode.kernels.formats import BLOCKS, halves_paired, plain_weight
from anydecode.kernels.interface import ExpertWeights, Weight
from anydecode.models.families.blockffn import read_blocks
from anydecode.models.families.config import identity_experts, shared_size
from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.values import Config, bool_value, int_value, optional_number
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import number
from anydecode.models.linear import Linear
from anydecode.models.network import ExpertNorms, Experts, GatedMlp, PlainMlp, RmsNorm

#: Names of routers.
ROUTERS = (
    "mlp.gate",
    "mlp.gate.wg",
    "mlp.router.gate",
    "mlp.router.classifier",
    "mlp.router",
    "mlp.router.layer",
    "mlp.router.linear",
    "block_sparse_moe.gate",
    "block_sparse_moe.router",
    "block_sparse_moe.router.layer",
    "block_sparse_moe.primary_router",
    "feed_forward.gate",
    "feed_forward.router",
    "router.proj",
    "mixer.gate",
    "moe.gate",
)
#: The names of an expert's matrices: those of most families, Mixtral's and SmallThinker's.
_NAMES = {
    "gate": ("gate_proj", "w1", "gate"),
    "up": ("up_proj", "w3", "up"),
    "down": ("down_proj", "w2", "down"),
}


def read_experts(
    reader: TensorReader, config: Config, family: Family, layer: str, shape: tuple[int, int]
) -> Experts:
    """The router and the experts of one layer.

    Args:
        reader: The checkpoint's tensors.
        config: The config.
        family: The family, which has a mixture of experts.
        layer: The layer's name.
        shape: The number of experts and the hidden size.
    """
    assert family.moe is not None, "checked by `is_expert_layer`"
    if family.moe.is_blocks:
        return read_blocks(reader, config, layer, shape)
    if family.moe.has_router_states:
        return _experts_of_states(reader, config, family.moe, layer, shape)
    router = reader.first(f"{layer}.{name}" for name in ROUTERS)
    # A router is small, and quantising it would change which experts are selected.
    weight = reader.matrix(router, shape, keep_format=True)
    has_bias = family.moe.has_biases
    bias = reader.vector(f"{router}.bias", shape[0]) if has_bias else None
    module = router.removesuffix(".layer").removesuffix(".proj").removesuffix(".wg")
    module = module.removesuffix(".linear")
    module = module.replace(".router.gate", ".router").removesuffix(".classifier")
    block = module.rpartition(".")[0]
    inner, is_plain = int_value(config, family.moe.inner_size), family.mlp == "plain"
    latent = int_value(config, "moe_latent_size", shape[1])
    num_identity = identity_experts(config, family.moe)
    sizes = shape[0] - num_identity, num_identity, latent, inner
    expert_reader = _ExpertReader(reader, family.moe, block, *sizes)
    routed = expert_reader.read_plain() if is_plain else expert_reader.read()
    if family.moe.has_selection_bias is not False and bool_value(config, "use_expert_bias", True):
        name = _selection_bias(reader, router, block)
        if family.moe.has_selection_bias or reader.has(name):
            # One row in ERNIE's checkpoints.
            axes = (1,) if ".moe_statics." in name else ()
            routed.selection_bias = reader.tensor(name, (*axes, shape[0])).ravel()
    if bool_value(config, "has_token_experts"):
        routed.token_experts = _token_experts(reader, config, router, shape[0])
    if family.moe.has_norms:
        routed.factors = reader.vector(f"{layer}.router.per_expert_scale", shape[0])
    experts = Experts(Linear(weight, bias), routed)
    factor = optional_number(config, "router_factor")
    if factor is not None:
        experts.router.scale = factor
    experts.router_softcap = optional_number(config, "router_logit_softcapping")
    bias_name = next(filter(reader.has, (f"{block}.experts.bias", f"{block}.bias")), None)
    if bias_name is not None:
        experts.bias = plain_weight(reader.vector(bias_name, shape[1])[None])
    size, hidden = shared_size(config, family.moe), shape[1]
    if family.moe.reads_inputs:
        norm = reader.vector(f"{layer}.post_attention_layernorm.weight", shape[1])
        experts.input_norm = RmsNorm(norm, _norm_eps(config))
    if family.moe.group_size is not None:
        experts.adjugate = _read_adjugate(reader, config, family.moe, block, shape)
    if config.get("moe_latent_size") is not None:
        has_bias = bool_value(config, "mlp_bias")
        down, up = (  # of Nemotron-H, of Muse Spark, and of Kimi K3
            reader.first(f"{block}.{one}" for one in names)
            for names in (
                ("fc1_latent_proj", "pre_expert_proj", "routed_expert_down_proj"),
                ("fc2_latent_proj", "post_expert_proj", "routed_expert_up_proj"),
            )
        )
        experts.latent_down = reader.linear(down, (latent, hidden), has_bias)
        experts.latent_up = reader.linear(up, (hidden, latent), has_bias)
        if bool_value(config, "latent_moe_use_norm"):
            norm = reader.vector(f"{block}.routed_expert_norm.weight", latent)
            experts.latent_output_norm = RmsNorm(norm, _norm_eps(config))
    if family.moe.norms_outputs:
        name, offset = f"{block}.pre_expert_norm.weight", family.norm_offset
        experts.latent_norm = RmsNorm(reader.vector(name, latent, offset), _norm_eps(config))
        name = f"{block}.experts.post_expert_norm.weight"
        routed.output_factors = reader.vector(name, latent, offset)
    if size:
        # Beside the block in Granite and Step; the other names are those of Hy3 and Laguna as
        # published, and of Step in `transformers`.
        usual = f"{block}.{family.moe.shared_module}"
        others = ("shared_mlp", "shared_expert", "shared_experts")
        names = [f"{layer}.{family.moe.shared_module}", *(f"{block}.{one}" for one in others)]
        name = next(filter(reader.has_module, [usual, *names]), usual)
        if is_plain:
            experts.shared = _read_plain(reader, config, name, (size, hidden))
        else:
            experts.shared = _read_shared(reader, layer, name, (size, hidden))
        factor = optional_number(config, "shared_factor")
        if factor is not None:
            experts.shared.down.scale = factor
        if family.moe.has_shared_gate:
            gate = reader.matrix(f"{name}_gate", (1, hidden), keep_format=True)
            experts.shared_gate = gate
    return experts


def _norm_eps(config: Config) -> float:
    return number("rms_norm_eps", config.get("rms_norm_eps"), 0.0, 1.0)


def _experts_of_states(
    reader: TensorReader, config: Config, moe: MixtureOfExperts, layer: str, shape: tuple[int, int]
) -> Experts:
    """The experts of a layer and the last matrix of their router (ZAYA1). The output of the last
    expert, which has no matrices, is zero."""
    count, inner = shape[0] - 1, int_value(config, moe.inner_size)
    routed = _ExpertReader(reader, moe, f"{layer}.mlp", count, 0, shape[1], inner).read()
    routed.selection_bias = reader.vector(f"{layer}.mlp.gate.balancing_biases", shape[0])
    routed.factors = np.append(np.ones(count, np.float32), np.float32(0))
    router, size = f"{layer}.mlp.gate.router_mlp.out_proj", int_value(config, "router_hidden_size")
    return Experts(Linear(reader.matrix(router, (shape[0], size), keep_format=True)), routed)


def _read_adjugate(
    reader: TensorReader, config: Config, moe: MixtureOfExperts, block: str, shape: tuple[int, int]
) -> ExpertWeights:
    """The further experts of the groups of a layer."""
    assert moe.group_size is not None
    count, inner = shape[0] // int_value(config, moe.group_size), "group_expert_size"
    name = f"{block}.chunk_experts"
    sizes = count, 0, shape[1], int_value(config, inner)
    return _ExpertReader(reader, moe, block, *sizes, name=name).read()


def _token_experts(reader: TensorReader, config: Config, router: str, count: int) -> np.ndarray:
    """The experts of each token (DeepSeek-V4)."""
    shape = int_value(config, "vocab_size"), int_value(config, "num_experts_per_tok")
    return reader.numbers(f"{router}.tid2eid", shape, count)


def _selection_bias(reader: TensorReader, router: str, block: str) -> str:
    """The name of the tensor; the usual one if there is none."""
    names = [f"{module}.moe_statics.e_score_correction_bias" for module in (router, block)]
    names += [f"{module}.expert_bias" for module in (block, router)]
    names += [f"{module}.e_score_correction_bias" for module in (block, f"{block}.experts")]
    names += [f"{block}.router_bias", f"{block}.router.e_score_correction_bias"]
    return next(filter(reader.has, names), f"{router}.e_score_correction_bias")


def read_expert_norms(reader: TensorReader, layer: str, hidden: int) -> ExpertNorms:
    """The norms of routed experts that run beside an MLP (Gemma 4)."""
    scale = reader.vector(f"{layer}.router.scale", hidden)
    return ExpertNorms(
        scale * np.float32(hidden**-0.5),
        reader.vector(f"{layer}.pre_feedforward_layernorm_2.weight", hidden),
        reader.vector(f"{layer}.post_feedforward_layernorm_2.weight", hidden),
        reader.vector(f"{layer}.post_feedforward_layernorm_1.weight", hidden),
    )


def _read_shared(reader: TensorReader, layer: str, name: str, shape: tuple[int, int]) -> GatedMlp:
    """The MLP `name` that every token runs through, or the one of Granite, whose first two matrices
    may be one."""
    size, hidden = shape
    for fused, last in (
        (f"{layer}.shared_mlp.input_linear", f"{layer}.shared_mlp.output_linear"),
        (f"{name}.gate_up_proj", f"{name}.down_proj"),
    ):
        if reader.has(f"{fused}.weight"):
            gate, up = (
                reader.linear(fused, (2 * size, hidden), False, rows=rows, alias=f"{fused}.{part}")
                for part, rows in (("gate", slice(0, size)), ("up", slice(size, 2 * size)))
            )
            return GatedMlp(gate, up, reader.linear(last, (hidden, size), False))
    modules = [reader.first(f"{name}.{one}" for one in names) for names in _NAMES.values()]
    return GatedMlp(
        reader.linear(modules[0], shape, False),
        reader.linear(modules[1], shape, False),
        reader.linear(modules[2], (hidden, size), False),
    )


def _read_plain(
    reader: TensorReader, config: Config, name: str, shape: tuple[int, int]
) -> PlainMlp:
    """The MLP `name` without a gate that every token runs through."""
    size, hidden = shape
    has_bias = bool_value(config, "mlp_bias")
    up = reader.linear(f"{name}.up_proj", (size, hidden), has_bias)
    return PlainMlp(up, reader.linear(f"{name}.down_proj", (hidden, size), has_bias))


class _ExpertReader:
    """Reads the experts of one layer."""

    def __init__(
        self,
        reader: TensorReader,
        moe: MixtureOfExperts,
        block: str,
        count: int,
        num_identity: int,
        hidden: int,
        inner: int,
        name: str | None = None,
    ) -> None:
        self._reader, self._moe, self._num_identity = reader, moe, num_identity
        self._name, self._block = name or f"{block}.experts", block
        self._stacked = f"{self._name}.gate_up_proj", f"{self._name}.down_proj"
        names = ("input_linear", "output_linear"), ("experts.fc1", "experts.fc2")  # Granite, Aria
        for first, second in names:
            if reader.has(f"{block}.{first}.weight"):
                self._stacked = f"{block}.{first}.weight", f"{block}.{second}.weight"
        self._count, self._hidden, self._inner = count, hidden, inner
        self._shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}

    def read(self) -> ExpertWeights:
        if self._reader.has(f"{self._name}.gate_up_proj_blocks"):
            weights = self._packed_stacks()
        elif self._reader.has(self._stacked[0]):
            weights = self._stacks()
        elif self._reader.has(f"{self._name}.gate_up_projs.0.weight"):
            weights = self._fused_modules()
        elif self._reader.has(f"{self._block}.gate_proj.weight"):
            gate, up, down = (
                self._stack(f"{self._block}.{kind}_proj.weight", kind) for kind in _NAMES
            )
            weights = ExpertWeights(gate, up, down)
        else:
            gate, up, down = map(self._modules, _NAMES)
            weights = ExpertWeights(gate, up, down)
        if self._moe.has_biases:
            weights.gate_bias, weights.up_bias, weights.down_bias = self._biases()
        return weights

    def read_plain(self) -> ExpertWeights:
        """Experts without gates, stored as two stacks or as one module per expert."""
        kinds = ("up", "down")
        if not self._reader.has(f"{self._name}.up_proj"):
            up, down = map(self._modules, kinds)
            return ExpertWeights([], up, down)
        up, down = (self._stack(f"{self._name}.{kind}_proj", kind) for kind in kinds)
        return ExpertWeights([], up, down)

    def _stack(self, name: str, kind: str) -> list[Weight]:
        """The matrices of one kind, stored as one stack `[experts, out, in]`."""
        return self._parts(self._reader.stacked(name, (self._count, *self._shapes[kind])), kind)

    def _parts(self, stack: np.ndarray, kind: str) -> list[Weight]:
        """The matrices of a stack `[experts, out, in]`."""
        return [self._convert(plain_weight(part), kind, e) for e, part in enumerate(stack)]

    def _modules(self, kind: str) -> list[Weight]:
        """The matrices of one kind, stored as one module per expert."""
        names = [
            self._reader.first(f"{self._name}.{expert}.{name}" for name in _NAMES[kind])
            for expert in range(self._count)
        ]
        shape = self._shapes[kind]
        return [self._reader.matrix(name, shape, keep_order=True) for name in names]

    def _stacks(self) -> ExpertWeights:
        """Experts stored as `[experts, 2 * inner, hidden]` and `[experts, hidden, inner]`, or
        transposed as `[experts, hidden, 2 * inner]` and `[experts, inner, hidden]`."""
        count, hidden, inner = self._count, self._hidden, self._inner
        is_interleaved = self._moe.is_interleaved
        is_transposed = is_interleaved or self._moe.is_transposed
        if is_transposed is None:
            is_transposed = self._reader.shape(self._stacked[1]) == (count, inner, hidden)
        # The first stack of LongCat-Flash has room for experts without matrices.
        stored = count + self._num_identity
        shape = (stored, hidden, 2 * inner) if is_transposed else (stored, 2 * inner, hidden)
        gate_up = self._reader.stacked(self._stacked[0], shape)[:count]
        shape = (count, inner, hidden) if is_transposed else (count, hidden, inner)
        down = self._reader.stacked(self._stacked[1], shape)
        if is_transposed:
            gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
        if is_interleaved:
            gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
        else:
            gate, up = gate_up[:, :inner], gate_up[:, inner:]
        return ExpertWeights(
            self._parts(gate, "gate"), self._parts(up, "up"), self._parts(down, "down")
        )

    def _fused_modules(self) -> ExpertWeights:
        """Experts of gpt-oss as two modules each, with the rows of gate and up alternating, as
        Unsloth and GPTQModel store them."""
        gate: list[Weight] = []
        up: list[Weight] = []
        down: list[Weight] = []
        for expert in range(self._count):
            name, size = f"{self._name}.gate_up_projs.{expert}", (2 * self._inner, self._hidden)
            fused = self._reader.matrix(name, size, keep_format=True, keep_order=True)
            for kind, parts, first in (("gate", gate, 0), ("up", up, 1)):
                name, rows = f"{self._name}.{expert}.{kind}_proj", slice(first, None, 2)
                parts.append(self._reader.convert(fused, name, rows=rows))
            name, shape = f"{self._name}.down_projs.{expert}", self._shapes["down"]
            alias = f"{self._name}.{expert}.down_proj"
            down.append(self._reader.matrix(name, shape, alias=alias, keep_order=True))
        return ExpertWeights(gate, up, down)

    def _packed_stacks(self) -> ExpertWeights:
        """Experts in MXFP4: codes `[experts, out, blocks, 16]` and exponents `[experts, out,
        blocks]`, with the rows of gate and up alternating."""
        rows = {"gate_up": 2 * self._inner, "down": self._hidden}
        columns = {"gate_up": self._hidden, "down": self._inner}
        stacks = {}
        for kind in rows:
            blocks = (self._count, rows[kind], columns[kind] // BLOCKS["MXFP4"][0])
            codes = self._reader.codes(f"{self._name}.{kind}_proj_blocks", (*blocks, 16))
            stacks[kind] = codes, self._reader.codes(f"{self._name}.{kind}_proj_scales", blocks)

        def matrices(kind: str, stack: str, rows: slice) -> list[Weight]:
            codes, exponents = (part[:, rows] for part in stacks[stack])
            # All experts in one array: such large ones are given back when they are freed.
            return [
                self._convert(Weight("MXFP4", len(data), columns[stack], data), kind, expert)
                for expert, data in enumerate(mxfp4_rows(codes, exponents))
            ]

        return ExpertWeights(
            matrices("gate", "gate_up", slice(0, None, 2)),
            matrices("up", "gate_up", slice(1, None, 2)),
            matrices("down", "down", slice(None)),
        )

    def _convert(self, weight: Weight, kind: str, expert: int) -> Weight:
        return self._reader.convert(weight, f"{self._name}.{expert}.{kind}_proj")

    def _biases(self) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """The biases of gate, up and down, stored as stacks or as one module per expert."""
        reader, name, count = self._reader, self._name, self._count
        if reader.has(f"{name}.gate_up_proj_bias"):
            gate_up = reader.stacked(f"{name}.gate_up_proj_bias", (count, 2 * self._inner))
            stack = reader.stacked(f"{name}.down_proj_bias", (count, self._hidden))
            return _vectors(gate_up[:, 0::2]), _vectors(gate_up[:, 1::2]), _vectors(stack)
        if reader.has(f"{name}.gate_up_projs.0.bias"):
            fused, down = (
                [reader.vector(f"{name}.{kind}_projs.{e}.bias", size) for e in range(count)]
                for kind, size in (("gate_up", 2 * self._inner), ("down", self._hidden))
            )
            return [one[0::2] for one in fused], [one[1::2] for one in fused], down
        gate, up, down = (
            [reader.vector(f"{name}.{e}.{kind}_proj.bias", shape[0]) for e in range(count)]
            for kind, shape in self._shapes.items()
        )
        return gate, up, down


def _vectors(stack: np.ndarray) -> list[np.ndarray]:
    return list(stack.astype(np.float32))


def mxfp4_rows(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Rows of GGUF's MXFP4 blocks, uint8 `[experts, out, 17 * blocks]`.

    Args:
        codes: uint8 `[experts, out, blocks, 16]`. Byte i holds the value 2i in its low nibble and
            2i + 1 in its high one; in GGUF's blocks these are the values i and i + 16.
        exponents: uint8 `[experts, out, blocks]`, the biased exponent of each block.
    """
    result = np.empty((*exponents.shape, 17), np.uint8)
    result[..., 0] = exponents
    result[..., 1:] = halves_paired(codes)
    return result.reshape(*exponents.shape[:2], -1)
