"""Drafters that read states, in their published layouts: the bases of the drafters that are
fuzzed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from anydecode.certification.tiny import eagle3_checkpoint, eagle_checkpoint
from anydecode.certification.tiny_blocks import (
    as_speculators,
    dflash_checkpoint,
    dspark_checkpoint,
    parallelspec_checkpoint,
    pard_checkpoint,
    peagle_checkpoint,
)
from anydecode.certification.tiny_heads import (
    blockwise_checkpoint,
    chimera_checkpoint,
    clover_2_checkpoint,
    clover_checkpoint,
    falcon_checkpoint,
    hydra_checkpoint,
    medusa_checkpoint,
    mtp_checkpoint,
)
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from draft_folders import drafter_folder, target_folder


def _speculators(target: Network) -> Checkpoint:
    return as_speculators(dflash_checkpoint(target), target)


#: The decoder of each layout, what makes a drafter of it, and the file of its tensors.
_LAYOUTS: dict[str, tuple[str, Callable[[Network], Checkpoint], str]] = {
    "eagle": ("eagle", eagle_checkpoint, "model.safetensors"),
    "eagle-3": ("eagle", eagle3_checkpoint, "model.safetensors"),
    "medusa": ("medusa", medusa_checkpoint, "medusa_lm_head.safetensors"),
    "medusa.pt": ("medusa", medusa_checkpoint, "medusa_lm_head.pt"),
    "hydra": ("hydra", hydra_checkpoint, "model.safetensors"),
    "hydra++": ("hydra", partial(hydra_checkpoint, has_prefix=True), "hydra_lm_head.pt"),
    "blockwise": ("blockwise", partial(blockwise_checkpoint, modulus=9), "model.safetensors"),
    "clover-2": ("clover-2", clover_2_checkpoint, "model.safetensors"),
    "clover": ("clover", clover_checkpoint, "model.safetensors"),
    "chimera": ("chimera", partial(chimera_checkpoint, modulus=9), "model.safetensors"),
    "falcon": ("falcon", falcon_checkpoint, "model.safetensors"),
    "mtp": ("mtp", mtp_checkpoint, "model.safetensors"),
    "dflash": ("dflash", dflash_checkpoint, "model.safetensors"),
    "speculators": ("dflash", _speculators, "model.safetensors"),
    "dspark": ("dflash", dspark_checkpoint, "model.safetensors"),
    "parallelspec": ("parallelspec", parallelspec_checkpoint, "model.safetensors"),
    "p-eagle": ("dflash", peagle_checkpoint, "model.safetensors"),
    "pard": ("dflash", pard_checkpoint, "model.safetensors"),
}
#: The decoders by layout.
DECODERS = {name: decoder for name, (decoder, _, _) in _LAYOUTS.items()}


def write_drafters(root: Path) -> tuple[Path, dict[str, Path]]:
    """Write a target, and a drafter of it in every layout; the folders, the drafters' by layout."""
    model = target_folder(root / "model")
    target = load_network(load_checkpoint(model))
    return model, {
        name: drafter_folder(root / name, make(target), file)
        for name, (_, make, file) in _LAYOUTS.items()
    }
