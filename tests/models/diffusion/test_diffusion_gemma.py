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
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)

from anydecode import LLM, Decoder, catalogue
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.diffusion_gemma import EntropyBoundedRenoising, diffusion_gemma
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.uniform import UniformDenoiser
from anydecode.errors import AnydecodeError
from anydecode.scoring.sequence import Sequence
from diffusion_gemma_models import BLOCK, TEXT, reference
from gguf_models import finish, tensor_names, writer_with

PROMPT = [(5 * i + 2) % 60 for i in range(13)]  # longer than a window


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


#: The metadata of `TEXT` as llama.cpp's converter writes them.
METADATA: dict[str, Any] = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": [2, 2, 1],
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.causal": False,
    "attention.shared_kv_layers": 0,
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [True, True, False],
    "embedding_length_per_layer_input": 0,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 24,
    "final_logit_softcapping": 30.0,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
}
#: The tensors that Gemma 4 has not.
OWN_TENSORS = {
    "model.decoder.self_conditioning.pre_norm.weight": "self_cond_pre_norm.weight",
    "model.decoder.self_conditioning.gate_proj.weight": "self_cond_gate.weight",
    "model.decoder.self_conditioning.up_proj.weight": "self_cond_up.weight",
    "model.decoder.self_conditioning.down_proj.weight": "self_cond_down.weight",
    **{
        f"model.encoder.language_model.layers.{layer}.layer_scalar": (
            f"blk.{layer}.enc_layer_output_scale.weight"
        )
        for layer in range(3)
    },
}


def gguf_of(model: Any, path: Path, renamed: dict[str, str] = OWN_TENSORS, **own: Any) -> Path:
    """The model as a GGUF file, as llama.cpp's converter writes it."""
    writer = writer_with(path, "diffusion-gemma", METADATA, TEXT["vocab_size"])
    for key, value in {"diffusion.canvas_length": BLOCK, **own}.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(key, value)
    names, written = tensor_names("gemma4", 3), set()
    for name, tensor in model.state_dict().items():
        target = renamed.get(name)
        if target is None and not name.startswith("model.decoder."):
            continue  # those of the vision tower, and those that both roles share
        if target is None:
            plain = name.replace("model.decoder.", "model.")
            layer, part = plain.split(".")[2:3], plain.rpartition(".")[2]
            if ".router." in plain and part in ("scale", "per_expert_scale"):
                scaled = "ffn_gate_inp" if part == "scale" else "ffn_down_exps"
                target = f"blk.{layer[0]}.{scaled}.scale"
            else:
                suffix = "" if plain.endswith((".weight", ".bias")) else ".weight"
                target = names.get_name(plain + suffix, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        written.add(target)
        writer.add_tensor(target, np.ascontiguousarray(tensor.numpy(), np.float32))
    assert {*renamed.values()} <= written
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 4 + [1e30] * 12, np.float32))
    finish(writer)
    return path


def test_every_pass_of_a_gguf_file_equals_transformers(tmp_path: Path) -> None:
    model = reference(tmp_path)
    path = gguf_of(model, tmp_path / "model.gguf")
    record = decoded(path)
    assert {first for _, first, _, _ in record.passes} == {13, 21, 29}
    assert largest_difference(model, record) < 2e-3
    with LLM(str(path), threads=1) as llm:
        assert llm.model.spec.decoder == "diffusion-gemma:cache=block"
    swapped = {
        name: target if "enc_" not in target else target.replace("enc_", "")
        for name, target in OWN_TENSORS.items()
    }
    for layer in range(3):  # a file whose layers have the scales of the other role
        own = f"model.decoder.layers.{layer}.layer_scalar"
        swapped[own] = f"blk.{layer}.enc_layer_output_scale.weight"
    wrong = gguf_of(model, tmp_path / "wrong.gguf", swapped)
    assert largest_difference(model, decoded(wrong)) > 0.01


def test_wrong_gguf_files_raise_one_line_errors(tmp_path: Path) -> None:
    model = reference(tmp_path)
    without = {k: v for k, v in OWN_TENSORS.items() if not v.startswith("blk.2.enc")}
    for path, message in (
        (gguf_of(model, tmp_path / "a.gguf", without), "context.layers.2.layer_scalar"),
        (gguf_of(model, tmp_path / "b.gguf", **{"diffusion.canvas_length": 0}), "canvas_length"),
    ):
        with pytest.raises(AnydecodeError, match=message) as caught:
            LLM(str(path), threads=1)
        assert "\n" not in str(caught.value)


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


