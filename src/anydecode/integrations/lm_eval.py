"""A model class for EleutherAI's `lm-eval` harness, on top of `LLM`.

In Python:

    import lm_eval, anydecode.integrations.lm_eval
    options = "model=smollm2-135m-instruct,threads=2"
    lm_eval.simple_evaluate(model="anydecode", model_args=options, tasks=[...])

On the command line, with the arguments of `lm_eval`:

    python -m anydecode.integrations.lm_eval run --model anydecode \\
        --model_args model=smollm2-135m-instruct --tasks ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any
from uuid import uuid4

import lm_eval.models  # noqa: F401  # lm-eval registers its own models only before any other
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.progress import progress

#: Requests that are computed together; bounds memory.
BATCH = 64
DEFAULT_NEW_TOKENS = 256
#: Names of the same setting in tasks.
_NUM_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_SAMPLING = ("top_k", "top_p", "min_p", "seed")


@register_model("anydecode")
class AnydecodeLM(LM):  # type: ignore[misc]
    """Runs lm-eval requests on an `LLM`. Texts longer than the context are truncated on the left.

    Args:
        model: A model as `LLM` takes it, or an `LLM`.
        max_length: Maximum number of tokens of a request; by default that of the `LLM`.
        batch_size, max_batch_size: Not used: the engine forms its own batches.
        device: Not used: lm-eval's command line names a GPU on every machine. An `LLM` on one may
            be passed as `model`.
        **options: Further ones of `LLM`, such as `threads` and `cache`.
    """

    def __init__(
        self,
        model: Any = "smollm2-135m-instruct",
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.max_length = min(self.llm.max_length, max_length or self.llm.max_length)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """For each (context, continuation): its log-likelihood, and whether greedy decoding
        generates it."""
        return self._scores([self._truncate(*self._split(*one.args)) for one in requests])

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """For each (text,): the log-likelihood of the whole text, in lm-eval's windows: each token
        is predicted once, and the last window has as much context as fits."""
        pairs, owners = [], []
        for index, request in enumerate(requests):
            tokens = self.llm.encode(request.args[0], special=False)
            windows = get_rolling_token_windows(
                tokens, self._start_token(), max_seq_len=self.max_length - 2, context_len=1
            )
            for window in windows:
                pairs.append(make_disjoint_window(window))
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, (total, _) in zip(owners, self._scores(pairs), strict=True):
            totals[index] += total
        return totals

    def generate_until(self, requests: list[Any]) -> list[str]:
        """For each (context, settings): the generated text, up to a stop string of `until`."""
        groups: dict[str, list[int]] = {}  # requests with the same settings, which run together
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        answers = [""] * len(requests)
        for indices in groups.values():
            settings = requests[indices[0]].args[1]
            chosen = (settings[name] for name in _NUM_TOKENS if settings.get(name))
            count = int(next(chosen, DEFAULT_NEW_TOKENS))
            room = max(1, self.max_length - count - 1)
            prompts = [self._encode(requests[index].args[0])[-room:] for index in indices]
            for index, text in zip(indices, self.texts(prompts, count, settings), strict=True):
                answers[index] = text
        return answers

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the model's chat template writes it. Without `add_generation_prompt` it
        ends with the text of the last message, which the answer continues.

        Raises:
            InvalidRequestError: There is no template, or it rejects or changes the conversation.
        """
        render = self.llm.tokenizer.render_chat
        if add_generation_prompt:
            return render(chat_history)
        mark, last = uuid4().hex, chat_history[-1]
        marked = [*chat_history[:-1], {**last, "content": last["content"] + mark}]
        text, found, _ = render(marked, add_generation_prompt=False).partition(mark)
        if not found:
            raise InvalidRequestError("the chat template changes the last message")
        return text

    @property
    def tokenizer_name(self) -> str:
        """A name of the chat template, by which lm-eval tells its caches of requests apart."""
        template = self.llm.tokenizer.chat_template or ""
        return f"anydecode-{sha256(template.encode()).hexdigest()[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The Jinja source of the model's chat template, for lm-eval's reports."""
        return self.llm.tokenizer.chat_template if chat_template else None

    def likelihoods(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """For each (context, continuation) in token ids, neither of them empty: as
        `loglikelihood`."""
        results = _in_batches(self.llm.scores, pairs, "likelihoods")
        return [(result.total, result.greedy) for result in results]

    def texts(self, prompts: list[list[int]], count: int, settings: dict[str, Any]) -> list[str]:
        """Answers of at most `count` tokens to prompts in token ids, with the same settings of a
        task."""
        options = {name: settings[name] for name in _SAMPLING if name in settings}
        options["temperature"] = settings.get("temperature", 1.0) if is_sampled(settings) else 0.0
        options |= {"max_tokens": count, "stop": stops(settings)}
        generations = _in_batches(
            lambda part: self.llm.generate(part, **options), prompts, "answers"
        )
        return [generation.text for generation in generations]

    def _scores(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """`likelihoods` where a continuation may have no tokens: it is certain."""
        found = [(0.0, True)] * len(pairs)
        indices = [index for index, (_, tail) in enumerate(pairs) if tail]
        results = self.likelihoods([pairs[index] for index in indices])
        for index, result in zip(indices, results, strict=True):
            found[index] = result
        return found

    def _encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the checkpoint puts around one. A
        chat template may have written the first of them."""
        tokenizer = self.llm.tokenizer
        start = tokenizer.bos_id if tokenizer is not None else None
        has_start = start is not None and text.startswith(tokenizer.token_text(start))
        return self.llm.encode(text, special=not has_start)

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, split after the tokens of the context. Spaces at the end of the
        context are moved to the continuation, since tokenizers attach them to the next word."""
        if not context:
            return [self._start_token()], self.llm.encode(continuation, special=False)
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        head = self._encode(context)
        return head, self._encode(context + continuation)[len(head) :]

    def _truncate(self, head: list[int], tail: list[int]) -> tuple[list[int], list[int]]:
        window = self.max_length - 1 - len(tail)
        return head[-max(1, window) :], tail

    def _start_token(self) -> int:
        """The token before a text: beginning-of-sequence, else end-of-sequence, else 0."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None or (tokenizer.bos_id is None and not tokenizer.eos_ids):
            return 0
        return tokenizer.bos_id if tokenizer.bos_id is not None else min(tokenizer.eos_ids)


def is_sampled(settings: dict[str, Any]) -> bool:
    """Whether a task's settings ask for samples rather than greedy answers."""
    return bool(settings.get("do_sample", settings.get("temperature", 0.0) > 0))


def stops(settings: dict[str, Any]) -> list[str]:
    """The stop strings of a task's settings."""
    until = settings.get("until") or []
    return [one for one in ([until] if isinstance(until, str) else until) if one]


def _in_batches(
    compute: Callable[[list[Any]], Sequence[Any]], items: list[Any], name: str
) -> list[Any]:
    """What `compute` returns for all items, in batches, with progress in `name`."""
    results: list[Any] = []
    if not items:
        return results
    with progress(name, len(items)) as state:
        for start in range(0, len(items), BATCH):
            results += compute(items[start : start + BATCH])
            state.update(len(results))
    return results


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
