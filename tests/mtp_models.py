"""Models with the modules of their checkpoints that predict further tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anydecode import LLM
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.drafters import drafter_model
from anydecode.models.families import load_network
from anydecode.models.mtp import load_mtp
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer


def mtp_llm(checkpoint: Checkpoint, backend: str | None = None) -> LLM:
    """The model of a checkpoint, with its module as the draft model."""
    network = load_network(checkpoint)
    target = Transformer(network, name="tiny", executor=choose_executor(backend, 1))
    packer = getattr(target.executor, "packer", None)
    module = load_mtp(checkpoint, network)
    draft = drafter_model(module, name="mtp", executor=choose_executor(backend, 1, packer=packer))
    return LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=512)


def assert_module_drafts(
    llm: LLM, prompt: list[int], chain: Callable[[list[int], int], list[int]], more_than: int = 3
) -> None:
    """Asserts that texts with drafts of the model's module are those of plain decoding, and that
    the drafts of more than so many rounds are `chain(text, count)`: what another forward pass
    drafts after a text."""
    for temperature in (0.7, 0.0):
        plain, drafted = (
            llm.generate(
                prompt, decoder=key, max_tokens=16, temperature=temperature, seed=1,
                ignore_eos=True, trace=True,
            )
            for key in ("autoregressive", "mtp")
        )  # fmt: skip
        assert drafted.tokens == plain.tokens
    llm.engine.check_integrity()
    rounds = [event for event in drafted.trace or () if event["drafted"]]
    assert len(rounds) > more_than
    text = prompt + drafted.tokens
    for event in rounds:
        expected = chain(text[: event["position"]], len(event["drafted"]))
        assert event["drafted"] == expected


def last_streams(part: Any, merge: Any, inputs: Any = None, **given: Any) -> tuple[Any, Any]:
    """Of a model of `transformers` with several streams: those after the last layer, which its
    module `merge` reads, and the states after the final norm.

    Args:
        part: The model without its head.
        merge: What reads the streams.
        inputs: Streams in place of those before the first layer.
        given: The arguments of `part`.
    """
    before: list[Any] = []
    hooks = [merge.register_forward_pre_hook(lambda _, found: before.append(found[0]))]
    if inputs is not None:
        hooks.append(
            part.layers[0].register_forward_pre_hook(lambda _, found: (inputs[None], *found[1:]))
        )
    mixed = part(**given).last_hidden_state
    for hook in hooks:
        hook.remove()
    return before[0][0], mixed[0]
