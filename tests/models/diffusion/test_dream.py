"""Dream's classes and Open-dLLM in their published layouts, against a forward pass in plain torch
with Dream's tokenizer files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from diffusion_checkpoints import (
    MASK,
    SIZES,
    Tiny,
    V,
    assert_decodes_as_published,
    largest_difference,
    recorded,
    write,
)

DREAM: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key != "head_dim"},
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_dream.DreamConfig",
        "AutoModel": "modeling_dream.DreamModel",
    },
    "bos_token_id": 59,
    "eos_token_id": 60,
    "hidden_act": "silu",
    "mask_token_id": MASK,
    "max_window_layers": 28,
    "model_type": "Dream",
    "pad_token_id": 60,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
#: The config of a causal model: nothing in it says that it is one of diffusion.
OPEN_DLLM: dict[str, Any] = {
    **SIZES,
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 60,
    "hidden_act": "silu",
    "max_window_layers": 2,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 4,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
HEADS = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY = Tiny({**DREAM, **HEADS}, shift=1, biases=True)


def test_every_pass_equals_the_reference(tmp_path: Path) -> None:
    assert_decodes_as_published(TINY, tmp_path)


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: logits in place, causal rows, blocks."""
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(6)))[:1]
    for wrong in ({"shift": 0}, {"block": 1}, {"block": 4}):
        assert largest_difference(replace(TINY, **wrong), tensors, passes) > 1e-2


def test_dreamon_is_known_by_its_expand_token(tmp_path: Path) -> None:
    """It opens with the decoder of regions of variable length, which expands that token; others
    never generate it."""
    tiny = replace(TINY, config={**TINY.config, "expand_token_id": 62}, decoder="dream-coder")
    assert_decodes_as_published(tiny, tmp_path)
    with LLM(str(tmp_path), cache_positions=256) as llm:
        assert llm.model.spec.expand_token == 62
        prompt, options = [5, 6, MASK, 7], {"max_tokens": 12, "ignore_eos": True, "seed": 1}
        likely = {"logit_bias": {62: 1000.0}, **options}
        assert len(llm.generate(prompt, **likely).tokens) > len(
            llm.generate(prompt, **options).tokens
        )
        assert 62 not in llm.generate([5, 6], decoder="dream", **likely).tokens


def test_the_tokenizer_of_the_slow_class_is_read(tmp_path: Path) -> None:
    """Dream's folders have vocab.json, merges.txt and tokenizer_config.json only."""
    write(TINY, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocab = {text: token for token, text in enumerate([*letters, "Ġ", "ab", "Ġc"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ c\n")
    added = {
        60: {"content": "<|endoftext|>", "special": True},
        MASK: {"content": "<|mask|>", "special": True},
    }
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {str(token): entry for token, entry in added.items()},
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(str(tmp_path), cache_positions=256) as llm:
        assert llm.default_decoder == "dream" and llm.tokenizer.mask_id == MASK
        assert llm.encode("ab cd<|mask|>") == [vocab["ab"], vocab["Ġc"], vocab["d"], MASK]
        answer = llm.generate("ab cd", max_tokens=4, ignore_eos=True)
        assert len(answer.tokens) == 4


def test_a_config_of_a_causal_model_is_read_as_the_user_says(tmp_path: Path) -> None:
    tiny = Tiny(OPEN_DLLM, shift=1, biases=True, mask_text="<M>")
    with pytest.raises(InvalidRequestError, match=r"family='open' is none .* mean .*open_dllm"):
        write(tiny, tmp_path)
        LLM(str(tmp_path), family="open")
    assert_decodes_as_published(tiny, tmp_path, family="open_dllm", mask=MASK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 4}, "block=4 has no meaning for dream"),
        ({"mask": V}, f"mask={V} is no token of the model"),
        ({"mask": -1}, "mask=-1 is no token"),
    ],
)
def test_options_that_do_not_fit_raise_an_error(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(TINY, tmp_path)
    with pytest.raises(InvalidRequestError, match=message):
        LLM(str(tmp_path), **options)


def test_a_model_without_a_mask_token_asks_for_one(tmp_path: Path) -> None:
    tiny = replace(TINY, config={**TINY.config, "mask_token_id": None}, mask_text="<odd>")
    write(tiny, tmp_path)
    with LLM(str(tmp_path), cache_positions=256) as llm:
        with pytest.raises(InvalidRequestError, match=r"open it with mask=TOKEN_ID \(--mask\)"):
            llm.generate([1, 2], max_tokens=4)
    with LLM(str(tmp_path), cache_positions=256, mask=MASK) as llm:
        assert MASK not in llm.generate([1, 2], max_tokens=4, ignore_eos=True).tokens
