"""Runs one engine in its own process: JSON requests on stdin, JSON answers on stdout.

Run as a file, so that it works in an environment that has the baseline but not anydecode. Each
baseline runs in its best case: greedy, end tokens ignored, nothing printed, and llama.cpp through
its C API without Python's samplers.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CONTEXT = 2048
TRIAL_PROMPT = "The harbour office counted the boats"


class Timing(NamedTuple):
    """Times of one generation: seconds from the prompt to the first token (`first`) and to the last
    (`total`), and the numbers of generated and prompt tokens."""

    first: float
    total: float
    tokens: int
    prompt_tokens: int


class Anydecode:
    """anydecode, through its Python API."""

    def __init__(self, model: str, threads: int, decoder: str = "multi-step") -> None:
        import anydecode

        self.version = anydecode.__version__
        self.settings = f"{threads} threads, {decoder}"
        self.decoder = decoder
        self.llm = anydecode.LLM(model, threads=threads)

    def generate(self, prompt: str, tokens: int, decoder: str = "") -> Timing:
        start = time.perf_counter()
        first = 0.0
        generation: Any = None
        for chunk in self.llm.stream(prompt, **self._options(tokens, decoder)):
            first = first or time.perf_counter() - start
            generation = chunk.generation or generation
        total = time.perf_counter() - start
        first = generation.stats.time_to_first_token or first
        return Timing(first, total, len(generation.tokens), len(self.llm.tokenizer.encode(prompt)))

    def together(self, prompts: list[str], tokens: int, decoder: str = "") -> Timing:
        """Decode all prompts together; `first` is the time of the first token of any."""
        start = time.perf_counter()
        generations = self.llm.generate(prompts, **self._options(tokens, decoder))
        total = time.perf_counter() - start
        first = min(generation.stats.time_to_first_token for generation in generations)
        num_prompt_tokens = sum(len(self.llm.tokenizer.encode(prompt)) for prompt in prompts)
        num_tokens = sum(len(generation.tokens) for generation in generations)
        return Timing(first, total, num_tokens, num_prompt_tokens)

    def _options(self, tokens: int, decoder: str) -> dict[str, Any]:
        decoder = decoder or self.decoder
        return {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "decoder": decoder}


class Transformers:
    """`transformers`, with the checkpoint's weights in a dense dtype.

    With `lookup`, it drafts up to that many tokens by its prompt lookup; with `layers`, it drafts
    with a copy of the model that has that many layers, evenly spaced.
    """

    def __init__(
        self, model: str, threads: int, dtype: str = "float32", lookup: int = 0, layers: int = 0
    ) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.version = transformers.__version__
        self.settings = f"{threads} threads, {dtype}"
        self.torch = torch
        path = Path(model)
        source: dict[str, Any] = {"pretrained_model_name_or_path": model}
        if path.suffix == ".gguf":
            source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        if "gguf_file" in source and hasattr(transformers, "GgufConfig"):
            # Newer versions compute with the file's quantised blocks unless disabled.
            dense = transformers.GgufConfig(gguf_file=path.name, dequantize=True)
            source["quantization_config"] = dense
        torch_dtype = getattr(torch, dtype)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            dtype=torch_dtype, **source
        ).eval()
        self.draft_options: dict[str, Any] = {}
        if lookup:
            self.draft_options = {"prompt_lookup_num_tokens": lookup}
            self.settings += f", prompt lookup of {lookup}"
        if layers:
            self.draft_options = {"assistant_model": self._shallow_copy(layers)}
            self.settings += f", assisted by {layers} of its layers"

    def _shallow_copy(self, count: int) -> Any:
        """A model of `count` evenly spaced layers, which shares their weights."""
        depth = len(self.model.model.layers)
        layer_indices = [round(index * (depth - 1) / (count - 1)) for index in range(count)]
        config = copy.deepcopy(self.model.config)
        config.num_hidden_layers = count
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[layer] for layer in layer_indices]
        shallow = copy.copy(self.model)
        shallow._modules = dict(self.model._modules)
        shallow.model = copy.copy(self.model.model)
        shallow.model._modules = dict(self.model.model._modules)
        layers = [copy.copy(self.model.model.layers[layer]) for layer in layer_indices]
        for index, layer in enumerate(layers):
            layer._modules = dict(layer._modules)
            layer.self_attn = copy.copy(layer.self_attn)
            layer.self_attn.layer_idx = index
        shallow.model.layers = self.torch.nn.ModuleList(layers)
        shallow.config = shallow.model.config = config
        shallow.generation_config = copy.deepcopy(self.model.generation_config)
        return shallow

    def generate(
        self, prompt: str, tokens: int, temperature: float = 0.0, ends: bool = False
    ) -> Timing:
        clock = _Clock()
        inputs = self.tokenizer(prompt, return_tensors="pt")
        options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": temperature > 0}
        if not ends:
            options["min_new_tokens"] = tokens
        if temperature > 0:
            options.update(temperature=temperature, top_k=0, top_p=1.0)
        if self.draft_options:
            clock = _CriterionClock(inputs["input_ids"].shape[1])
            options["stopping_criteria"] = [clock]
        else:
            options["streamer"] = clock
        with self.torch.inference_mode():
            out = self.model.generate(**inputs, **options, **self.draft_options, pad_token_id=0)
        length = inputs["input_ids"].shape[1]
        return Timing(clock.times[1], clock.times[-1], out.shape[1] - length, length)

    def rows(self, counts: list[int], context: int) -> dict[int, float]:
        torch = self.torch

        def one_pass(cache: Any, start: int, count: int) -> Any:
            ids = (torch.arange(count)[None] + start) % 1000
            return self.model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values

        costs = {}
        with torch.inference_mode():
            for count in counts:
                seconds = []
                cache = one_pass(None, 0, context) if context else None
                for _ in range(4):
                    start = time.perf_counter()
                    new_cache = one_pass(cache, context, count)
                    seconds.append(time.perf_counter() - start)
                    if cache is not None:
                        new_cache.crop(-count)
                costs[count] = sorted(seconds)[len(seconds) // 2]
        return costs


class _Clock:
    """A `transformers` streamer that records the time of the prompt, then of each token."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter() - self.start)

    def end(self) -> None:
        return


