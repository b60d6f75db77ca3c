"""anydecode's decoders in `model.generate` of transformers, compared with transformers' own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_models import hf_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from anydecode.errors import AnydecodeError  # noqa: E402
from anydecode.integrations import transformers as bridge  # noqa: E402
from anydecode.integrations import transformers_engine  # noqa: E402
from anydecode.integrations.transformers import RowProcessors, generate  # noqa: E402
from anydecode.models.hf import HuggingFaceModel  # noqa: E402

PROMPT = [5, 9, 33, 5, 9, 33, 3, 17]
FAMILIES = {
    "Llama": {},
    "GPT2": {"n_positions": 256, "n_embd": 48, "n_layer": 2, "n_head": 4},
}
#: Two rows of different lengths, padded on the left.
BATCH = [[0, 0, 0, *PROMPT], [7, 5, 8, *PROMPT]]


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest) -> Any:
    return hf_model(request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def llama() -> Any:
    return hf_model("Llama")


def ids(rows: list[list[int]]) -> Any:
    return torch.tensor(rows)


def batch() -> dict[str, Any]:
    rows = ids(BATCH)
    return {"input_ids": rows, "attention_mask": (rows != 0).long()}


def both(model: Any, inputs: dict[str, Any], decoder: str, **options: Any) -> tuple[Any, Any]:
    """The result of transformers alone, and that with anydecode's decoder."""
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    ours = model.generate(**inputs, **options, custom_generate=generate, decoder=decoder)
    return model.generate(**inputs, **options), ours


def new_tokens(result: Any, prompt: int = len(PROMPT)) -> list[int]:
    tokens: list[int] = result[0, prompt:].tolist()
    return tokens


@pytest.mark.parametrize("decoder", ["auto", "autoregressive", "prompt-lookup", "suffix", "jacobi"])
def test_greedy_text_equals_that_of_transformers(model: Any, decoder: str) -> None:
    expected, found = both(model, {"input_ids": ids([PROMPT])}, decoder)
    assert torch.equal(found, expected) and found.dtype == torch.long


@pytest.mark.parametrize("decoder", ["speculative-sampling", "fixed-tree"])
def test_an_assistant_model_is_the_draft_model(llama: Any, decoder: str) -> None:
    options = {"input_ids": ids([PROMPT]), "max_new_tokens": 20, "do_sample": False}
    found = llama.generate(
        **options,
        assistant_model=hf_model("Llama", seed=1),
        custom_generate=generate,
        decoder=decoder,
    )
    assert torch.equal(found, llama.generate(**options))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
        {"eos_token_id": [2, 9, 28], "min_new_tokens": 3},
        {"max_length": 20, "max_new_tokens": None},
        {"prefix_allowed_tokens_fn": lambda row, tokens: [[40, 41, 42], [50, 51, 52]][row]},
    ],
)
@pytest.mark.parametrize("decoder", ["auto", "prompt-lookup"])
def test_a_batch_padded_on_the_left(model: Any, decoder: str, options: dict[str, Any]) -> None:
    expected, found = both(model, batch(), decoder, **options)
    assert torch.equal(found, expected)


def test_finished_rows_are_padded(llama: Any) -> None:
    alone = new_tokens(llama.generate(ids([PROMPT]), max_new_tokens=24, do_sample=False))
    end = alone[4]
    expected, found = both(llama, batch(), "prompt-lookup", eos_token_id=[2, end], pad_token_id=7)
    assert torch.equal(found, expected)
    assert found[0].tolist()[-1] == 7 and end in found[0].tolist()


