"""A model class for EleutherAI's `lm-eval` harness, on top of `LLM`.

import lm_eval, anydecode.integrations.lm_eval
lm_eval.simple_evaluate(model="anydecode", model_args="model=smollm2-135m-instruct", tasks=[...])
"""

from __future__ import annotations

from typing import Any

import lm_eval.models  # noqa: F401  # lm-eval registers its own models only before any other
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from anydecode.api.llm import LLM

#: Pairs that are scored together; bounds memory.
BATCH = 64
DEFAULT_NEW_TOKENS = 256
_SAMPLING = ("top_k", "top_p", "min_p", "seed")


@register_model("anydecode")
class AnydecodeLM(LM):  # type: ignore[misc]
    """Runs lm-eval requests on an `LLM`. Texts longer than the context are truncated on the
    left."""

    def __init__(self, model: Any = "smollm2-135m-instruct", **options: Any) -> None:
        super().__init__()
        ignored = ("batch_size", "max_batch_size", "device")
        llm_options = {name: value for name, value in options.items() if name not in ignored}
        self.llm = model if isinstance(model, LLM) else LLM(model, **llm_options)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """For each (context, continuation): its log-likelihood, and whether greedy decoding
        generates it."""
        pairs = [self._truncate(*self._split(*request.args)) for request in requests]
        return [(result.total, result.greedy) for result in self._scores(pairs)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """For each (text,): the log-likelihood of the whole text, in non-overlapping windows."""
        totals = []
        for request in requests:
            tokens = self.llm.encode(request.args[0], special=False)
            size = self.llm.max_length - 2
            windows = [tokens[start : start + size] for start in range(0, len(tokens), size)]
            contexts = [[self._start_token()], *([window[-1]] for window in windows)]
            pairs = list(zip(contexts, windows, strict=False))
            totals.append(sum(result.total for result in self._scores(pairs)))
        return totals

    def generate_until(self, requests: list[Any]) -> list[str]:
        """For each (context, settings): the generated text, up to a stop string of `until`."""
        answers = []
        for request in requests:
            context, settings = request.args
            count = int(settings.get("max_gen_toks") or DEFAULT_NEW_TOKENS)
            until = settings.get("until") or []
            options = {name: settings[name] for name in _SAMPLING if name in settings}
            is_sampled = settings.get("do_sample", settings.get("temperature", 0.0) > 0)
            generation = self.llm.generate(
                self.llm.encode(context)[-max(1, self.llm.max_length - count - 1) :],
                max_tokens=count,
                temperature=settings.get("temperature", 1.0) if is_sampled else 0.0,
                stop=[until] if isinstance(until, str) else list(until),
                **options,
            )
            answers.append(generation.text)
        return answers

    def _scores(self, pairs: list[tuple[list[int], list[int]]]) -> list[Any]:
        result: list[Any] = []
        for start in range(0, len(pairs), BATCH):
            result += self.llm.scores(pairs[start : start + BATCH])
        return result

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, split after the tokens of the context. Spaces at the end of the
        context are moved to the continuation, since tokenizers attach them to the next word."""
        if not context:
            return [self._start_token()], self.llm.encode(continuation, special=False)
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        head = self.llm.encode(context)
        return head, self.llm.encode(context + continuation)[len(head) :]

    def _truncate(self, head: list[int], tail: list[int]) -> tuple[list[int], list[int]]:
        window = self.llm.max_length - 1 - len(tail)
        return head[-max(1, window) :], tail

    def _start_token(self) -> int:
        """The token before a text: beginning-of-sequence, else end-of-sequence, else 0."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None or (tokenizer.bos_id is None and not tokenizer.eos_ids):
            return 0
        return tokenizer.bos_id if tokenizer.bos_id is not None else min(tokenizer.eos_ids)
