"""What decoders check that run the layers of a model in another way."""

from __future__ import annotations

from typing import Any

from anydecode.kernels.interface import Variant


def check_variant(model: Any, variant: Variant) -> None:
    """Raise `UnsupportedCombinationError` if the layers of `model` do not run as `variant` says."""
    network = getattr(model, "network", None)
    if network is not None:
        network.variant(variant)
