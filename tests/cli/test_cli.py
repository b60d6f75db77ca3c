"""The command line with a scripted model: its output, and its errors."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anydecode import LLM
from anydecode import __main__ as entry_point
from anydecode.api.generation import Generation, Stats
from anydecode.cli import bench, main, options
from anydecode.cli.chat import run_command
from anydecode.cli.generate import summary
from anydecode.errors import InvalidRequestError
from anydecode.folders import default_cache
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.serialization import to_plain

HEAVY = ("torch", "numpy", "transformers", "rich", "tokenizers", "huggingface_hub")


class OtherTokenizer(ByteTokenizer):
    """A byte tokenizer of which each token is another text than that of `ByteTokenizer`."""

    def token_bytes(self, token: int) -> bytes:
        return super().token_bytes(token) + b"!"


class ChatTokenizer(ByteTokenizer):
    """A byte tokenizer with a chat template."""

    chat_template = "{{ messages }}"

    def render_chat(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        return "|".join(f"{message['role']}:{message['content']}" for message in messages)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every model name loads a scripted model; the cache folder has only the compiled kernels."""

    def load(model: str, *rest: Any) -> LLM:
        return LLM(ScriptedModel(seed=1), tokenizer=ChatTokenizer(), cache_positions=2048)

    kernels = default_cache() / "kernels"
    monkeypatch.setattr(options, "load", load)
    monkeypatch.setenv("ANYDECODE_HOME", str(tmp_path / "cache"))
    if kernels.exists() and sys.platform != "win32":
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "kernels").symlink_to(kernels)


