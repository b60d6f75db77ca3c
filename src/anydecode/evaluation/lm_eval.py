"""The model class that EleutherAI's `lm-eval` asks for, over `LLM`.

import lm_eval, anydecode.evaluation.lm_eval
lm_eval.simple_evaluate(model="anydecode", model_args="model=smollm2-135m-instruct", tasks=[...])
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from anydecode.engine.llm import LLM

#: Pairs scored together; bounds what waits in memory.
BATCH = 64
DEFAULT_NEW_TOKENS = 256
_SAMPLING = ("top_k", "top_p", "min_p", "seed")


@register_model("anydecode")
class AnydecodeLM(LM):  # type: ignore[misc]
    """Requests carry their parts in `args`. Texts too long for the context lose their beginning."""

    def __init__(self, model: Any = "smollm2-135m-instruct", **options: Any) -> None:
        super().__init__()
        ignored = ("batch_size", "max_batch_size", "device")
        kept = {name: value for name, value in options.items() if name not in ignored}
        self.llm = model if isinstance(model, LLM) else LLM(model, **kept)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """For each (context, continuation): log-likelihood, and whether greedy decoding says it."""
        pairs = [self._fitting(*self._split(*request.args)) for request in requests]
        return [(found.total, found.greedy) for found in self._scores(pairs)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """For each (text,): log-likelihood of all of it, in windows that do not overlap."""
        totals = []
        for request in requests:
            tokens = self.llm.encode(request.args[0], special=False)
            room = self.llm.max_length - 2
            windows = [tokens[start : start + room] for start in range(0, len(tokens), room)]
            before = [[self._start()], *([window[-1]] for window in windows)]
            pairs = list(zip(before, windows, strict=False))
            totals.append(sum(found.total for found in self._scores(pairs)))
        return totals

    def generate_until(self, requests: list[Any]) -> list[str]:
        """For each (context, settings): the text up to one of `until`."""
        answers = []
        for request in requests:
            context, settings = request.args
            count = int(settings.get("max_gen_toks") or DEFAULT_NEW_TOKENS)
            until = settings.get("until") or []
            options = {name: settings[name] for name in _SAMPLING if name in settings}
            sampled = settings.get("do_sample", settings.get("temperature", 0.0) > 0)
            generation = self.llm.generate(
                self.llm.encode(context)[-max(1, self.llm.max_length - count - 1) :],
                max_tokens=count,
                temperature=settings.get("temperature", 1.0) if sampled else 0.0,
                stop=[until] if isinstance(until, str) else list(until),
                **options,
            )
            answers.append(generation.text)
        return answers

    def _scores(self, pairs: list[tuple[list[int], list[int]]]) -> list[Any]:
        found: list[Any] = []
        for start in range(0, len(pairs), BATCH):
            found += self.llm.scores(pairs[start : start + BATCH])
        return found

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, cut where the context's own tokens end. Spaces at the end of the
        context belong to the continuation, as tokenizers have it."""
        if not context:
            return [self._start()], self.llm.encode(continuation, special=False)
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        head = self.llm.encode(context)
        return head, self.llm.encode(context + continuation)[len(head) :]

    def _fitting(self, head: list[int], tail: list[int]) -> tuple[list[int], list[int]]:
        room = self.llm.max_length - 1 - len(tail)
        return head[-max(1, room) :], tail

    def _start(self) -> int:
        """What stands before a text: the beginning-of-text token, or the end of another."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None or (tokenizer.bos_id is None and not tokenizer.eos_ids):
            return 0
        return tokenizer.bos_id if tokenizer.bos_id is not None else min(tokenizer.eos_ids)
