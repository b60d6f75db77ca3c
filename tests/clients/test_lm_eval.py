"""lm-eval: the same scores through the server's completions as in the process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

from lm_eval.tasks import TaskManager  # noqa: E402

import anydecode.integrations.lm_eval as adapter  # noqa: E402
import llama_cpp_stand_in  # noqa: E402
from anydecode import LLM  # noqa: E402
from anydecode.cli.bench import run_bench  # noqa: E402
from anydecode.errors import InvalidRequestError  # noqa: E402

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


def evaluate(
    model: Any, tasks: Any, names: list[str] | None = None, **options: Any
) -> tuple[Any, Any]:
    """The results of all tasks, or of those with the names, and the answers to every item."""
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=names or list(TASKS),
        task_manager=tasks,
        bootstrap_iters=0,
        **options,
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
#: Shorter than the texts, which are then predicted in windows.
SHORT = {"max_length": 16}


@pytest.mark.parametrize("options", [{}, {"num_concurrent": 3, "batch_size": 2}, REMOTE, SHORT])
def test_scores_are_those_of_the_adapter(
    url: str, llm: LLM, tasks: Any, tokenizer: str, options: dict[str, Any]
) -> None:
    limit = options.get("max_length")
    expected, answers = evaluate(adapter.AnydecodeLM(llm, max_length=limit), tasks)
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


def test_conversations_are_written_with_the_chat_template(
    url: str, llm: LLM, tasks: Any, tokenizer: str
) -> None:
    """The same texts as from the server's chats."""
    options = {"apply_chat_template": True, "names": ["texts"]}
    _, answers = evaluate(adapter.AnydecodeLM(llm), tasks, **options)
    _, responses = evaluate(
        "local-chat-completions",
        tasks,
        model_args={"model": MODEL, "base_url": f"{url}/chat/completions", "max_retries": 1},
        **options,
    )
    assert responses == answers
    assert evaluate(adapter.AnydecodeLM(llm), tasks, names=["texts"])[1] != answers


#: Documents in the form of GSM8K.
PROBLEMS = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3+4=<<3+4=7>>7\n#### 7"},
    {"question": "A box has 1,000 nails. Two boxes?", "answer": "2*1000=2000\n#### 2,000"},
    {"question": "Ten men eat 2 eggs each. How many eggs?", "answer": "10*2=20\n#### 20"},
    {"question": "Half of 8 cats sleep. How many?", "answer": "8/2=<<8/2=4>>4\n#### 4"},
]


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the example tasks; the working folder has their documents."""
    (tmp_path / "gsm8k").mkdir()
    lines = "\n".join(map(json.dumps, PROBLEMS))
    (tmp_path / "gsm8k" / "test.jsonl").write_text(lines)
    monkeypatch.chdir(tmp_path)
    return Path(__file__).parents[2] / "examples" / "lm_eval"


def test_the_benchmark_prints_what_lm_eval_finds(
    problems: Path, llm: LLM, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each example, beside an engine that agrees: no differences, in either format of the
    cache."""
    names = ["gsm8k_choice", "gsm8k_number", "gsm8k_solve", "gsm8k_text"]
    file = Path("report.json")
    python = llama_cpp_stand_in.install(Path.cwd(), monkeypatch)
    arguments = ["--models", str(default_model_path), "--tasks", ",".join(names), "--threads", "1"]
    options = ["--caches", "float16,int8", "--include-path", str(problems), "--baseline", python]
    run_bench("lm-eval", [*arguments, *options, "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    found = {(row["cache"], row["task"], row["metric"]): row for row in rows}
    assert {task for _, task, _ in found} == set(names) and len(found) == len(rows) == 10
    for row in rows:
        assert row["documents"] == 4 and row["same answers"] in (None, 1.0)
        assert row["difference"] == pytest.approx([0, 0], abs=1e-6)
        assert row["llama.cpp"] == pytest.approx(row["anydecode"])
    manager = TaskManager(include_path=str(problems), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=adapter.AnydecodeLM(llm), tasks=names, task_manager=manager, bootstrap_iters=100
    )["results"]
    for task in ("gsm8k_choice", "gsm8k_number"):
        mean, error = found["float16", task, "acc"]["anydecode"]
        assert mean == pytest.approx(results[task]["acc,none"])
        assert error == pytest.approx(results[task]["acc_stderr,none"])
    mean, _ = found["float16", "gsm8k_number", "nats per answer"]["anydecode"]
    assert math.exp(mean) == pytest.approx(results["gsm8k_number"]["perplexity,none"])
    totals = []
    for problem in PROBLEMS:  # lm-eval puts no space between the context and the continuation
        solution, number = problem["answer"].split("\n#### ")
        context = f"Question: {problem['question']}\nAnswer: {solution}\nThe answer is"
        totals.append(llm.score(context, f" {number}").total)
    assert mean == pytest.approx(-sum(totals) / len(totals))
    mean, _ = found["float16", "gsm8k_text", "bits per byte"]["anydecode"]
    assert mean == pytest.approx(results["gsm8k_text"]["bits_per_byte,none"])
    assert found["int8", "gsm8k_text", "bits per byte"]["anydecode"][0] != pytest.approx(mean)


def test_the_command_line_of_lm_eval_has_the_model(
    problems: Path, default_model_path: Path
) -> None:
    options = ["--include_path", str(problems), "--tasks", "gsm8k_number", "--limit", "2"]
    process = subprocess.run(
        [
            *(sys.executable, "-m", "anydecode.integrations.lm_eval", "run", *options),
            *("--model", "anydecode", "--model_args", f"model={default_model_path},threads=1"),
        ],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-1000:]
    rows = [[*map(str.strip, line.split("|"))] for line in process.stdout.splitlines()]
    ((*_, value, _, _, _),) = [row for row in rows if "perplexity" in row]
    assert float(value) > 1


def test_errors_of_lm_eval_are_one_line(problems: Path, default_model_path: Path) -> None:
    arguments = ["--models", str(default_model_path), "--include-path", str(problems)]
    with pytest.raises(InvalidRequestError, match="missing_task"):
        run_bench("lm-eval", [*arguments, "--tasks", "missing_task"])
    Path("gsm8k", "test.jsonl").unlink()
    with pytest.raises(InvalidRequestError, match="gsm8k/test.jsonl"):
        run_bench("lm-eval", [*arguments, "--tasks", "gsm8k_text"])
    with pytest.raises(InvalidRequestError, match="is not a folder"):
        run_bench("lm-eval", [*arguments[:2], "--tasks", "a", "--include-path", "missing"])
