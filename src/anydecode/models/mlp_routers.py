"""Routers that say of a token which MLPs it runs (Duo-LLM, arXiv:2410.10846): one linear map per
layer with a choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anydecode.models.layer_routers import LayerRouters

#: The file of a model's folder that has its routers.
FILE_NAME = "mlp_routers.safetensors"
#: What runs where a router chooses against a layer's MLP.
NOTHING, SMALL = "MLP or nothing", "MLP or small MLP"


@dataclass(frozen=True, eq=False)
class MlpRouters(LayerRouters):
    """Routers of one model: a token with the state x behind the attention of a layer runs the
    layer's MLP if weight . x + bias is 0 or more. (A softmax over two choices is the sigmoid of
    such a score.) See `LayerRouters`; `target` is `NOTHING` or `SMALL`."""

    what: ClassVar[str] = "MLP routers"
    command: ClassVar[str] = "depth --recipe duo-llm"
    targets: ClassVar[tuple[str, ...]] = (NOTHING, SMALL)
