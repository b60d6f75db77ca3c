"""Embeddings of texts and the relevance of pairs of texts, computed by decoders that generate
nothing.

An encoder runs a whole text in one pass, in which every token sees all others; several texts share
a pass. A causal model runs a text in chunks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from anydecode.arguments import checked_arguments
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.pooled_states import encoded, pooled_state
from anydecode.errors import ContextLengthError, InvalidRequestError, UnsupportedCombinationError
from anydecode.models.classification import Classifier, sigmoid
from anydecode.models.encoder_tasks import EncoderTask, task_named, tasks_of
from anydecode.models.pooling import Pooling
from anydecode.models.tokenizer import Tokenizer
from anydecode.models.yes_no import JudgePrompt, YesNo
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence


@dataclass(frozen=True)
class RankedDocument:
    """A document of `LLM.rerank`: its index in the list, and its relevance to the query."""

    index: int
    score: float


class EmbedOptions(TypedDict, total=False):
    """The options of `LLM.embed`.

    Attributes:
        adapter: Name of a LoRA adapter (`add_adapter`), or None.
        prompt_name: The prompt of the repository that is put before a text, such as "query"; None
            for its default.
        task: The task of the model whose updates of its matrices apply, such as "retrieval.query"
            (jina-embeddings-v3); without a `prompt_name` the prompt is that of the task. None for
            no updates.
        dimensions: The length that embeddings are cut to, for models that were trained for it.
        truncate_prompt_tokens: The number of tokens that a text is cut to, -1 for the model's
            context length; None: a longer text is an error.
    """

    adapter: str | None
    prompt_name: str | None
    task: str | None
    dimensions: int | None
    truncate_prompt_tokens: int | None


class RelevanceOptions(TypedDict, total=False):
    """The options of `LLM.relevance` and `rerank`.

    Attributes:
        adapter: Name of a LoRA adapter (`add_adapter`), or None.
        instruction: What documents are searched for, for models that read it (Qwen3-Reranker).
        truncate_prompt_tokens: The number of tokens that a pair is cut to, by cutting the document,
            or a single text with an embedding model; -1 for the model's context length; None: a
            longer one is an error.
    """

    adapter: str | None
    instruction: str | None
    truncate_prompt_tokens: int | None


class PooledState(Decoder):
    """The pooled state of a text after the last layer.

    Args:
        pooling: How states are pooled.
        has_final_norm: Whether the states are those after the final norm.
        types: The token type of each token; empty for type 0.
        task: Whose updates of embeddings are added; None for none.
    """

    requirements = Requirements(causal=None, generates=False)

    def __init__(
        self,
        pooling: Pooling,
        *,
        has_final_norm: bool = True,
        types: Seq[int] = (),
        task: EncoderTask | None = None,
    ) -> None:
        self._task = task
        self.pooling = pooling
        self._has_final_norm = has_final_norm
        self._types = types
        self._state: np.ndarray | None = None

    def decode(self, sequence: Sequence) -> Decoding:
        self._state = yield from pooled_state(
            sequence, TARGET, sequence.prompt, self.pooling, has_final_norm=self._has_final_norm,
            types=self._types, task=self._task,
        )  # fmt: skip

    def state(self) -> np.ndarray:
        """The pooled state, float64 `[hidden_size]`. Available when the request is done."""
        assert self._state is not None
        return self._state

    def vector(self, dimensions: int | None = None) -> list[float]:
        """The embedding, cut to `dimensions`. Available when the request is done."""
        vector: list[float] = self.pooling.vector(self.state(), dimensions).tolist()
        return vector


class RelevanceDecoder(Decoder):
    """Computes the relevance of one text to another."""

    @abstractmethod
    def score(self) -> float:
        """The relevance. Available when the request is done."""


class ClassifierScore(RelevanceDecoder):
    """The relevance that a cross-encoder's classifier computes.

    Args:
        classifier: The classifier.
        types: The token type of each token.
    """

    requirements = PooledState.requirements

    def __init__(self, classifier: Classifier, types: Seq[int]) -> None:
        self._classifier = classifier
        self._states = PooledState(Pooling(classifier.pooling), types=types)

    def decode(self, sequence: Sequence) -> Decoding:
        yield from self._states.decode(sequence)

    def score(self) -> float:
        return float(self._classifier.scores(self._states.state())[0])


class YesNoScore(RelevanceDecoder):
    """The probability of the token "yes" against the token "no" after a text.

    Args:
        tokens: The two tokens.
    """

    requirements = Requirements(generates=False)

    def __init__(self, tokens: YesNo) -> None:
        self._tokens = tokens
        self._score = 0.0

    def decode(self, sequence: Sequence) -> Decoding:
        kv_cache = sequence.kv_cache()
        kv_cache.truncate(0)
        scores = yield sequence.score(sequence.prompt, runner=TARGET)
        logits = scores.logits[-1].astype(np.float64)
        difference = logits[self._tokens.yes_id] - logits[self._tokens.no_id]
        self._score = float(sigmoid(difference))

    def score(self) -> float:
        return self._score


def pooling_of(model: Any) -> Pooling:
    """The pooling of a model; the mean of all states, scaled to length 1, if its repository names
    none."""
    return getattr(model, "pooling", None) or Pooling()


def text_start(model: Any, prompt_name: str | None, task: str | None) -> str:
    """The prompt that is put before a text, see `EmbedOptions`."""
    found = task_named(tasks_of(model), task)
    if found is not None and prompt_name is None:
        return found.prompt
    return pooling_of(model).prompt(prompt_name)


def embedding_decoder(model: Any, task: str | None = None) -> PooledState:
    """The decoder that computes an embedding, for a task if one is named. If the repository of a
    model that generates names no pooling, the states are those before the final norm."""
    is_trained = model.spec.is_encoder or getattr(model, "pooling", None) is not None
    found = task_named(tasks_of(model), task)
    return PooledState(pooling_of(model), has_final_norm=is_trained, task=found)


def cross_encoder(model: Any) -> Classifier | YesNo | None:
    """What computes the relevance of a pair of texts; None if embeddings are compared instead.

    Raises:
        UnsupportedCombinationError: The model is neither a cross-encoder nor trained for
            embeddings, or its classifier has several labels.
    """
    reranker: Classifier | YesNo | None = getattr(model, "reranker", None)
    if isinstance(reranker, Classifier) and reranker.num_labels > 1:
        raise UnsupportedCombinationError(
            f"the classifier of the model has {reranker.num_labels} labels; relevance needs a"
            " cross-encoder with one"
        )
    if reranker is None and not model.spec.is_encoder and getattr(model, "pooling", None) is None:
        raise UnsupportedCombinationError(
            "the model is neither an embedding model (modules.json) nor a cross-encoder, which"
            " relevance and reranking need"
        )
    return reranker


def pair_template(reranker: Classifier | YesNo) -> JudgePrompt | None:
    """The prompt of a model that answers yes or no; None for one that reads pairs of texts."""
    return reranker if isinstance(reranker, YesNo) else reranker.prompt


def relevance_decoder(reranker: Classifier | YesNo, types: Seq[int]) -> RelevanceDecoder:
    """The decoder that computes the relevance of a pair of texts, see `pair_tokens`."""
    if isinstance(reranker, YesNo):
        return YesNoScore(reranker)
    return ClassifierScore(reranker, types)


def cosine_similarity(first: Seq[float], second: Seq[float]) -> float:
    """The cosine of the angle between two embeddings."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))


