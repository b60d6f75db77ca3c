"""The names of tensors in a GGUF file by those of a repository: the reverse of what is read."""

from __future__ import annotations

import re

from anydecode.models.families.experts import ROUTERS
from anydecode.models.families.family import Family
from anydecode.models.families.rwkv import MIXES
from anydecode.models.loading.gguf_encoder import CLASSIFIER
from anydecode.models.loading.gguf_names import (
    HEADS,
    OUTER,
    OWN_OUTER,
    OWN_VECTORS,
    STACKS,
    VECTORS,
    own_targets,
)

#: A share of the position before in the time mixing of RWKV-7.
_MIX = re.compile(rf"layers\.(\d+)\.attn\.x_([{MIXES}])")
#: Blocks of layers, and those that have their names in files.
_BLOCKS = (("mixer.", "mamba."), ("mixer.", "mlp."))


def usual_name(family: Family, name: str) -> str:
    """The usual name of a tensor in its layer, which a family may have another one for."""
    module, _, leaf = name.rpartition(".")
    own = next((usual for usual, stored in family.names.items() if stored == module), module)
    return f"{own}.{leaf}".lstrip(".")


def outer_target(architecture: str, family: Family, name: str) -> str | None:
    """The name in a file of a tensor outside the layers; None: files have no such tensor.

    Args:
        architecture: The architecture of the file.
        family: The family of the model.
        name: The name of the tensor, without the prefix of all names.
    """
    module, _, leaf = name.rpartition(".")
    for target, usual in CLASSIFIER.items():
        if module == f"classifier.{usual}":
            return f"{target}.{leaf}"
    own = OWN_OUTER.get(architecture, {})
    for target, usual in (*own.items(), *OUTER.items()):
        part = usual.removeprefix("model.")
        if module == family.names.get(part, part):
            return f"{target}.{leaf}"
    return None


def layer_target(architecture: str, family: Family, name: str) -> str | None:
    """The name in its block of a tensor of a layer, of which `name` is the usual one; None: files
    have no such tensor."""
    vectors = {**VECTORS, **OWN_VECTORS.get(architecture, {})}
    vectors = {usual: target for target, usual in vectors.items()}
    modules = own_targets(architecture)
    stacks = HEADS.get(architecture, {})
    modules |= {usual.removesuffix(".{}"): target for target, usual in stacks.items()}
    for block, usual in (("", ""), *_BLOCKS):
        if not name.startswith(block):
            continue
        full = (usual + name.removeprefix(block)).replace("A_log", "A")
        module, _, leaf = full.rpartition(".")
        for one in (full, f"{family.names.get(module, module)}.{leaf}"):
            if one in vectors:
                return vectors[one]
        if module in modules:
            return f"{modules[module]}.{leaf}"
    module, _, leaf = name.rpartition(".")
    return f"ffn_gate_inp.{leaf}" if module in ROUTERS else None


def stack_target(architecture: str, name: str) -> tuple[str, int] | None:
    """The tensor of a file of which a tensor is a part, and the number of the part; None: it is one
    by itself. `name` is that of `outer_target`."""
    match = _MIX.fullmatch(name)
    if architecture == "rwkv7" and match is not None:
        return f"blk.{match[1]}.time_mix_lerp_fused.weight", MIXES.index(match[2])
    module, _, leaf = name.rpartition(".")
    start, _, index = module.rpartition(".")
    for target, usual in STACKS.items():
        if f"model.{start}.{{}}" == usual and index.isdigit():
            return f"{target}.{leaf}", int(index)
    return None