class _CriterionClock(_Clock):
    """The same as a stopping criterion that never stops, for where streamers are not supported."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.times.append(0.0)

    def __call__(self, ids: Any, scores: Any, **options: Any) -> Any:
        self.put(None)
        return ids.new_zeros(len(ids)).bool()


class LlamaCppPython:
    """llama.cpp through the generation loop of `llama-cpp-python`, with prompt lookup if `drafts` >
    0."""

    def __init__(self, model: str, threads: int, drafts: int = 0) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.version = llama_cpp.__version__
        self.settings = f"{threads} threads" + (f", prompt lookup of {drafts}" if drafts else "")
        draft = LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None
        self.llama = llama_cpp.Llama(
            model, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, draft_model=draft,
            verbose=False,
        )  # fmt: skip

    def generate(
        self, prompt: str, tokens: int, temperature: float = 0.0, ends: bool = False
    ) -> Timing:
        llama = self.llama
        llama.reset()
        start = time.perf_counter()
        ids = llama.tokenize(prompt.encode(), add_bos=False, special=True)
        times: list[float] = []
        sampler = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for token in llama.generate(ids, **sampler, repeat_penalty=1.0, reset=True):
            times.append(time.perf_counter() - start)
            if len(times) == tokens or (ends and token == llama.token_eos()):
                break
        return Timing(times[0], times[-1], len(times), len(ids))


class LlamaCpp:
    """llama.cpp through the C bindings of `llama-cpp-python`, with its fastest settings if
    `tune`."""

    def __init__(self, model: str, threads: int, tune: bool = True) -> None:
        import llama_cpp

        self.library = llama_cpp
        self.version = llama_cpp.__version__
        silent = llama_cpp.llama_log_callback(lambda level, text, user: None)
        self._silent = silent
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), parameters)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.sampler = llama_cpp.llama_sampler_init_greedy()
        self.context: Any = None
        choices = [(count, flash) for count in range(threads, 0, -1) for flash in (1, 0)]
        best = min(choices if tune else choices[:1], key=self._time_choice)
        self._open(*best)
        self.settings = f"{best[0]} threads, flash attention {'on' if best[1] else 'off'}"

    def _open(self, threads: int, flash: int) -> None:
        library = self.library
        if self.context:
            library.llama_free(self.context)
        parameters = library.llama_context_default_params()
        parameters.n_ctx = CONTEXT
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = flash
        parameters.no_perf = True
        self.context = library.llama_init_from_model(self.model, parameters)

    def _time_choice(self, choice: tuple[int, int]) -> float:
        self._open(*choice)
        timings = [self.generate(TRIAL_PROMPT, 24) for _ in range(2)]
        return min(timing.total for timing in timings)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        ids = (self.library.llama_token * (len(data) + 8))()
        count = self.library.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, False)
        return list(ids[:count])

    def _clear_cache(self) -> None:
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)

    def generate(self, prompt: str, tokens: int) -> Timing:
        library, context = self.library, self.context
        self._clear_cache()
        start = time.perf_counter()
        ids = self.tokenize(prompt)
        array = (library.llama_token * len(ids))(*ids)
        self._decode(library.llama_batch_get_one(array, len(ids)))
        next_token = (library.llama_token * 1)()
        next_token[0] = library.llama_sampler_sample(self.sampler, context, -1)
        first = time.perf_counter() - start
        for _ in range(tokens - 1):
            self._decode(library.llama_batch_get_one(next_token, 1))
            next_token[0] = library.llama_sampler_sample(self.sampler, context, -1)
        return Timing(first, time.perf_counter() - start, tokens, len(ids))

    def _decode(self, batch: Any) -> None:
        if self.library.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama.cpp could not decode")

    def rows(self, counts: list[int], context: int) -> dict[int, float]:
        costs = {}
        for count in counts:
            self._clear_cache()
            for start in range(0, context, 512):
                self._rows_pass(start, min(512, context - start), all_logits=False)
            memory = self.library.llama_get_memory(self.context)
            seconds = []
            for _ in range(8):
                pass_start = time.perf_counter()
                self._rows_pass(context, count, all_logits=count <= 64)
                seconds.append(time.perf_counter() - pass_start)
                self.library.llama_memory_seq_rm(memory, 0, context, -1)
            costs[count] = sorted(seconds)[len(seconds) // 2]
        return costs

    def _rows_pass(self, start: int, count: int, *, all_logits: bool) -> None:
        batch = self.library.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i] = (start + i) % 1000 + 100
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = int(all_logits or i == count - 1)
        self._decode(batch)
        self.library.llama_synchronize(self.context)
        self.library.llama_batch_free(batch)


def quantize(source: str, target: str) -> None:
    """Quantise the file `source` to Q4_0 with llama.cpp, and write it to `target`."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    parameters.allow_requantize = True
    code = llama_cpp.llama_model_quantize(
        source.encode(), target.encode(), ctypes.byref(parameters)
    )
    if code:
        raise RuntimeError(f"llama.cpp could not quantise {source}")


