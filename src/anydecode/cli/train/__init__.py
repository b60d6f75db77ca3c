"""`anydecode train`: train small models, distilled models and adapters on this machine."""

from anydecode.cli.train import blocks, depth, diffusion, drafters, generation
from anydecode.cli.train.app import app

__all__ = ["app", "blocks", "depth", "diffusion", "drafters", "generation"]