def invoke(*arguments: str) -> int:
    """The exit code of `anydecode ARGUMENTS` in this process."""
    with pytest.raises(SystemExit) as caught:
        main.run(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def child(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run `anydecode ARGUMENTS` in a child process."""
    command = [sys.executable, "-m", "anydecode", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **settings)


def modules_imported(code: str) -> set[str]:
    """Top-level modules that are loaded after `code` has run in a fresh interpreter."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    program = f"{code}\n{report}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_nothing_heavy() -> None:
    commands = [[], ["generate"], ["bench"], ["certify"], ["cluster", "up"]]
    loaded = modules_imported(
        f"""
from anydecode.cli.main import run
for command in {commands}:
    try:
        run([*command, "--help"])
    except SystemExit as end:
        assert end.code == 0
"""
    )
    assert "typer" in loaded
    assert not loaded & set(HEAVY)


def test_import_check_detects_a_heavy_import() -> None:
    assert "numpy" in modules_imported("from anydecode.cli.main import run; import numpy")


def test_help_of_every_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    names = [
        "generate",
        "chat",
        "pull",
        "methods",
        "certify",
        "score",
        "quantize",
        "doctor",
        "bench",
    ]
    for name in names:
        assert invoke(name, "--help") == 0
        assert f"Example: anydecode {name}" in " ".join(capsys.readouterr().out.split())


def test_help_lists_the_first_sentence_of_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for group in ([], ["bench"], ["train"], ["cluster"]):
        assert invoke(*group, "--help") == 0
        _, _, listed = capsys.readouterr().out.partition("Commands:\n")
        assert listed and "..." not in listed, group


def test_usage_has_one_pair_of_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat", "serve", "certify", "methods"):
        assert invoke(command, "--help") == 0
        usage = capsys.readouterr().out.splitlines()[0]
        assert "[[" not in usage and "..." not in usage.replace("]...", ""), usage


def test_generate_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code = invoke("generate", "--prompt", "abc", "--max-tokens", "8", "--seed", "7", "--json")
    out = capsys.readouterr().out
    found = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    expected_keys = {
        "text",
        "tokens",
        "passes",
        "seconds",
        "tokens_per_second",
        "finish_reason",
        "seed",
    }
    assert expected_keys <= found.keys()
    assert len(found["tokens"]) <= 8 and found["seed"] == 7


def test_several_answers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "abc", "--max-tokens", "8", "--decoder", "beam", "--samples", "3"]
    assert invoke(*arguments, "--json") == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    scores = [sample["score"] for sample in samples]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert invoke(*arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == "".join(sample["text"] + "\n" for sample in samples)
    assert all(f"score {score:.4f}" in printed.err for score in scores)


def test_passes_of_several_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """The texts of one search, and copies of a greedy text, have the passes of the first one."""
    arguments = ["generate", "abc", "--max-tokens", "4", "--ignore-eos", "--samples", "3"]
    shared = ["4", "no further", "no further"]
    for given, expected in (
        (["--decoder", "beam"], shared),
        (["--decoder", "autoregressive"], shared),
        (["--decoder", "autoregressive", "--temperature", "1"], ["4"] * 3),
    ):
        assert invoke(*arguments, *given) == 0
        assert re.findall(r"\), (.*?) passes,", capsys.readouterr().err) == expected


def test_streamed_text_equals_json_text(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "abc", "--max-tokens", "8", "--temperature", "0.9", "--seed", "3"]
    invoke(*arguments, "--json")
    text = json.loads(capsys.readouterr().out)["text"]
    assert invoke(*arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == text + "\n"
    assert "tokens/s" in captured.err
    invoke(*arguments[:-1], "4")
    assert capsys.readouterr().out != text + "\n"


SPEED = re.compile(
    r"(\d+) tokens in (\d+\.\d{3}) s: (\d+\.\d) tokens/s"
    r" \(prompt included; first token after (\d+\.\d{3}) s\), "
)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_printed_speed_matches_printed_tokens_and_seconds(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, "--prompt", "one two one two", "--max-tokens", "32", "--seed", "1"]
    assert invoke(*arguments) == 0
    (found,) = SPEED.findall(capsys.readouterr().err)
    tokens, seconds, speed, first = map(float, found)
    assert f"{tokens / seconds:.1f}" == f"{speed:.1f}" and 0 <= first <= seconds
    assert invoke(*arguments, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["num_tokens"] == len(values["tokens"]) == tokens
    assert values["tokens_per_second"] == pytest.approx(values["num_tokens"] / values["seconds"])
    assert 0 < values["time_to_first_token"] <= values["seconds"]


def test_one_token_and_one_pass_are_no_plurals(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["generate", "abc", "--decoder", "autoregressive", "--ignore-eos", "--max-tokens"]
    assert invoke(*given, "1") == 0
    assert re.match(r"(?s).*1 token in .*, 1 pass, length\n", capsys.readouterr().err)


@pytest.mark.parametrize("seconds", [0.0, 0.0004, 0.0016, 0.84149, 12.3456, 1000.0004])
def test_printed_speed_can_be_recomputed(seconds: float) -> None:
    stats = Stats(passes=3, num_tokens=128, num_prompt_tokens=2, seconds=seconds,
                  time_to_first_token=seconds)  # fmt: skip
    line = summary(Generation("", [0] * 128, "length", 1, stats, "auto"))
    (found,) = SPEED.findall(line)
    assert f"{float(found[0]) / float(found[1]):.1f}" == found[2]


@pytest.fixture
def loads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that loads a model fails."""

    def load(*given: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(options, "load", load)
    monkeypatch.setattr("anydecode.api.llm.LLM", load)


@pytest.mark.usefixtures("loads_no_model")
def test_an_address_in_use_is_an_error_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert invoke("serve", "tiny-autoregressive", "--port", port) == main.USAGE_ERROR
    captured = capsys.readouterr()
    assert captured.err.startswith(f"anydecode: cannot listen on 127.0.0.1:{port}: ")
    assert captured.err.count("\n") == 1
    arguments = ["serve", "tiny-autoregressive", "--host", "nowhere.invalid", "--no-auth"]
    assert invoke(*arguments) == main.USAGE_ERROR
    assert "cannot listen on nowhere.invalid:8000: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--decoder", "nonsense"],
        ["generate", "x", "--decoder", "prompt-lookup:sise=3"],
        ["generate", "x", "--sampler", "nonsense"],
        ["chat", "x", "--decoder", "nonsense"],
        ["serve", "tiny-autoregressive", "--port", "0", "--decoder", "nonsense"],
        ["serve", "tiny-autoregressive", "--port", "0", "--allow-decoder", "nonsense"],
    ],
)
@pytest.mark.usefixtures("loads_no_model")
def test_a_wrong_method_is_an_error_before_a_model_is_loaded(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(*arguments) == main.USAGE_ERROR
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and ("nonsense" in error or "sise" in error)


def test_prompt_is_read_from_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    invoke("generate", "--prompt", "abc", "--max-tokens", "4", "--json")
    direct = json.loads(capsys.readouterr().out)["tokens"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    invoke("generate", "--prompt", "-", "--max-tokens", "4", "--json")
    assert json.loads(capsys.readouterr().out)["tokens"] == direct


def test_chat_hint_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    hints = []
    for _ in range(2):
        invoke("generate", "abc", "--max-tokens", "2")
        hints.append("anydecode chat" in capsys.readouterr().err)
    assert hints == [True, False]


def test_chat_answers_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    code = invoke("chat", "--prompt", "hi", "--system", "be brief", "--max-tokens", "4", "--json")
    assert code == 0
    llm = options.load("any")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    expected = llm.chat(messages, max_tokens=4).tokens
    assert json.loads(capsys.readouterr().out)["tokens"] == expected


def test_chat_takes_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, load = [], options.load
    monkeypatch.setattr(options, "load", lambda *given: drafts.append(given[4]) or load(*given))
    assert invoke("chat", "--prompt", "hi", "--max-tokens", "2", "--draft", "one") == 0
    assert drafts == [["one"]]


@pytest.mark.parametrize(
    ("decoder", "tokenizer", "expected"),
    [
        ([], ChatTokenizer, ""),
        (["--decoder", "autoregressive"], ChatTokenizer, "'autoregressive' uses no draft model"),
        (["--decoder", "beam"], ChatTokenizer, "'beam' uses no draft model"),
        (["--decoder", "min-p"], ChatTokenizer, "'min-p' uses no draft model"),
        ([], OtherTokenizer, "is not used by decoder 'auto'"),
        (["--decoder", "speculative-sampling"], ChatTokenizer, ""),
    ],
)
def test_a_draft_model_that_is_not_used_is_named(
    decoder: list[str],
    tokenizer: type[ByteTokenizer],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(model: str, *rest: Any) -> LLM:
        llm = LLM(ScriptedModel(seed=1), tokenizer=ChatTokenizer(), cache_positions=2048)
        if rest[3]:
            llm.add_runner("draft", ScriptedModel(seed=1))
            llm.resources.tokenizers["draft"] = tokenizer()
        return llm

    monkeypatch.setattr(options, "load", load)
    arguments = ["generate", "ab", "--max-tokens", "2", *decoder]
    assert invoke(*arguments, "--draft", "one") == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "draft" in line]
    assert len(notes) == bool(expected) and all(expected in line for line in notes)
    if decoder != ["--decoder", "speculative-sampling"]:
        assert invoke(*arguments) == 0 and "draft" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "is_named"),
    [
        (["--decoder", "medusa"], True),
        (["--decoder", "taps"], True),
        (["--decoder", "dflash"], False),  # it is refused
        (["--decoder", "speculative-sampling", "--draft", "none"], False),
        (["--decoder", "prompt-lookup"], False),
        ([], False),
    ],
)
def test_the_drafter_that_comes_with_anydecode_is_named_where_a_method_needs_one(
    options: list[str],
    is_named: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(model: str, *rest: Any) -> LLM:
        llm = LLM(ScriptedModel(seed=1), tokenizer=ChatTokenizer(), cache_positions=2048)
        if not rest[3]:
            llm.add_runner("draft", ScriptedModel(seed=1))
            llm.resources.tokenizers["draft"] = ChatTokenizer()
            llm.has_shipped_draft = True
        return llm

    monkeypatch.setattr("anydecode.cli.options.load", load)
    invoke("generate", "ab", "--max-tokens", "2", *options)
    assert ("the EAGLE-3 drafter that comes with anydecode" in capsys.readouterr().err) == is_named


def test_quit_ends_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n/retry\n/help\n/quit\nnever reached\n"))
    assert invoke("chat", "--max-tokens", "3") == 0
    captured = capsys.readouterr()
    assert captured.err.count("tokens/s") == 2
    assert "/quit ends" in captured.err


def test_chat_commands_change_the_messages() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert run_command("/system be kind", messages)
    assert messages[0] == {"role": "system", "content": "be kind"}
    assert run_command("/retry", messages) and messages[-1]["role"] == "user"
    assert run_command("/clear", messages) and [m["role"] for m in messages] == ["system"]
    assert not run_command("/quit", messages)


def test_score_prints_the_log_likelihood(capsys: pytest.CaptureFixture[str]) -> None:
    code = invoke("score", "--prompt", "abc", "--continuation", "de", "--json")
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["total"] == pytest.approx(sum(found["logprobs"]))
    assert len(found["logprobs"]) == len(found["tokens"]) == 2


def test_methods_lists_cards(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("methods", "--json") == 0
    cards = json.loads(capsys.readouterr().out)
    keys = {card["key"] for card in cards}
    assert "prompt-lookup" in keys and len(keys) == len(cards)
    assert invoke("methods", "--family", "search", "--json") == 0
    assert {card["family"] for card in json.loads(capsys.readouterr().out)} == {"search"}
    assert invoke("methods") == 0
    assert "prompt-lookup" in capsys.readouterr().out


def test_certify_exit_code_follows_the_certificates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from anydecode.certification import certify as module

    for passed, expected in ((True, 0), (False, 1)):
        check = module.Check("claim", passed, "detail")
        certificate = module.Certificate("multi-step", "token-exact", [check])
        monkeypatch.setattr(module, "certify_one", lambda key, model, c=certificate: c)
        assert invoke("certify", "multi-step", "--json") == expected
        captured = capsys.readouterr()
        assert json.loads(captured.out)[0]["passed"] is passed
        assert ("not certified: multi-step" in captured.err) is not passed


def test_doctor_reports_a_missing_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert invoke("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] is None and found["gpu"] == []
    assert found["cuda"] == "none: the package torch is not installed"


def test_doctor_reports_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    expected_keys = {"python", "torch", "backend", "why", "instruction_set", "compiler", "threads"}
    assert expected_keys | {"cores", "memory", "gpu", "cache", "models", "extras"} <= found.keys()
    assert found["models"] == []
    assert invoke("doctor") == 0
    assert "instruction set" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "no prompt"),
        (["generate", "--prompt", ""], "no prompt"),
        (["generate", "x", "--top-p", "7"], "top_p"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--decoder", "nonsense"], "nonsense"),
        (["generate", "x" * 5000], "context"),
        (
            ["generate", "x", "--schema", "nowhere.json"],
            "cannot read the schema nowhere.json: No such file or directory",
        ),
        (["methods", "--family", "nonsense"], "no family"),
        (["certify", "nonsense"], "nonsense"),
        (["bench", "baselines", "--engines", "nonsense"], "unknown engines nonsense"),
        (["pull", "nonsense"], "nonsense"),
    ],
)
def test_invalid_input_has_one_line_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(*arguments) == main.USAGE_ERROR
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.strip().count("\n") == 0 and captured.out == ""


@pytest.mark.slow
def test_unknown_model_error_in_a_child_process(tmp_path: Path) -> None:
    done = child("generate", "x", "--model", "nonsense", env={**os.environ, "HOME": str(tmp_path)})
    assert done.returncode == main.USAGE_ERROR
    assert "nonsense" in done.stderr and "Traceback" not in done.stderr
    with_debug = child("generate", "x", "--model", "nonsense", "--debug")
    assert "Traceback" in with_debug.stderr and with_debug.returncode != 0


def test_unexpected_errors_show_a_traceback_only_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any) -> LLM:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(options, "load", broken)
    assert invoke("generate", "x") == main.FAILURE
    assert "unexpected ZeroDivisionError: a mistake of ours" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        main.run(["generate", "x", "--debug"])


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> LLM:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "load", interrupted)
    assert invoke("generate", "x") == main.INTERRUPTED


def test_interrupt_of_the_imports_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    class Imported:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "anydecode.cli.main", Imported())
    with pytest.raises(SystemExit) as ended:
        entry_point.main()
    assert ended.value.code == main.INTERRUPTED


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_interrupt_of_a_waiting_chat_is_clean(tmp_path: Path) -> None:
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import anydecode.cli.options as o; o.load = lambda *a: None;"
        "o.note_draft = lambda *a: print('ready', flush=True);"
        "from anydecode.cli.main import run; run(['chat'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == main.INTERRUPTED and "Traceback" not in errors


def test_closed_pipe_prints_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "anydecode", "--version"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == "" and done.returncode == main.FAILURE


@pytest.mark.parametrize("name", bench.BENCHES)
def test_every_benchmark_can_be_run(name: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main.run(["bench", name, "--help"])
    assert caught.value.code == 0


def test_help_needs_no_package_that_may_be_missing() -> None:
    names = (
        "torch triton transformers gguf llama_cpp openvino_genai matplotlib lm_eval jedi ray PIL"
    )
    code = (
        f"import sys; sys.modules |= dict.fromkeys({names.split()});"
        "from anydecode.cli import bench, main;"
        "[bench.bench_command(name) for name in bench.BENCHES]; main._command()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "package", "install"),
    [
        (["bench", "gpu"], "torch", "'anydecode[torch]'"),
        (["train", "diffusion", "--out", "x"], "torch", "'anydecode[torch]'"),
    ],
)
def test_a_command_without_its_packages_says_what_to_install(
    arguments: list[str], package: str, install: str
) -> None:
    code = (
        "import sys; sys.modules['torch'] = None;"
        f"from anydecode.cli.main import run; run({arguments})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    message = f"this command needs {package}, which is not installed: pip install {install}"
    assert done.stderr == f"anydecode: {message}\n"


def test_unknown_benchmark_is_named_in_the_error() -> None:
    with pytest.raises(InvalidRequestError, match="nonsense"):
        bench.run_bench("nonsense", [])


def test_to_plain_converts_to_json_types() -> None:
    import numpy as np

    mixed = {"a": (np.float32(0.5), np.int64(3)), "b": float("nan"), "c": {2, 1}, "d": Path("x")}
    assert to_plain(mixed) == {"a": [0.5, 3], "b": None, "c": [1, 2], "d": "x"}


@pytest.mark.model
def test_generate_on_the_default_model(default_model_path: Path) -> None:
    arguments = ["generate", "--model", str(default_model_path), "--prompt", "The sky is"]
    settings = ["--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--json"]
    done = child(*arguments, *settings)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["tokens"]) == 8 and found["finish_reason"] == "length"
    assert found["tokens_per_second"] > 0 and 0 < found["passes"] <= 9


@pytest.mark.skipif(sys.platform == "win32", reason="arguments are text there")
def test_texts_are_utf_8_whatever_the_locale() -> None:
    command = [sys.executable, "-m", "anydecode", "generate", "-m", "tiny-autoregressive", "--json"]
    command += ["--max-tokens", "4", "--prompt"]
    settings = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    texts = [
        json.loads(subprocess.check_output([*command, "caf\u00e9".encode()], env=env))["text"]
        for env in (settings, {**os.environ, "PYTHONUTF8": "1"})
    ]
    assert texts[0] == texts[1]
    given = subprocess.run([*command, "-"], input="caf\u00e9".encode(), env=settings, stdout=-1)
    assert json.loads(given.stdout)["text"] == texts[0]
    for arguments, stdin in (([b"caf\xe9"], b""), (["-"], b"caf\xe9")):
        done = subprocess.run([*command, *arguments], input=stdin, capture_output=True)
        assert done.returncode == 2
        assert done.stderr == b"anydecode: the prompt is not UTF-8 text\n"
