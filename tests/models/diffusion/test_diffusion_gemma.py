"""DiffusionGemma in its published layout, against `transformers`: causal context, windows that end
where the block starts, scales per role, self-conditioning; whole answers decoded step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers.models.diffusion_gemma")

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from anydecode import LLM
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.diffusion_gemma import diffusion_gemma
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.uniform import UniformDenoiser
from anydecode.errors import AnydecodeError
from anydecode.scoring.sequence import Sequence
from diffusion_checkpoints import MASK, write_tokenizer

#: Published fields of the text model with small sizes: windows of 6, blocks of 8.
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 256,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 30.0,
    "initializer_range": 0.3,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "patch_size": 4,
}
PROMPT = [(5 * i + 2) % 60 for i in range(13)]  # longer than a window
BLOCK = 8


def reference(folder: Path) -> Any:
    """A random model of `transformers`, saved to `folder`; no weight has its initial value."""
    torch.manual_seed(0)
    config = DiffusionGemmaConfig(
        text_config=TEXT,
        vision_config=VISION,
        canvas_length=BLOCK,
        image_token_id=60,
        boi_token_id=61,
        eoi_token_id=62,
    )
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 or "norm" in name:
                weight.add_(torch.rand_like(weight) * 0.5)
        for name, buffer in model.named_buffers():
            if "layer_scalar" in name:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    model.save_pretrained(folder)
    write_tokenizer(folder, f"w{MASK}")  # a tokenizer without a mask token
    return model


class Recorded:
    """The passes of a decoder: canvas, first position, raw logits, temperature."""

    def __init__(self) -> None:
        self.passes: list[tuple[np.ndarray, int, np.ndarray, float]] = []
        self.decoder: Any = diffusion_gemma(steps=5, block=0, cache="block")
        plain = self.decoder.denoise

        def denoise(
            sequence: Sequence,
            canvas: Canvas,
            predictions: Predictions,
            positions: np.ndarray,
            is_last: bool,
        ) -> Any:
            logits = np.stack([predictions.logits(i).copy() for i in positions])
            assert canvas.block is not None
            step = canvas.tokens.copy(), canvas.block[0], logits, self.decoder._temperature(canvas)
            self.passes.append(step)
            return plain(sequence, canvas, predictions, positions, is_last)

        self.decoder.denoise = denoise


def decoded(folder: Path, backend: str | None = None, length: int = 20) -> Recorded:
    record = Recorded()
    with LLM(folder, threads=1, **({"backend": backend} if backend else {})) as llm:
        llm.generate(
            [PROMPT], decoder=record.decoder, max_tokens=length, ignore_eos=True, temperature=1.0
        )
        assert llm.engine is not None
        llm.engine.check_integrity()
    return record


def largest_difference(model: Any, record: Recorded, *, conditioned: bool = True) -> float:
    """Of the logits of every pass from those of the reference."""
    worst, last, last_first = 0.0, None, -1
    with torch.no_grad():
        for canvas, first, logits, temperature in record.passes:
            given = last if conditioned and first == last_first else None
            expected = model(
                input_ids=torch.tensor(canvas[None, :first], dtype=torch.long),
                decoder_input_ids=torch.tensor(
                    canvas[None, first : first + BLOCK], dtype=torch.long
                ),
                self_conditioning_logits=given,
            ).logits
            found = torch.from_numpy(logits).float()
            seen = found.isfinite()  # the mask token of the tokenizer is never predicted
            worst = max(worst, float((expected[0] - found)[seen].abs().max()))
            last, last_first = expected / temperature, first
    return worst


@pytest.mark.parametrize("backend", [None, "torch"])
def test_every_pass_equals_transformers(tmp_path: Path, backend: str | None) -> None:
    model = reference(tmp_path)
    record = decoded(tmp_path, backend)
    assert {first for _, first, _, _ in record.passes} == {13, 21, 29}
    assert len(record.passes) == 15
    assert largest_difference(model, record) < 2e-3


def test_without_self_conditioning_passes_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: no self-conditioning; the window of each row; one scale for both roles."""
    model = reference(tmp_path)
    assert largest_difference(model, decoded(tmp_path), conditioned=False) > 0.01
    with monkeypatch.context() as patch:
        patch.setattr(UniformDenoiser, "predicted", lambda *arguments: None)
        assert largest_difference(model, decoded(tmp_path)) > 0.01
    with monkeypatch.context() as patch:
        spans = "anydecode.decoders.framework.canvas_spans.CanvasSpan._windowed"
        patch.setattr(spans, lambda self, table: table)
        assert largest_difference(model, decoded(tmp_path)) > 0.01
    for layer in model.model.decoder.layers:
        layer.layer_scalar.fill_(0.7)
    assert largest_difference(model, decoded(tmp_path)) > 0.01


def test_answers_are_equal_alone_batched_and_with_the_published_decoder(tmp_path: Path) -> None:
    reference(tmp_path)
    prompts = [PROMPT, [3, 9], list(range(2, 9))]
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 4, "temperature": 1.0}
    with LLM(tmp_path, threads=1) as llm:
        assert llm.model.spec.decoder == "diffusion-gemma:cache=block"
        decoder = "diffusion-gemma:cache=block,steps=3"
        alone = [llm.generate([one], decoder=decoder, **options)[0].tokens for one in prompts]
        batch = llm.generate(prompts, decoder=decoder, **options)
        assert [one.tokens for one in batch] == alone
        with pytest.raises(AnydecodeError, match="cache=block"):
            llm.generate([PROMPT], decoder="diffusion-gemma", max_tokens=8)


def test_a_block_that_begins_with_fixed_tokens_is_filled(tmp_path: Path) -> None:
    reference(tmp_path)
    hole = 5
    template = [hole] * BLOCK + [7, 9] + [hole] * 4 + [11]
    options: dict[str, Any] = {"max_tokens": len(template), "ignore_eos": True}
    decoder = f"diffusion-gemma:cache=block,steps=3,mask={hole}"
    with LLM(tmp_path, threads=1) as llm:
        [answer] = llm.generate([[*PROMPT[:6], *template]], decoder=decoder, **options)
    assert len(answer.tokens) == len(template)
    kept = [
        (found, given)
        for found, given in zip(answer.tokens, template, strict=True)
        if given != hole
    ]
    assert kept == [(7, 7), (9, 9), (11, 11)]


def test_a_missing_canvas_length_is_that_of_the_published_models(tmp_path: Path) -> None:
    reference(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["canvas_length"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, threads=1) as llm:
        assert llm.model.spec.block_size == 256
