"""The names of tensors in a GGUF file by those of a repository: the reverse of what is read."""

from __future__ import annotations

from anydecode.models.families.experts import ROUTERS
from anydecode.models.families.family import Family
from anydecode.models.loading.gguf_names import (
    HEADS,
    OUTER,
    OWN_OUTER,
    OWN_VECTORS,
    VECTORS,
    layer_names,
)

#: Blocks of layers, and those that have their names in files.
_BLOCKS = (("mixer.", "mamba."), ("mixer.", "mlp."))


def usual_name(family: Family, name: str) -> str:
    """The usual name of a tensor in its layer, which a family may have another one for."""
    module, _, leaf = name.rpartition(".")
    own = next((usual for usual, stored in family.names.items() if stored == module), module)
    return f"{own}.{leaf}"


def outer_target(architecture: str, family: Family, name: str) -> str | None:
    """The name in a file of a tensor outside the layers; None: files have no such tensor.

    Args:
        architecture: The architecture of the file.
        family: The family of the model.
        name: The name of the tensor, without the prefix of all names.
    """
    module, _, leaf = name.rpartition(".")
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
    # Of several names, the last is the architecture's own.
    modules = {usual: target for target, usual in layer_names(architecture).items()}
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