#: The settings of a sampler as the class of `transformers` has them, as metadata of llama.cpp, and
#: as parameters of the decoder.
SAMPLER: dict[str, Any] = {
    "max_denoising_steps": 5,
    "t_max": 1.5,
    "t_min": 0.3,
    "stability_threshold": 2,
    "confidence_threshold": 0.7,
    "entropy_bound": 6.5,
}
METADATA_OF_SAMPLER = {
    f"diffusion.eb_{name.replace('max_denoising', 'max')}": value for name, value in SAMPLER.items()
}
PARAMETERS = "steps=5,bound=6.5,first_temperature=1.5,last_temperature=0.3,stable=2,settled=0.7"


def save_sampler(folder: Path, **changes: Any) -> None:
    """Write `generation_config.json` with the sampler's settings, by `transformers`."""
    values = {**SAMPLER, **changes}
    sampler = EntropyBoundSamplerConfig(entropy_bound=values.pop("entropy_bound"))
    config = DiffusionGemmaGenerationConfig(**values, sampler_config=sampler)
    config.save_pretrained(folder)


def answer(path: Path, decoder: str | None = None) -> list[int]:
    with LLM(path, threads=1) as llm:
        options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "seed": 3}
        return llm.generate(PROMPT, decoder=decoder, **options).tokens


def test_the_default_decoder_has_the_settings_of_the_files(tmp_path: Path) -> None:
    model = reference(tmp_path)
    save_sampler(tmp_path)
    file = gguf_of(model, tmp_path / "model.gguf", **METADATA_OF_SAMPLER)
    for path in (tmp_path, file):
        with LLM(path, threads=1) as llm:
            assert llm.default_decoder == f"diffusion-gemma:cache=block,{PARAMETERS}"
    found = answer(tmp_path)
    assert found == answer(tmp_path, f"diffusion-gemma:cache=block,{PARAMETERS}") == answer(file)
    for name in ("steps=5", "bound=6.5", "first_temperature=1.5"):
        other = ",".join(one for one in PARAMETERS.split(",") if one != name)
        assert answer(tmp_path, f"diffusion-gemma:cache=block,{other}") != found, name


def test_unsaid_settings_are_those_of_the_published_model(tmp_path: Path) -> None:
    model = reference(tmp_path)
    published = DiffusionGemmaGenerationConfig._get_default_generation_params()
    bound = published.pop("sampler_config").entropy_bound
    published.pop("max_new_tokens")
    save_sampler(tmp_path, **published, entropy_bound=bound)
    with LLM(tmp_path, threads=1) as llm:
        assert llm.default_decoder == "diffusion-gemma:cache=block"
    file = gguf_of(model, tmp_path / "a.gguf", **{"diffusion.eb_max_steps": 32})
    with LLM(file, threads=1) as llm:
        assert llm.default_decoder == "diffusion-gemma:cache=block,steps=32"
    found = catalogue.build_as("diffusion-gemma", "a decoder", Decoder)
    assert isinstance(found, EntropyBoundedRenoising)
    assert {**published, "entropy_bound": bound} == {
        "max_denoising_steps": found.steps,
        "t_max": found.first_temperature,
        "t_min": found.last_temperature,
        "stability_threshold": found.stable,
        "confidence_threshold": found.settled,
        "entropy_bound": found.bound,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_denoising_steps": 0}, "max_denoising_steps is 0; allowed is an integer from 1"),
        ({"t_max": 0.1}, "t_max is 0.1; allowed is t_min or more"),
        ({"sampler_config": {"_cls_name": "OtherConfig"}}, "sampler_config is 'OtherConfig'"),
        ({"stability_threshold": 0.5}, "stability_threshold is 0.5; allowed is an integer"),
        ({"diffusion.eb_entropy_bound": -1.0}, "metadata diffusion.eb_entropy_bound is -1.0"),
        ({"diffusion.eb_max_steps": 0}, "metadata diffusion.eb_max_steps is 0"),
    ],
)
def test_wrong_settings_raise_one_line_errors(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, path = reference(tmp_path), tmp_path
    if any(name.startswith("diffusion.") for name in change):
        path = gguf_of(model, tmp_path / "model.gguf", **change)
    else:
        save_sampler(tmp_path)
        file = tmp_path / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(AnydecodeError, match=message) as caught:
        LLM(path, threads=1)
    assert "\n" not in str(caught.value)