SAMPLING = {"do_sample": True, "temperature": 1.4, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


def sampled(model: Any, decoder: str, inputs: dict[str, Any], **options: Any) -> list[list[int]]:
    result: list[list[int]] = model.generate(
        **inputs,
        **{"max_new_tokens": 20, **SAMPLING, **options},
        custom_generate=generate,
        decoder=decoder,
    ).tolist()
    return result


@pytest.mark.one_in(3)
def test_one_seed_gives_one_text_with_every_lossless_decoder(model: Any) -> None:
    options = {"seed": 4, "repetition_penalty": 1.2, "num_return_sequences": 2}
    first, *others = (
        sampled(model, decoder, batch(), **options)
        for decoder in ("autoregressive", "prompt-lookup", "suffix", "jacobi", "auto")
    )
    assert len({tuple(row) for row in first}) == 4  # two samples of two prompts
    assert all(other == first for other in others)
    alone = sampled(model, "prompt-lookup", {"input_ids": ids([PROMPT])}, **options)
    assert [row[3:] for row in first[:2]] == [row[: len(first[0]) - 3] for row in alone]
    assert sampled(model, "prompt-lookup", batch(), **{**options, "seed": 5}) != first


def test_without_a_seed_the_generator_of_torch_decides(llama: Any) -> None:
    inputs = {"input_ids": ids([PROMPT])}
    texts = []
    for seed in (1, 1, 2):
        transformers.set_seed(seed)
        texts.append(sampled(llama, "prompt-lookup", inputs))
    assert texts[0] == texts[1] != texts[2]


def test_truncation_leaves_the_tokens_of_transformers(llama: Any) -> None:
    """With top_k=1, sampling is greedy: the warpers of transformers are in force."""
    greedy, _ = both(llama, {"input_ids": ids([PROMPT])}, "auto")
    assert sampled(llama, "auto", {"input_ids": ids([PROMPT])}, top_k=1, max_new_tokens=24) == (
        greedy.tolist()
    )


class RowBias(transformers.LogitsProcessor):  # type: ignore[misc]
    """Prefers another token in each row and at each length."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, (11 * row + 7 * input_ids.shape[1] + int(input_ids[row, -1])) % 131] += 9
        return scores


@pytest.mark.parametrize("decoder", ["autoregressive", "prompt-lookup"])
def test_a_logits_processor_of_the_caller(model: Any, decoder: str) -> None:
    plain, _ = both(model, batch(), decoder)
    expected, found = both(model, batch(), decoder, logits_processor=[RowBias()])
    assert torch.equal(found, expected) and not torch.equal(found, plain)


class StopsAt(transformers.StoppingCriteria):  # type: ignore[misc]
    """Stops a row when the sum of its last token and its length is divisible."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return (input_ids[:, -1] + input_ids.shape[1]) % self.divisor == 0


@pytest.mark.parametrize("decoder", ["autoregressive", "prompt-lookup"])
def test_stopping_criteria_end_each_row(model: Any, decoder: str) -> None:
    for divisor in (4, 5):
        options = {"stopping_criteria": [StopsAt(divisor)], "eos_token_id": 130}
        expected, found = both(model, batch(), decoder, **options)
        assert torch.equal(found, expected)
        assert found.shape[1] < len(BATCH[0]) + 24


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def put(self, value: Any) -> None:
        self.parts.append(value.tolist())

    def end(self) -> None:
        self.parts.append("end")


def test_a_streamer_gets_what_transformers_would_give_it(model: Any) -> None:
    expected, found = Recorder(), Recorder()
    options = {"max_new_tokens": 12, "do_sample": False}
    model.generate(ids([PROMPT]), streamer=expected, **options)
    model.generate(ids([PROMPT]), streamer=found, custom_generate=generate, **options)
    assert found.parts == expected.parts and found.parts[-1] == "end"


def test_a_callable_around_the_function_streams_too(llama: Any) -> None:
    found = Recorder()

    def loop(model: Any, input_ids: Any, **arguments: Any) -> Any:
        return generate(model, input_ids, decoder="prompt-lookup", **arguments)

    llama.generate(
        ids([PROMPT]), max_new_tokens=5, do_sample=False, streamer=found, custom_generate=loop
    )
    assert len(found.parts) == 7 and found.parts[-1] == "end"


def test_a_dictionary_is_returned_on_request(llama: Any) -> None:
    inputs = {"input_ids": ids([PROMPT])}
    expected, found = both(llama, inputs, "auto", return_dict_in_generate=True)
    assert type(found) is type(expected)
    assert torch.equal(found.sequences, expected.sequences)


def test_a_folder_around_the_function(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(
        "from transformers import GenerationMixin\n"
        "from anydecode.integrations.transformers import generate as loop\n\n\n"
        "def generate(model, **arguments):\n"
        "    return GenerationMixin.generate(model, custom_generate=loop, **arguments)\n"
    )
    recorder = Recorder()
    options = {"input_ids": ids([PROMPT]), "max_new_tokens": 12, "do_sample": False}
    found = llama.generate(
        **options,
        decoder="prompt-lookup",
        streamer=recorder,
        custom_generate=str(tmp_path),
        trust_remote_code=True,
    )
    assert torch.equal(found, llama.generate(**options))
    assert recorder.parts[-1] == "end"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_beams": 2}, "beam search by transformers"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation by transformers"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"max_new_tokens": 400}, "come to 408, and the model's context has 256"),
        ({"decoder": "min-p"}, "'min-p' is no decoder"),
        ({"decoder": "token-healing"}, "texts of tokens"),
        ({"decoder": "unbiased-tokenization"}, "texts of tokens"),
        ({"decoder": "fixed-tree"}, "needs an assistant_model"),
        ({"decoder": "layerskip"}, "cannot run part of its layers"),
        ({"decoder": "nope"}, "no decoding method is called 'nope'"),
        ({"position_ids": [list(range(1, 9))]}, "position_ids"),
        ({"attention_mask": [[1] * 7 + [0]]}, "pad on the left"),
        ({"attention_mask": [[1, 0] + [1] * 6]}, "pad on the left"),
        ({"inputs_embeds": [[[0.0] * 48] * 8]}, "inputs_embeds"),
        ({"seed": 1 << 70}, "64 bits"),
    ],
)
def test_what_cannot_be_applied_is_refused(
    llama: Any, options: dict[str, Any], message: str
) -> None:
    arguments = {"max_new_tokens": 4, "do_sample": False, "decoder": "prompt-lookup", **options}
    for name, value in arguments.items():
        if isinstance(value, list):
            arguments[name] = torch.tensor(value)
    with pytest.raises(ValueError, match=message) as raised:
        llama.generate(ids([PROMPT]), custom_generate=generate, **arguments)
    assert isinstance(raised.value, AnydecodeError) and "\n" not in str(raised.value)