def ranked(scores: Seq[float], top_n: int | None) -> list[RankedDocument]:
    """The `top_n` documents with the largest scores (None: all), the best first; ties by index."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [RankedDocument(index, scores[index]) for index in order[:top_n]]


def check_instruction(instruction: str | None) -> None:
    """Raise `InvalidRequestError` for an instruction to a model that reads none."""
    if instruction is not None:
        raise InvalidRequestError("instruction has no effect with this model: leave it out")


@checked_arguments()
def check_top_n(top_n: int | None) -> None:
    """Raise `InvalidRequestError` for a number of documents less than 1."""
    if top_n is not None and top_n < 1:
        raise InvalidRequestError(f"top_n is {top_n}; it must be 1 or more, or None for all")


@checked_arguments()
def token_limit(truncate_prompt_tokens: int | None, max_length: int) -> int | None:
    """The number of tokens that a text is cut to; None: it is not cut.

    Args:
        truncate_prompt_tokens: A number of tokens, -1 for the model's context length, or None.
        max_length: The model's context length.

    Raises:
        InvalidRequestError: The number is out of range.
    """
    if truncate_prompt_tokens is None:
        return None
    if truncate_prompt_tokens == -1:
        return max_length
    if not 1 <= truncate_prompt_tokens <= max_length:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {truncate_prompt_tokens}; allowed are 1 to {max_length},"
            " and -1 for the longest"
        )
    return truncate_prompt_tokens


def text_tokens(tokenizer: Tokenizer, texts: Seq[str], max_tokens: int | None) -> list[list[int]]:
    """The tokens of texts, each cut to `max_tokens`; special tokens at the end are kept."""
    return [encoded(tokenizer, text, max_tokens) for text in texts]


def pair_tokens(
    tokenizer: Tokenizer,
    template: JudgePrompt | None,
    pairs: Seq[tuple[str, str]],
    instruction: str | None,
    max_tokens: int | None,
) -> list[tuple[list[int], list[int]]]:
    """The tokens of pairs of a query and a document, and their types.

    Args:
        tokenizer: The model's tokenizer.
        template: The prompt of a model that answers yes or no; None for one that reads pairs.
        pairs: Queries with documents. A document is cut where a pair has more than `max_tokens`.
        instruction: What a document is searched for, for models that read it.
        max_tokens: The number of tokens that a pair is cut to; None: it is not cut.

    Raises:
        ContextLengthError: A query alone is too long.
        InvalidRequestError: The model reads no instruction.
    """
    if template is not None:
        return [
            _yes_no_tokens(tokenizer, template, query, document, instruction, max_tokens)
            for query, document in pairs
        ]
    check_instruction(instruction)
    encode_pair = getattr(tokenizer, "encode_pair", None)
    if encode_pair is None:
        raise InvalidRequestError(f"a {type(tokenizer).__name__} cannot encode pairs of texts")
    found = [encode_pair(query, document, max_tokens) for query, document in pairs]
    for tokens, _ in found:
        _check_query(len(tokens), max_tokens)
    return found


def _yes_no_tokens(
    tokenizer: Tokenizer,
    template: JudgePrompt,
    query: str,
    document: str,
    instruction: str | None,
    max_tokens: int | None,
) -> tuple[list[int], list[int]]:
    parts = template.texts(query, document, instruction)
    first, middle, last = (tokenizer.encode(text, special=False) for text in parts)
    if max_tokens is not None:
        _check_query(len(first) + len(last) + 1, max_tokens)
        middle = middle[: max_tokens - len(first) - len(last)]
    tokens = [*first, *middle, *last]
    return tokens, [0] * len(tokens)


def _check_query(num_tokens: int, max_tokens: int | None) -> None:
    """Check that a pair fits after its document was cut."""
    if max_tokens is not None and num_tokens > max_tokens:
        raise ContextLengthError(
            f"a query has {num_tokens} tokens with an empty document, and truncate_prompt_tokens"
            f" leaves {max_tokens}: shorten it"
        )