class OpenVino:
    """OpenVINO GenAI, which loads GGUF files. With `lookup`, it drafts up to that many tokens by
    its prompt lookup."""

    def __init__(self, model: str, threads: int, lookup: int = 0) -> None:
        import openvino_genai

        self.library = openvino_genai
        self.version = openvino_genai.__version__
        self.settings = f"{threads} threads"
        limits = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self.lookup = lookup
        if lookup:
            limits["prompt_lookup"] = True
            self.settings += f", prompt lookup of {lookup}"
        self.pipeline = openvino_genai.LLMPipeline(model, "CPU", **limits)

    def generate(
        self, prompt: str, tokens: int, temperature: float = 0.0, ends: bool = False
    ) -> Timing:
        config = self.library.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = not ends
        config.do_sample = temperature > 0
        if temperature > 0:
            config.temperature = temperature
        config.apply_chat_template = False
        if self.lookup:
            config.num_assistant_tokens, config.max_ngram_size = self.lookup, 3
        if ends:
            config.eos_token_id = self.pipeline.get_tokenizer().get_eos_token_id()
        start = time.perf_counter()
        metrics = self.pipeline.generate([prompt], config).perf_metrics
        total = time.perf_counter() - start
        counts = (metrics.get_num_generated_tokens(), metrics.get_num_input_tokens())
        return Timing(metrics.get_ttft().mean / 1000, total, *counts)


