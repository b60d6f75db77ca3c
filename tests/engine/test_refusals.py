"""What a request cannot have is refused when it is made, before it runs beside others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from anydecode import JsonSchema
from anydecode.api.llm import LLM
from anydecode.certification.denoising import random_model
from anydecode.certification.tiny import early_exit_checkpoint, tiny_model, with_drafter
from anydecode.certification.tiny_blockffn import blockffn_checkpoint
from anydecode.certification.tiny_sambay import sambay_checkpoint
from anydecode.errors import InvalidRequestError
from anydecode.models.families import build_model
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer

#: A schema with a rule that no mask expresses.
CHECKED = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}


def plain(**options: Any) -> LLM:
    return LLM(tiny_model(layers=4), tokenizer=ByteTokenizer(), cache_positions=512, **options)


def starts_at_first_layer(**options: Any) -> LLM:
    model = build_model(sambay_checkpoint(), executor=choose_executor(threads=1))
    given: dict[str, Any] = {"draft": model, "cache_positions": 512, **options}
    return LLM(model, tokenizer=ByteTokenizer(), **given)


def whole_layers(**options: Any) -> LLM:
    model = build_model(blockffn_checkpoint(), executor=choose_executor(threads=1))
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=512, **options)


def denoiser(**options: Any) -> LLM:
    model = random_model(4).model
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=512, **options)


@pytest.mark.parametrize(
    ("open_llm", "decoder", "options", "message"),
    [
        (plain, "del", {"dola_layers": "high"}, "the sampler reads"),
        (plain, "layerskip:layers=3", {"dola_layers": "high"}, "the sampler reads"),
        (plain, "specbound:first=3,depth=3", {"dola_layers": "high"}, "the sampler reads"),
        (
            partial(with_drafter, partial(early_exit_checkpoint, after=3)),
            "kangaroo",
            {"dola_layers": "high"},
            "the sampler reads",
        ),
        (plain, "best-of-n", {"banned_strings": ["a"]}, "banned_strings are checked"),
        (plain, "rain", {"constraint": JsonSchema(CHECKED)}, "this constraint is checked"),
        (plain, "regression", {"max_tokens": 1}, "the number has 3 tokens"),
        (partial(plain, cache="int8"), "fastkv:budget=20", {}, "not a quantized one"),
        (partial(plain, cache="int8"), "quickprefill:query=4", {}, "not a quantized one"),
        (partial(plain, cache="int8"), "gear", {}, "not a quantized one"),
        (plain, "fastkv:budget=20,layer=3", {}, "before the last"),
        (starts_at_first_layer, "layerskip", {}, "start at layer 0"),
        (starts_at_first_layer, "s2d", {}, "start at layer 0"),
        (starts_at_first_layer, "easyspec", {}, "do not run in parallel"),
        (starts_at_first_layer, "swift", {}, "are not left out in part"),
        (whole_layers, "duo-llm", {}, "are not left out in part"),
        (starts_at_first_layer, "ffn-skip", {}, "are not left out in part"),
        (denoiser, "llada:block=8", {}, "blocks have 4 positions"),
        (partial(denoiser, cache="int8"), "llada:cache=elastic", {}, "not a quantized one"),
    ],
)
def test_a_combination_is_refused_at_the_request(
    open_llm: Callable[..., LLM], decoder: str, options: dict[str, Any], message: str
) -> None:
    with open_llm() as llm:
        with pytest.raises(InvalidRequestError, match=message) as found:
            llm.request("abcdefgh" * 8, decoder=decoder, **options)
        assert "\n" not in str(found.value)


def test_layered_prefill_runs_models_as_a_whole_whose_rows_start_at_the_first_layer() -> None:
    texts = []
    for schedule in (None, "layered-prefill:unit=8"):
        with starts_at_first_layer(schedule=schedule) as llm:
            texts.append(llm.generate("abcdefgh" * 12, max_tokens=6, ignore_eos=True).tokens)
    assert texts[0] == texts[1]
