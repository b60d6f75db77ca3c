"""Experts of attention (JetMoE, Shen et al., arXiv:2404.07413; mixture of attention heads, Zhang et
al., arXiv:2210.05144): each has a matrix of queries and one of outputs, and all share the keys and
values. The queries of a row are those of the experts that it chooses, in order of id: the first
head of each, then the second ones, and so on, since the heads of one number share a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anydecode.kernels.interface import Backend, Weight
from anydecode.models.linear import Linear
from anydecode.models.spec import LayerSpec


@dataclass(eq=False)
class AttentionExperts:
    """The weights of attention's experts.

    Attributes:
        router: `[experts, hidden_size]`.
        queries: `[num_kv_heads * head_dim, hidden_size]` each.
        outputs: `[hidden_size, num_kv_heads * head_dim]` each.
        bias: Of the sum of their outputs, `[1, hidden_size]`.
    """

    router: Linear
    queries: list[Weight]
    outputs: list[Weight]
    bias: Weight

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix of a product."""
        return [*self.router.matrices, *self.queries, *self.outputs]

    def query(self, backend: Backend, x: Any, spec: LayerSpec) -> Any:
        """The queries of the chosen experts for the normed inputs x of the layer."""
        assert spec.attention is not None and spec.query_routing is not None
        router = self.router.apply(backend, x)
        groups = spec.attention.num_kv_heads
        return backend.expert_products(x, router, self.queries, spec.query_routing, groups)

    def output(self, backend: Backend, x: Any, y: Any, spec: LayerSpec) -> Any:
        """The output of attention for the normed inputs x of the layer, from its heads y."""
        assert spec.attention is not None and spec.query_routing is not None
        router = self.router.apply(backend, x)
        groups = spec.attention.num_kv_heads
        y = backend.expert_sums(y, router, self.outputs, spec.query_routing, groups)
        return backend.add_positions(y, self.bias)