ENGINES: dict[str, Callable[[str, int], Any]] = {
    "anydecode": Anydecode,
    "transformers-float32": Transformers,
    "transformers-bfloat16": lambda model, threads: Transformers(model, threads, "bfloat16"),
    "llama.cpp": LlamaCpp,
    "llama.cpp-q4_0": LlamaCpp,
    "openvino-genai": OpenVino,
    "llama-cpp-python": LlamaCppPython,
    "llama.cpp-prompt-lookup": lambda model, threads: LlamaCppPython(model, threads, drafts=10),
    "transformers-prompt-lookup": lambda model, threads: Transformers(model, threads, lookup=10),
    "transformers-assisted": lambda model, threads: Transformers(model, threads, layers=10),
    "openvino-prompt-lookup": lambda model, threads: OpenVino(model, threads, lookup=5),
}

#: Engines that draft, each preceded by the same engine without drafts.
SPECULATIVE = (
    "llama-cpp-python",
    "llama.cpp-prompt-lookup",
    "transformers-float32",
    "transformers-prompt-lookup",
    "transformers-assisted",
    "openvino-genai",
    "openvino-prompt-lookup",
)
#: The engines that `bench baselines` compares by default.
DEFAULT_ENGINES = tuple(name for name in ENGINES if name not in SPECULATIVE) + (
    "transformers-float32",
    "openvino-genai",
)

#: Engines whose forward passes can be timed.
CAN_TIME_PASSES = frozenset(
    {"transformers-float32", "transformers-bfloat16", "llama.cpp", "llama.cpp-q4_0"}
)


def peak_memory() -> int:
    """Peak resident set of this process, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except OSError:
        import resource

        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def serve(engine: str, model: str, threads: int) -> None:
    """Answer requests, one JSON object per line, until the input ends. Output of libraries is
    redirected to stderr, away from the answers."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def respond(value: dict[str, Any]) -> None:
        output.write(json.dumps(value) + "\n")
        output.flush()

    start = time.perf_counter()
    try:
        worker = ENGINES[engine](model, threads)
    except Exception as error:
        respond({"missing": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        return
    load_seconds = time.perf_counter() - start
    respond({"version": worker.version, "settings": worker.settings, "load_seconds": load_seconds})
    for line in sys.stdin:
        request = json.loads(line)
        if "rows" in request:
            respond({"rows": worker.rows(request["rows"], request["context"])})
        else:
            names = ("temperature", "ends", "decoder")
            options = {name: request[name] for name in names if name in request}
            try:
                if "prompts" in request:
                    timing = worker.together(request["prompts"], request["tokens"], **options)
                else:
                    timing = worker.generate(request["prompt"], request["tokens"], **options)
            except Exception as error:
                respond({"missing": f"{type(error).__name__}: {' '.join(str(error).split())}"})
                continue
            respond({**timing._asdict(), "peak_memory": peak_memory()})


def main() -> None:
    """`baseline_worker.py ENGINE MODEL --threads N`, or `baseline_worker.py quantize MODEL --to
    FILE`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("engine", choices=[*ENGINES, "quantize"])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--to")
    arguments = parser.parse_args()
    if arguments.engine == "quantize":
        quantize(arguments.model, arguments.to)
    else:
        serve(arguments.engine, arguments.model, arguments.threads)


if __name__ == "__main__":
    main()
