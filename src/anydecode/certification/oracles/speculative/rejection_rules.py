"""The rejection rules that papers publish, through the drafts of a whole method: its samples are
compared with the enumerated distribution of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import numpy as np

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import Check
from anydecode.certification.chi_square import (
    DRAFT_SCRIPT,
    PROMPT,
    TARGET_SCRIPT,
    VOCABULARY,
    Script,
    expected,
    fit,
    sampled,
    small_llm,
)
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.oracles.speculative.state_drafters import Drafter
from anydecode.certification.oracles.transformer import rms_norm
from anydecode.certification.tiny import tiny_network, with_drafter
from anydecode.decoders.framework.rejection import RejectionSampling
from anydecode.models.network import Network
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.score import Scores
from anydecode.scoring.tree import TokenTree

#: A prompt that repeats itself, for methods that copy or learn from the text.
REPEATING = (1, 0, 3, 1, 0, 3, 2, 1, 0, 3, 1)
TEMPERATURE, SAMPLES = 0.8, 600


class CountingRejection(RejectionSampling):
    """The rule, with the numbers of drafts tested and accepted, and the kinds of siblings that were
    drawn from a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.num_drafts = self.num_accepted = 0
        self.kinds: set[str] = set()

    def step(
        self, tree: TokenTree, scores: Scores, node: int, children: Seq[int]
    ) -> tuple[int | None, int]:
        child, token = super().step(tree, scores, node, children)
        if children and node in tree.probabilities:
            self.kinds.add(tree.kind)
        self.num_drafts += len(children)
        self.num_accepted += child is not None
        return child, token


class MaskTokenizer(ByteTokenizer):
    """The tokenizer of models over five tokens and a mask."""

    vocab_size = VOCABULARY + 1
    mask_id = VOCABULARY


def small_diffusion_llm() -> LLM:
    """A target over five tokens, and a diffusion model that drafts for it."""

    def draft(path: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = np.append(DRAFT_SCRIPT(path[-1:]), np.float32(9.0))  # the mask is likely
        return row

    target = ScriptedModel(TARGET_SCRIPT, vocab_size=VOCABULARY)
    drafting = ScriptedModel(draft, vocab_size=VOCABULARY + 1, causal=False)
    return LLM(target, tokenizer=MaskTokenizer(), draft=drafting, cache_positions=8192)


def small_masked_llm() -> LLM:
    """A target over five tokens and a mask, whose masks predict from another distribution."""

    def logits(path: tuple[int, ...]) -> np.ndarray:
        text = tuple(token for token in path if token < VOCABULARY)
        if len(text) == len(path):
            return np.append(TARGET_SCRIPT(text), np.float32(-np.inf))
        return np.append(DRAFT_SCRIPT(text), np.float32(9.0))

    target = ScriptedModel(logits, vocab_size=VOCABULARY + 1)
    return LLM(target, tokenizer=MaskTokenizer(), cache_positions=8192)


def small_drafter_llm(drafter: Drafter) -> LLM:
    """A target over five tokens whose layers add nothing, and a drafter of it."""
    return with_drafter(drafter, residual=0.0, vocabulary=VOCABULARY, cache_positions=8192)


def last_token_script(text: tuple[int, ...]) -> np.ndarray:
    """The logits of the target of `small_drafter_llm`."""
    weights = tiny_network(layers=4, residual=0.0, vocabulary=VOCABULARY).weights
    state = rms_norm(weights.embedding.data[text[-1]], weights.final_norm, 1e-5)
    return np.asarray(state @ weights.head.data.T, np.float32)


def network_script(network: Network) -> Script:
    """The logits of a Llama, by a forward pass over the whole text."""

    @cache
    def logits(text: tuple[int, ...]) -> np.ndarray:
        forward = Forward(network)
        rows = [forward.step(token) for token in text]
        return rows[-1].astype(np.float32)

    return logits


def rejection_checks(
    key: str,
    open_llm: Callable[[], LLM] = small_llm,
    prompt: Seq[int] = PROMPT,
    samples: int = SAMPLES,
    script: Script = TARGET_SCRIPT,
    kind: str | None = None,
    **parameters: Any,
) -> Iterator[Check]:
    """Checks that the samples of `key` under its published rejection rule follow the target's
    distribution, while some drafts are accepted and some are not. `script` has the logits of the
    target of `open_llm`; `kind` is that of its trees (see `TokenTree`): a wrong one changes too
    little for so few samples."""
    rule, options = CountingRejection(), {"temperature": TEMPERATURE}
    with open_llm() as llm:
        decoder = catalogue.build(key, acceptance=rule, **parameters)
        texts = sampled(llm, decoder, options, samples, prompt=prompt)
    found = fit(texts, expected(options, prompt, script))
    yield Check(
        f"{key}: with the rejection rule samples follow the target", found.passed, str(found)
    )
    yield Check(
        f"{key}: the rejection rule accepts and rejects drafts",
        0 < rule.num_accepted < rule.num_drafts,
        f"{rule.num_accepted} of {rule.num_drafts}",
    )
    if kind is not None:
        name = f"{key}: siblings are tested by the rule for {kind!r}"
        expected_kinds = set[str]() if kind == "point" else {kind}
        yield Check(name, rule.kinds == expected_kinds, ", ".join(sorted(rule.kinds)))