def test_models_and_arguments_that_do_not_fit_are_refused(llama: Any) -> None:
    call = {"max_new_tokens": 4, "do_sample": False, "custom_generate": generate}
    with pytest.raises(ValueError, match="streamer follows one row, and the batch has 2"):
        llama.generate(**batch(), streamer=Recorder(), **call)
    with pytest.raises(ValueError, match="uses no assistant_model"):
        llama.generate(ids([PROMPT]), assistant_model=hf_model("Llama", seed=1), **call)
    with pytest.raises(ValueError, match="would not be used or filled"):
        cache = llama(ids([PROMPT[:-1]])).past_key_values
        llama.generate(ids([PROMPT]), past_key_values=cache, **call)
    llama.train()
    try:
        with pytest.raises(ValueError, match="training mode"):
            llama.generate(ids([PROMPT]), **call)
    finally:
        llama.eval()


def test_what_transformers_cannot_prepare_here_is_refused_too(llama: Any) -> None:
    """A quantized cache needs another package, and this model has a default end-of-text token."""
    stop = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(14), StopsAt(5)])
    call = (llama, ids(BATCH), transformers.LogitsProcessorList(), stop)
    with pytest.raises(ValueError, match="need an eos_token_id"):
        generate(*call, transformers.GenerationConfig())
    with pytest.raises(ValueError, match="'quantized' cannot be applied"):
        generate(*call, transformers.GenerationConfig(cache_implementation="quantized"))


@pytest.mark.parametrize(
    "family, settings",
    [
        ("Mamba", {"num_hidden_layers": 2}),
        ("Mistral", {"sliding_window": 5}),
    ],
)
def test_models_whose_cache_cannot_be_cropped(family: str, settings: dict[str, Any]) -> None:
    model = hf_model(family, **settings)
    expected, found = both(model, {"input_ids": ids([PROMPT])}, "prompt-lookup")
    assert torch.equal(found, expected)


