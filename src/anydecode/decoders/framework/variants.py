"""What decoders check that run the layers of a model in another way."""

from __future__ import annotations

from typing import Any

from anydecode.kernels.interface import Variant
from anydecode.models.per_layer import late_start_error


def check_variant(model: Any, variant: Variant) -> None:
    """Raise `UnsupportedCombinationError` if the layers of `model` do not run as `variant` says."""
    network = getattr(model, "network", None)
    if network is not None:
        network.variant(variant)


def check_late_start(model: Any) -> None:
    """Raise `UnsupportedCombinationError` if rows of `model` cannot leave it at an early layer and
    be completed later."""
    if model.spec.starts_at_first_layer:
        raise late_start_error(model.name)
