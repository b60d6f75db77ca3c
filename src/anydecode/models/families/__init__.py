"""Builds models from checkpoints: the families' configs, rope scalings and weight names."""

import anydecode.models.families.causal  # noqa: F401  adds its families
import anydecode.models.families.diffusion  # noqa: F401  adds its families
import anydecode.models.families.encoders  # noqa: F401  adds its families
from anydecode.models.families.build import build_model, load_network
from anydecode.models.families.config import spec_from_config

__all__ = ["build_model", "load_network", "spec_from_config"]