def test_an_error_of_a_processor_ends_one_call_only(llama: Any) -> None:
    def fail(input_ids: Any, scores: Any) -> Any:
        raise KeyError("no such token")

    call = {"max_new_tokens": 4, "do_sample": False, "custom_generate": generate}
    with pytest.raises(RuntimeError, match="no such token"):
        llama.generate(ids([PROMPT]), logits_processor=[fail], **call)
    assert llama.generate(ids([PROMPT]), **call).shape == (1, len(PROMPT) + 4)


def test_a_model_is_opened_once_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    original = transformers_engine.LLM
    monkeypatch.setattr(
        transformers_engine, "LLM", lambda *a, **k: opened.append(1) or original(*a, **k)
    )
    model = hf_model("Llama", seed=2)
    for _ in range(2):
        model.generate(ids([PROMPT]), max_new_tokens=3, custom_generate=generate)
    assert len(opened) == 1
    model.resize_token_embeddings(140)
    model.generate(ids([[*PROMPT, 139]]), max_new_tokens=3, custom_generate=generate)
    assert len(opened) == 2
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def changed_weights_are_used() -> bool:
    model = hf_model("Llama", seed=3)
    both(model, {"input_ids": ids([PROMPT])}, "autoregressive")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))
    expected, found = both(model, {"input_ids": ids([PROMPT])}, "autoregressive")
    return bool(torch.equal(found, expected))


def test_changed_weights_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert changed_weights_are_used()
    monkeypatch.setattr(HuggingFaceModel, "clear_cache", lambda self: None)
    assert not changed_weights_are_used()


class NoCriteria(transformers.StoppingCriteriaList):  # type: ignore[misc]
    def append(self, criterion: Any) -> None:
        pass


Change = Callable[[pytest.MonkeyPatch], None]
PENALTY = {"repetition_penalty": 1.6}
TWINS: dict[str, tuple[Change, dict[str, Any]]] = {
    "the generated tokens are not passed to the processors": (
        lambda patch: patch.setattr(RowProcessors, "advance", lambda self, token: None),
        PENALTY,
    ),
    "samples share the tokens": (
        lambda patch: patch.setattr(RowProcessors, "fork", lambda self: self),
        {
            "logits_processor": [RowBias()],
            "do_sample": True,
            "top_k": 1,
            "num_return_sequences": 2,
        },
    ),
    "a processor of the caller sees one row": (
        lambda patch: patch.setattr(
            RowBias, "__module__", transformers.LogitsProcessorList.__module__
        ),
        {"logits_processor": [RowBias()]},
    ),
    "criteria of the caller are left out": (
        lambda patch: patch.setattr(bridge, "StoppingCriteriaList", NoCriteria),
        {"stopping_criteria": [StopsAt(5)], "eos_token_id": 130},
    ),
}


@pytest.mark.parametrize("twin", list(TWINS))
def test_a_wrong_twin_differs(llama: Any, monkeypatch: pytest.MonkeyPatch, twin: str) -> None:
    """Plausible mistakes that the comparisons with transformers find."""
    change, options = TWINS[twin]

    def is_equal() -> bool:
        expected, found = both(llama, batch(), "prompt-lookup", **options)
        return bool(torch.equal(expected, found))

    assert is_equal()
    change(monkeypatch)
    assert not is_equal()


def test_padding_as_a_part_of_the_prompt_differs(llama: Any) -> None:
    def twin(model: Any, input_ids: Any, **arguments: Any) -> Any:
        masked = {"attention_mask": None, "position_ids": None}
        return generate(model, input_ids, **{**arguments, **masked})

    options = {"max_new_tokens": 24, "do_sample": False}
    expected, found = (
        llama.generate(**batch(), **options, custom_generate=loop) for loop in (generate, twin)
    )
    assert torch.equal(expected[1], found[1]) and not torch.equal(expected[0], found[0])
