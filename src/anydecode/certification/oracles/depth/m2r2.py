"""Oracle test of M2R2: drafts are replayed by a forward pass in float64, whose accelerated stream
reads the keys and values of the model's own layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.depth.exit_drafts import recorded
from anydecode.certification.oracles.depth.layerskip import repeats
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.oracles.transformer import rms_norm, rotate, softmax
from anydecode.certification.rounds import TracedRound, accepted, plain_token, rounds
from anydecode.certification.tiny import accelerated_model

PROMPT, LENGTH, SIZE = "the cat sat on the cat", 48, 3
FIRST, EXIT, LAYERS = 1, 4, 8


class _AcceleratedForward(Forward):
    """A Llama with a second stream beside some of its layers."""

    def accelerated_logits(self, token: int, adapters: Any) -> np.ndarray:
        """Adds a position; returns the logits of the accelerated stream."""
        x = self._embedding(token)
        for layer in range(LAYERS):
            if layer == FIRST:
                ahead = x
            x = x + self._attention(x, layer)
            x = x + self._mlp(x, layer)
            if FIRST <= layer < EXIT:
                ahead = ahead + self._adapted_attention(ahead, layer, adapters)
                inner = adapters.mlp_down[layer] @ self._unweighted(ahead)
                ahead = ahead + adapters.mlp_up[layer] @ (inner / (1 + np.exp(-inner)))
        return self._logits(ahead)

    def _unweighted(self, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, np.ones_like(x), self.spec.norm_eps)

    def _adapted_attention(self, x: np.ndarray, layer: int, adapters: Any) -> np.ndarray:
        spec = self.spec.layers[layer]
        assert spec.attention is not None and spec.rope is not None
        query = adapters.query_up[layer] @ (adapters.query_down[layer] @ self._unweighted(x))
        heads = spec.attention.num_heads
        shared = heads // spec.attention.num_kv_heads
        position = len(self.keys[layer]) - 1
        query = rotate(query.reshape(1, heads, -1), [position], spec.rope.frequencies)[0]
        mixed = []
        for head, one in enumerate(query):
            keys, values = (
                np.stack([row[head // shared] for row in rows[layer]])
                for rows in (self.keys, self.values)
            )
            mixed.append(softmax(keys @ one * spec.attention.scale) @ values)
        added: np.ndarray = adapters.output_up[layer] @ (
            adapters.output_down[layer] @ np.concatenate(mixed)
        )
        return added

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        for rows in (*self.keys, *self.values):
            del rows[length:]


@oracle_test("m2r2")
def m2r2() -> Iterator[Check]:
    """Up to three tokens are drafted from the accelerated stream behind the first half of the
    layers; the model's own keys and values are those of plain decoding, and no layer runs twice for
    a token."""
    for temperature in (0.0, 0.8):
        with accelerated_model(prefix_cache=False) as llm:
            model: Any = llm.model
            ran = recorded(model)
            trace = rounds(llm, "m2r2", PROMPT, LENGTH, temperature=temperature)
            wrong = _num_wrong(_AcceleratedForward(model.network), model, trace, temperature)
        where = f"T={temperature}"
        yield Check(f"drafts equal the oracle's, {where}", wrong == 0, f"{wrong} of {len(trace)}")
        cut = sum(len(one.accepted) < len(one.tokens) for one in trace)
        detail = f"{accepted(trace)} accepted, {cut} rounds with a rejection"
        yield Check(
            f"drafts are accepted and rejected, {where}", min(cut, accepted(trace)) > 5, detail
        )
        is_repeated = repeats(ran, trace, [EXIT] * len(trace), LAYERS)
        yield Check(f"no layer runs twice for a token, {where}", not is_repeated)


def _num_wrong(
    forward: _AcceleratedForward, model: Any, trace: list[TracedRound], temperature: float
) -> int:
    """Rounds whose drafts differ."""
    wrong = 0
    for one in trace:
        for token in one.text[len(forward.keys[0]) : -1]:
            forward.step(token)
        size = min(SIZE, LENGTH - (len(one.text) - len(trace[0].text)) - 1)
        drafts: list[int] = []
        while len(drafts) < size:
            logits = forward.accelerated_logits([*one.text, *drafts][-1], model.accelerators)
            position = len(one.text) + len(drafts)
            drafts.append(plain_token(logits.astype(np.float32), position, temperature))
        wrong += drafts != one.tokens
        forward.truncate(len(one.text) - 1)
    return wrong
