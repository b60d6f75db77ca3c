"""lm-eval: the same scores through the server's completions as in the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

from lm_eval.tasks import TaskManager  # noqa: E402

import anydecode.integrations.lm_eval as adapter  # noqa: E402
from anydecode import LLM  # noqa: E402

MODEL = "smollm2-135m-instruct"
ITEMS = [
    {"question": "What colour is the sky?", "choices": ["blue", "a green dog"], "answer": 0},
    {"question": "How many legs has a cat?", "choices": ["nine", "four"], "answer": 1},
    {"question": "Where is Rome?", "choices": ["in Italy", "in a box", "in Peru"], "answer": 0},
]
#: One task for every kind of request.
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} It is {{choices[answer]}}.",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


@pytest.fixture
def tasks(tmp_path: Path) -> Any:
    """The tasks, on a file of their own."""
    items = tmp_path / "items.jsonl"
    items.write_text("\n".join(map(json.dumps, ITEMS)))
    for name, fields in TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(items)}},
            "test_split": "test",
            **fields,
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def evaluate(model: Any, tasks: Any, **options: Any) -> tuple[Any, Any]:
    """The results of all tasks, and the answers to every item."""
    found = lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0, **options
    )
    answers = {
        name: [sample["resps"] for sample in sorted(samples, key=lambda one: one["doc_id"])]
        for name, samples in found["samples"].items()
    }
    # The last digits of a sum depend on its order.
    text = json.dumps([found["results"], answers], default=str)
    return tuple(json.loads(text, parse_float=lambda number: f"{float(number):.10g}"))


#: With the server's tokenizer, instead of one in a folder.
REMOTE = {"tokenizer_backend": "remote", "tokenizer": None}


@pytest.mark.parametrize("options", [{}, {"num_concurrent": 3, "batch_size": 2}, REMOTE])
def test_scores_are_those_of_the_adapter(
    url: str, llm: LLM, tasks: Any, tokenizer: str, options: dict[str, Any]
) -> None:
    expected, answers = evaluate(adapter.AnydecodeLM(llm), tasks)
    served, responses = evaluate(
        "local-completions",
        tasks,
        model_args={
            "model": MODEL,
            "base_url": f"{url}/completions",
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "max_length": llm.max_length,
            "max_retries": 1,
            **options,
        },
    )
    assert responses == answers
    assert served == expected
