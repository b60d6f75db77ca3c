"""Oracle test of quickprefill (QuickVideo, arXiv:2505.16175): each layer keeps the keys of smallest
norm of every group."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.prefill.dense_pass import (
    DEPTH,
    TEXT,
    after_prefill,
    deep_model,
    dense_pass,
    is_close,
    open_llm,
    prompt_rows,
    same_text,
)
from anydecode.certification.oracles.prefill.planted_model import distance
from anydecode.decoders.prefill.quickprefill import QuickPrefill, smallest
from anydecode.models.transformer import Transformer
from anydecode.scoring.prompt_embeds import PromptEmbeds


@oracle_test("quickprefill")
def quickprefill() -> Iterator[Check]:
    """Groups of 20 rows, halved per layer; each group attends to the kept halves before it."""
    keys = np.array([[[3.0]], [[1.0]], [[-2.0]], [[1.0]]])
    yield Check("the smallest norms; ties go to the first", smallest(keys, 2).tolist() == [1, 3])
    model = deep_model()
    found = after_prefill(model, QuickPrefill(group=20, query=30), TEXT)
    media, length = len(TEXT) - 30, len(TEXT) - 1
    expected = sum((min(20, media - start)) // 2 for start in range(0, media, 20)) + length - media
    sizes = {len(k) for k, _ in found}
    yield Check("half of every group is cached", sizes == {expected}, f"{sizes}, {expected}")
    _, dense, values, _ = dense_pass(
        model, prompt_rows(model, TEXT), dict.fromkeys(range(DEPTH), np.arange(length))
    )
    norms = np.linalg.norm(dense[0][:20].reshape(20, -1), axis=1)
    at = np.array(sorted(sorted(range(20), key=lambda i: norms[i])[:10]))
    first = all(is_close(found[0][i][:10], (dense, values)[i][0][at]) for i in range(2))
    yield Check("the kept keys have the smallest norms", first)
    layers = []
    for layer in range(DEPTH):  # the first group attends to all of itself in every layer
        norms = np.linalg.norm(dense[layer][:20].reshape(20, -1), axis=1)
        at = np.array(sorted(sorted(range(20), key=lambda i: norms[i])[:10]))  # noqa: B023
        layers.append((is_close(found[layer][0][:10], dense[layer][at]), at.tolist()))
    yield Check("each layer selects by its own keys", all(same for same, _ in layers))
    yield Check(
        "layers keep different positions",
        len({tuple(positions_kept) for _, positions_kept in layers}) > 1,
    )
    # An odd change of `query` changes the number of cached keys of one of two lengths.
    for text in (TEXT * 5, (TEXT * 5)[:-1]):
        yield _default_check(model, text)
    with open_llm(model) as llm:
        plain = llm.generate(TEXT, max_tokens=12, ignore_eos=True).tokens
        whole = llm.generate(
            TEXT, decoder="quickprefill:group=20,keep=1", max_tokens=12, ignore_eos=True
        )
    yield Check("keeping all changes nothing", plain == whole.tokens)
    same = PromptEmbeds(5, prompt_rows(model, TEXT)[5:30])
    with open_llm(model) as llm:
        given = llm.generate("?" * 5 + TEXT[5:], max_tokens=12, ignore_eos=True,
                             decoder="quickprefill:keep=1", prompt_embeds=same)  # fmt: skip
        read = llm.generate("?" * 5 + TEXT[5:], max_tokens=12, ignore_eos=True)
    yield Check("embeddings of tokens are equivalent to the tokens", given.tokens == read.tokens)
    yield from same_text("quickprefill:group=20,query=30")


def _default_check(model: Transformer, text: str) -> Check:
    """By default, groups of 256 rows before the last 64 tokens, halved. Keys of the first layer do
    not depend on attention, and those of the first group on no other group."""
    found = after_prefill(model, catalogue.build("quickprefill"), text)
    everything, group = np.arange(len(text) - 1), np.arange(256)
    _, keys, _, _ = dense_pass(
        model, prompt_rows(model, text), {0: everything} | dict.fromkeys(range(1, DEPTH), group)
    )

    def norms(rows: np.ndarray) -> np.ndarray:
        lengths: np.ndarray = np.sort(np.linalg.norm(rows.reshape(len(rows), -1), axis=1))
        return lengths

    end, first = len(text) - 64, found[0][0]
    kept = 128 + (end - 256) // 2
    # In the first layer, the keys of equal tokens have equal norms.
    right = [
        is_close(norms(first[:128]), norms(keys[0][:256])[:128]),
        is_close(norms(first[128:kept]), norms(keys[0][256:end])[: kept - 128]),
        is_close(first[kept:], keys[0][end:]),
    ]
    for layer in range(1, DEPTH):
        order = np.argsort(np.linalg.norm(keys[layer][:256].reshape(256, -1), axis=1))
        right.append(is_close(found[layer][0][:128], keys[layer][np.sort(order[:128])]))
    name = f"the default parameters are the published ones, {len(text)} tokens"
    return Check(name, all(right), str(right))


@measure(
    "quickprefill",
    "total variation of the next token, half of the keys cached",
    samples=12,
    margin=0.5,
)
def quickprefill_loss(samples: int) -> float:
    """The claim: half of the keys, those of small norm, are nearly as good as all."""
    return distance(lambda: QuickPrefill(group=25, keep=0.5, query=20), samples)
