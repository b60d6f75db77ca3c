"""`anydecode bench diffusion-batches`: the causal twin of a diffusion model, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from anydecode.api.llm import LLM
from anydecode.benchmarks.parallelbench.batches import causal_llm
from anydecode.cli import main
from anydecode.models.scripted import BYTE_VOCABULARY, ByteTokenizer
from tiny_models import hf_model, own_model


def test_the_same_weights_decode_as_the_causal_model() -> None:
    hf = hf_model("Llama", vocab_size=BYTE_VOCABULARY, initializer_range=0.5)
    diffusion = own_model(hf)
    diffusion.spec = replace(diffusion.spec, causal=False, block_size=4, logit_shift=1)
    options = {"max_tokens": 12, "ignore_eos": True}
    with LLM(own_model(hf), tokenizer=ByteTokenizer()) as llm:
        expected = llm.generate([5, 6, 7], **options).tokens
    with LLM(diffusion, tokenizer=ByteTokenizer()) as llm, causal_llm(llm, None) as causal:
        assert causal.generate([5, 6, 7], **options).tokens == expected
        assert llm.model.spec.block_size == 4 and not llm.model.spec.causal


def test_the_command_compares_batches_with_causal_decoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "batches.json"
    arguments = ["--models", "tiny-blocks", "--requests", "1,3", "--rounds", "1"]
    arguments += ["--max-tokens", "8", "--methods", "sdar;fast-dllm:cache=block"]
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", "diffusion-batches", *arguments, "--threads", "1", "--json", str(file)])
    assert not ended.value.code
    report = json.loads(file.read_text())
    found = [(line["decoder"], line["requests"]) for line in report["lines"]]
    decoders = ("autoregressive", "sdar", "fast-dllm:cache=block")
    assert found == [(decoder, count) for count in (1, 3) for decoder in decoders]
    for line in report["lines"]:
        assert line["tokens_per_second"] > 0
        if line["decoder"] == "autoregressive":
            assert line["ratio"] == 1 and line["tokens_per_pass"] == pytest.approx(1, abs=0.2)
        else:
            assert line["rows_per_token"] > 1.2
    assert len(report["machine"]["load"]) == 2
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("requests", ["0", "1,x", "", "300"])
def test_numbers_of_requests_are_checked(requests: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", "diffusion-batches", "--requests", requests])
    assert ended.value.code == 2
    assert "must be numbers from 1 to 256" in capsys.readouterr().err
