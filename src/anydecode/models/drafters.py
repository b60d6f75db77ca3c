"""Opens drafters that read the states of their target, whatever their kind."""

from __future__ import annotations

from collections.abc import Callable

from anydecode.models.blockwise import is_blockwise, load_blockwise
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.chimera import (
    ChimeraNetwork,
    ChimeraTransformer,
    is_chimera,
    load_chimera,
)
from anydecode.models.clover import is_clover, load_clover
from anydecode.models.draft_heads import is_draft_head, load_draft_head
from anydecode.models.early_exit import is_early_exit, load_early_exit
from anydecode.models.hydra import is_hydra, load_hydra
from anydecode.models.longspec import is_longspec, load_longspec
from anydecode.models.medusa import is_medusa, load_medusa
from anydecode.models.mtp import MtpNetwork, is_mtp, load_mtp
from anydecode.models.network import Network
from anydecode.models.step_heads import StepNetwork, StepTransformer
from anydecode.models.transformer import Executor, Transformer

#: Called as `load(checkpoint, target, dtype)`; see `load_draft_head`.
Loader = Callable[..., Network]

#: Tests of a checkpoint's files, and what loads those that pass.
_KINDS: tuple[tuple[Callable[[Checkpoint], bool], Loader], ...] = (
    (is_early_exit, load_early_exit),
    (is_longspec, load_longspec),
    (is_medusa, load_medusa),
    (is_hydra, load_hydra),
    (is_blockwise, load_blockwise),
    (is_clover, load_clover),
    (is_chimera, load_chimera),
    (is_mtp, load_mtp),
    (is_draft_head, load_draft_head),
)


def find_loader(checkpoint: Checkpoint) -> Loader | None:
    """What loads the drafter in a checkpoint (see `load_draft_head`); None if it has none."""
    return next((load for is_kind, load in _KINDS if is_kind(checkpoint)), None)


def is_drafter_alone(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has a drafter without its target."""
    has_model = any(name.startswith("model.") for name in checkpoint.tensors)
    return not has_model and find_loader(checkpoint) is not None


def drafter_model(
    network: Network, *, name: str, executor: Callable[[Network], Executor]
) -> Transformer:
    """A drafter's network as a model. Arguments as for `Transformer`."""
    if isinstance(network, StepNetwork):
        return StepTransformer(network, name=name, executor=executor)
    if isinstance(network, ChimeraNetwork):
        return ChimeraTransformer(network, name=name, executor=executor)
    model = Transformer(network, name=name, executor=executor)
    if isinstance(network, MtpNetwork):
        model.further = [Transformer(one, name=name, executor=executor) for one in network.further]
    return model
