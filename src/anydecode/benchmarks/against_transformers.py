"""`anydecode doctor --model`: whether a model computes what `transformers` computes.

The model answers some prompts greedily. At each token of the answers, three rows of logits are
compared: those of the format that the model runs in, those of the same weights in float32, and
those of `transformers` in float32. A token that `transformers` would not have chosen has one of two
causes. If the float32 computations agree, the arithmetic of the format has decided between tokens
of similar probability: a near-tie. If they do not, the difference is real: one of the two
implementations reads the files wrongly.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.benchmarks.divergence import divergences, logits_of
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.families import build_model
from anydecode.models.loading import load_checkpoint, resolve
from anydecode.models.opening import choose_executor
from anydecode.models.through_transformers import open_through_transformers
from anydecode.progress import status
from anydecode.tasks.prompts import PROMPTS

NUM_PROMPTS = 3
#: What rounding in float32 may change in a row's logits, relative to the range of the row.
ROUNDING = 1e-3


def compare(model: str, tokens: int, dtype: str | None, threads: int | None) -> dict[str, Any]:
    """Compare a model with `transformers`, whose weights take four bytes each.

    Args:
        model: A name, a folder or a GGUF file.
        tokens: The number of tokens of each answer, at most.
        dtype, threads: As for `LLM`.

    Returns:
        What `differences` returns, the name of the model, whether texts are split into the same
        tokens (True for GGUF files), and the tokens that differ, by answer and position, from 1 on.

    Raises:
        MissingPackageError: `transformers` is not installed.
        CheckpointError: `transformers` cannot open the model.
        InvalidRequestError: The model has no room for so many tokens.
        UnsupportedCombinationError: The model is no causal language model.
    """
    checkpoint, executor = load_checkpoint(model), choose_executor(threads=threads)
    tokenizer, own = checkpoint.tokenizer, build_model(checkpoint, dtype, executor=executor)
    if own.spec.is_encoder or not own.spec.causal or tokenizer is None:
        raise UnsupportedCombinationError(
            f"{checkpoint.name}: only causal language models with a tokenizer are compared with"
            " transformers"
        )
    texts = [prompt.text for prompt in PROMPTS[:: len(PROMPTS) // NUM_PROMPTS]][:NUM_PROMPTS]
    spelt = [tokenizer.encode(text) for text in texts]
    room = own.spec.max_positions - tokens
    if room < 1:
        raise InvalidRequestError(
            f"--tokens {tokens} leaves no room for a prompt in {own.spec.max_positions} positions"
        )
    prompts = [prompt[:room] for prompt in spelt]
    with status(f"loading {checkpoint.name} with transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers lacks as a backend
        reference, other = open_through_transformers(model, "float32")
    with status(f"{checkpoint.name} answers {NUM_PROMPTS} prompts"):
        with LLM(own, tokenizer=tokenizer, draft="none") as llm:
            found = llm.generate(prompts, decoder="autoregressive", max_tokens=tokens)
            answers = [one.tokens for one in found]
            logits = _rows(own, prompts, answers)
    with status(f"{checkpoint.name} computes them again in float32"):
        plain = build_model(load_checkpoint(model), "float32", executor=executor)
        exact, expected = (_rows(one, prompts, answers) for one in (plain, reference))
    # transformers makes tokenizers from the vocabularies of GGUF files, with rules of its own.
    is_gguf = resolve(model).is_file()
    report = differences(logits, exact, expected, np.concatenate(answers))
    places = [(answer, index) for answer, one in enumerate(answers) for index in range(len(one))]
    for one in report["other_tokens"]:
        answer, index = places[one.pop("row")]
        one |= {"answer": answer + 1, "position": index + 1}
        one["texts"] = [tokenizer.decode([token]) for token in one["tokens"]]
    return {
        "model": checkpoint.name,
        "same_tokenization": is_gguf or [other.encode(text) for text in texts] == spelt,
        **report,
    }


def _rows(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> np.ndarray:
    """The logits from which the tokens of all answers are chosen, `[tokens, vocab_size]`."""
    return np.concatenate(
        [
            logits_of(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    )


def differences(
    logits: np.ndarray, exact: np.ndarray, expected: np.ndarray, tokens: np.ndarray
) -> dict[str, Any]:
    """How logits differ from those of `transformers`.

    Args:
        logits: Those of the model's format, float32 `[tokens, vocab_size]`.
        exact: Those of its weights in float32.
        expected: Those of `transformers`.
        tokens: The tokens that were chosen, int `[tokens]`.

    Returns:
        The number of `tokens`; of `near_ties`; of `real_differences`, rows that differ in float32
        by more than rounding explains, whatever their tokens; the `largest_difference` in float32,
        relative to a row's range; the mean `divergence` of the format, in nats per token; and the
        `other_tokens`: for each row whose token is not the first one of `transformers`, both
        tokens, their probabilities in `transformers`, and whether it is a near-tie.
    """
    size = min(one.shape[1] for one in (logits, exact, expected))  # vocabularies may be padded
    logits, exact, expected = logits[:, :size], exact[:, :size], expected[:, :size]
    apart = np.abs(exact - expected).max(1) / np.ptp(expected, axis=1)
    is_real = ~(apart <= ROUNDING)  # a row that is not finite is a real difference
    probabilities = np.exp(expected - expected.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    first = expected.argmax(1)
    others = [
        {
            "row": int(row),
            "tokens": [int(tokens[row]), int(first[row])],
            "probabilities": [float(probabilities[row, one[row]]) for one in (tokens, first)],
            "is_near_tie": not is_real[row],
        }
        for row in np.flatnonzero(tokens != first)
    ]
    return {
        "tokens": len(tokens),
        "near_ties": sum(bool(one["is_near_tie"]) for one in others),
        "real_differences": int(is_real.sum()),
        "largest_difference": float(apart.max()),
        "divergence": float(divergences(expected, logits).mean()),
        "other_tokens": others,
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The report of `compare` as a text."""
    others, tokens = report["other_tokens"], report["tokens"]
    found = [
        f"{report['model']}: {NUM_PROMPTS} answers, {tokens} tokens, compared with transformers in"
        " float32",
        f"the same token: {tokens - len(others)}; near-ties: {report['near_ties']}; real"
        f" differences: {report['real_differences']}",
        f"in float32, logits differ by at most {report['largest_difference']:.1e} of their range"
        f" (rounding: up to {ROUNDING:.0e})",
        f"the format of the weights changes {report['divergence']:.4f} nats per token",
    ]
    for one in others:
        own, other = (
            f"{text!r} ({share:.1%} there)"
            for text, share in zip(one["texts"], one["probabilities"], strict=True)
        )
        cause = "a near-tie" if one["is_near_tie"] else "a real difference"
        found.append(
            f"answer {one['answer']}, token {one['position']}: {own}, transformers {other}: {cause}"
        )
    if not report["same_tokenization"]:
        found.append("transformers splits the prompts into other tokens: a real difference")
    return found


def is_same(report: dict[str, Any]) -> bool:
    """Whether there is no real difference."""
    return bool(report["same_tokenization"]) and report["real_differences"] == 0
