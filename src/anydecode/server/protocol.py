"""Pydantic models of the request bodies: every field has a strict type and a range.

Lists stop at their first invalid element, mappings are limited, and unknown fields are refused in
`server.options`, so that a body has few errors however large it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)

from anydecode.sampling.logprobs import MAX_ALTERNATIVES
from anydecode.sampling.options import SamplingOptions
from anydecode.sampling.params import BELOW_ONE, INTEGERS, MAX_BIAS, MAX_SAMPLES, RANGES, SMALLEST

#: Largest number of tokens or steps that a field may give.
MAX_COUNT = 1 << 31
#: Largest number of elements of a list that is read element by element before the request runs.
MAX_ITEMS = 1 << 14

#: Fields of OpenAI's API that have no effect at any endpoint that generates, with their neutral
#: values. A field with another value is listed in the response's `anydecode.ignored`.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "metadata": ({},),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options.include_obfuscation": (False,),
    "user": (),
}
#: The types of those that are not declared, and their names in messages.
IGNORED_TYPES: dict[str, tuple[type, str]] = {
    "metadata": (dict, "an object"),
    "prompt_cache_key": (str, "a string"),
    "prompt_cache_options": (dict, "an object"),
    "prompt_cache_retention": (str, "a string"),
    "safety_identifier": (str, "a string"),
    "store": (bool, "true or false"),
    "user": (str, "a string"),
}
_MODERATION = "this server does not moderate; call a moderation service yourself"


def _limited(value: Any) -> Any:
    """`value`, unless it is a mapping of more than `MAX_ITEMS` entries."""
    if isinstance(value, dict) and len(value) > MAX_ITEMS:
        raise ValueError(f"{len(value)} entries are given; at most {MAX_ITEMS} are allowed")
    return value


Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
#: A number of tokens; -1 for the model's context length.
Truncation = Annotated[int, Field(ge=-1, le=MAX_COUNT)]
Name = Annotated[str, Field(max_length=1000)]
#: Patterns, which `field_errors` describes in words.
COMPLETION_WINDOW = r"^([1-9][0-9]{0,3}[smh]|[1-2]?[0-9]d|30d)$"
FUNCTION_NAME = r"^[A-Za-z0-9_.-]+$"
FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=FUNCTION_NAME)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)]
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
Tokens = Annotated[list[Count], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_ITEMS)]
Word = Annotated[str, Field(max_length=1000)]
#: Strings that the text is searched for after every token.
Strings = Annotated[list[Word], Field(fail_fast=True, max_length=256)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_ITEMS)]
#: Token ids of which every sample keeps a set.
TokenSet = Annotated[list[Count], Field(fail_fast=True, max_length=MAX_ITEMS)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True, max_length=MAX_ITEMS)]
#: One prompt or several, as text or token ids.
Prompts = str | Texts | Tokens | TokenLists
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
#: A token id as the key of an object, which is a text in JSON.
TokenKey = Annotated[int, Field(strict=False, ge=0, le=MAX_COUNT)]
Biases = Annotated[dict[TokenKey, Bias], BeforeValidator(_limited)]
Words = Annotated[list[Word | Tokens], Field(fail_fast=True, max_length=MAX_ITEMS)]
#: Values of OpenAI's fields.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Summary = Literal["auto", "concise", "detailed"]
Verbosity = Literal["low", "medium", "high"]

#: The values of sampling options that are numbers, in words.
ALLOWED = {
    name: f"an integer, {allowed}" if name in INTEGERS and name != "seed" else allowed
    for name, _, _, allowed in RANGES
}
#: Sampling options that are objects of the Python API, or that endpoints declare themselves.
_NOT_REMOTE = ("autodeco", "logits_processors", "prompt_logprobs")
#: Sampling options that are neither numbers nor booleans.
_LISTS: dict[str, Any] = {
    "banned_strings": Strings,
    "banned_words": Words,
    "dola_layers": Name | Tokens,
    "dry_breakers": TokenSet,
    "logit_bias": Biases,
    "stop": Word | Strings,
    "stop_tokens": TokenSet,
}


#: Other names that a sampling option has in requests.
OTHER_NAMES = {
    "banned_words": ("bad_words",),  # vLLM
    "include_stop": ("include_stop_str_in_output",),  # vLLM
    "seed": ("random_seed",),
    "stop_tokens": ("stop_token_ids",),  # vLLM
    "thinking_token_budget": ("max_thinking_tokens",),
}


def _sampling_fields() -> dict[str, Any]:
    """A field for every sampling option that a request may set, in its range."""
    ranges = {name: (low, high) for name, low, high, _ in RANGES}
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(SamplingOptions).items():
        if name in _NOT_REMOTE:
            continue
        kind: Any = bool if hint is bool else _LISTS.get(name)
        if name in ranges:
            low, high = ranges[name]
            bounds: dict[str, Any] = {
                "gt" if low == SMALLEST else "ge": 0 if low == SMALLEST else low,
                "lt" if high == BELOW_ONE else "le": 1 if high == BELOW_ONE else high,
            }
            kind = Annotated[int if name in INTEGERS else float, Field(**bounds)]
        aliases = AliasChoices(name, *OTHER_NAMES.get(name, ()))
        found[name] = (kind | None, Field(None, validation_alias=aliases))
    return found


class Body(BaseModel):
    """Base of all parts of a request: no conversions between types, and only finite numbers."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())


#: The sampling options of the Python API, by name.
if TYPE_CHECKING:
    SamplingFields = Body
else:
    SamplingFields = create_model("SamplingFields", __base__=Body, **_sampling_fields())


class StreamOptions(Body):
    """Stream options. `include_usage` adds a last chunk with the token counts, and vLLM's
    `continuous_usage_stats` adds those so far to every chunk. Other fields are refused, one by
    one."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ResumedSample(Body):
    """A sample of an earlier answer that is to be continued."""

    model_config = ConfigDict(extra="forbid")
    number: Annotated[int, Field(ge=0, lt=MAX_SAMPLES)]
    tokens: Tokens


class Resume(Body):
    """The `anydecode.resume` of an earlier answer."""

    model_config = ConfigDict(extra="forbid")
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
    samples: Annotated[
        list[Annotated[ResumedSample, BeforeValidator(_limited)]],
        Field(fail_fast=True, max_length=MAX_SAMPLES),
    ]


class StructuredOutputs(Body):
    """A constraint of the answer, by the names of vLLM, and limits that are added to JSON schemas.

    Attributes:
        json_schema: A JSON Schema, as an object, a boolean or text; `json` in the request.
        json_object: Whether the answer is any JSON object.
        regex: A regular expression of the whole answer.
        grammar: A grammar: GBNF if it contains "::=", else Lark.
        choice: The possible answers.
        structural_tag: Text with JSON between tags: `structures` and `triggers`, as an object or
            text.
        whitespace_pattern: White space between JSON tokens, as a regular expression.
        disable_any_whitespace: Whether there is none.
        disable_additional_properties: Whether objects have only the properties that their schema
            lists, if it does not mention others.
        max_string: Maximum length of JSON strings without a bound, in characters.
    """

    model_config = ConfigDict(extra="forbid")
    json_schema: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Texts | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    max_string: Count | None = None


class Options(SamplingFields):
    """Fields that all generating endpoints share, besides those of `SamplingFields`.

    Attributes:
        model: The served model, or one of its adapters.
        decoder: A key of the catalogue, with parameters as "key:name=value".
        logits_processors: Keys of sampler presets, with parameters as those of `decoder`, that the
            operator allows.
        trace: Whether to return the drafted and accepted tokens of every round; "html" returns
            them as a page.
        priority: Smaller values run first, under schedules that use priorities.
        first_finish: Of `n` samples, return this many that finish first.
        segment: Most tokens that this call generates.
        resume: Continue from `anydecode.resume` of an earlier response.
        structured_outputs: A constraint of the answer, or limits of its JSON.
        negative_prompt: The second prompt of classifier-free guidance (`guidance_scale`).
        IGNORED: Fields of OpenAI's API that have no effect, with their neutral values.
        REFUSED: Unsupported fields of OpenAI's API that would change the answer, with their neutral
            values and advice on what to do instead.
    """

    IGNORED: ClassVar[dict[str, tuple[Any, ...]]] = _IGNORED
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}
    model_config = ConfigDict(extra="allow")
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    decoder: Name | None = None
    logits_processors: Annotated[list[Name], Field(fail_fast=True, max_length=16)] | None = None
    trace: bool | Literal["html"] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    first_finish: Positive | None = None
    segment: Positive | None = None
    resume: Annotated[Resume, BeforeValidator(_limited)] | None = None
    structured_outputs: Annotated[StructuredOutputs, BeforeValidator(_limited)] | None = None
    negative_prompt: str | None = None
    if TYPE_CHECKING:  # of `SamplingFields`
        logprobs: Any = None
        stop: str | list[str] | None = None
        temperature: float | None = None
        top_p: float | None = None
        n: int | None = None
        max_tokens: int | None = None
        stop_tokens: list[int] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_null_names(cls, fields: Any) -> Any:
        """The fields without those of several names that are null: under another name, the field
        may have a value."""
        if not isinstance(fields, dict):
            return fields
        names = {one for name, others in OTHER_NAMES.items() for one in (name, *others)}
        return {k: v for k, v in fields.items() if v is not None or k not in names}


def _without_arguments(value: Any) -> Any:
    """`value`, unless it has variables that would replace arguments of the rendering."""
    for name in ("messages", "self", "template"):
        if isinstance(value, dict) and name in value:
            raise ValueError(f"{name!r} is not a variable of the template; leave it out")
    return value


TemplateVariables = Annotated[dict[str, Any], BeforeValidator(_without_arguments)]


class Message(Body):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Objects | None = None
    tool_calls: Objects | None = None


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]


class Function(Body):
    """A function that the model may call; `parameters` is a JSON Schema of its arguments."""

    model_config = ConfigDict(extra="allow")
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool. Functions are the only supported type."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"] | None = "function"
    function: Function


class PredictedOutput(Body):
    """The expected answer: a text, or a list of parts with a `text` each."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["content"]
    content: str | Objects


class ChatRequest(Options):
    """`POST /v1/chat/completions`. With `continue_final_message`, as in vLLM, the answer continues
    the last message, which is the assistant's."""

    IGNORED = {**_IGNORED, "verbosity": ("medium",)}
    REFUSED = {
        "audio": ((), "answers are text"),
        "modalities": ((["text"], []), 'answers are text; leave it out or send ["text"]'),
        "functions": (([],), "send them as tools"),
        "function_call": (("none", "auto"), "use tools and tool_choice"),
        "moderation": ((), _MODERATION),
        "web_search_options": ((), "nothing is searched; leave it out"),
    }
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = None
    tool_choice: Name | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    service_tier: ServiceTier | None = None
    verbosity: Verbosity | None = None
    prediction: PredictedOutput | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(Options):
    """`POST /v1/completions`. Of `best_of` samples per prompt, the `n` with the highest mean token
    log-probability are returned. With `suffix`, the answer is the text between the prompt and that
    text, of a fill-in-the-middle model."""

    prompt: Prompts
    suffix: str | None = None
    best_of: Samples | None = None
    echo: bool | None = None
    prompt_logprobs: Alternatives | None = None
    response_format: dict[str, Any] | None = None
    service_tier: ServiceTier | None = None


class FillInRequest(CompletionRequest):
    """`POST /v1/fim/completions`, as in Mistral's API: the text between `prompt` and `suffix`, of a
    fill-in-the-middle model; without a suffix, what follows the prompt."""

    prompt: str


class TokenizeRequest(Body):
    """`POST /tokenize`, as in vLLM: of a prompt, or of a conversation as the chat template renders
    it."""

    model_config = ConfigDict(extra="forbid")
    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`, as in vLLM."""

    model_config = ConfigDict(extra="forbid")
    model: Name | None = None
    tokens: Tokens


class ConstraintRequest(Body):
    """`POST /v1/constraints/validate`: a constraint, as in a request to generate."""

    model_config = ConfigDict(extra="forbid")
    model: Name | None = None
    structured_outputs: Annotated[StructuredOutputs, BeforeValidator(_limited)] | None = None
    response_format: dict[str, Any] | None = None


class LoadAdapterRequest(Body):
    """`POST /v1/load_lora_adapter`: a name, and a folder inside the server's folder of adapters;
    `model` names the model, the first one by default."""

    model_config = ConfigDict(extra="forbid")
    model: Name | None = None
    lora_name: Annotated[str, Field(min_length=1, max_length=128)]
    lora_path: Annotated[str, Field(min_length=1, max_length=1000)]


class UnloadAdapterRequest(Body):
    """`POST /v1/unload_lora_adapter`."""

    model_config = ConfigDict(extra="forbid")
    lora_name: Name


class EmbeddingRequest(Body):
    """`POST /v1/embeddings`. `user` has no effect."""

    model_config = ConfigDict(extra="forbid")
    input: Prompts
    model: Name | None = None
    user: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    prompt_name: Name | None = None
    task: Name | None = None
    truncate_prompt_tokens: Truncation | None = None


class Document(Body):
    """A document of `POST /v1/rerank` as an object."""

    model_config = ConfigDict(extra="ignore")
    text: str


class RerankRequest(Body):
    """`POST /v1/rerank`. `top_n` 0 means all."""

    model_config = ConfigDict(extra="forbid")
    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True, max_length=MAX_ITEMS)]
    model: Name | None = None
    top_n: Count | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    truncate_prompt_tokens: Truncation | None = None


class ScoreRequest(Body):
    """`POST /v1/score`: one `text_1` with each `text_2`, or as many of both."""

    model_config = ConfigDict(extra="forbid")
    text_1: str | Texts
    text_2: str | Texts
    model: Name | None = None
    instruction: str | None = None
    truncate_prompt_tokens: Truncation | None = None


class Reasoning(Body):
    """Reasoning options. Only `effort` has an effect. Other fields are refused, one by one."""

    model_config = ConfigDict(extra="allow")
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Name | None = None
    mode: Name | None = None


class TextOptions(Body):
    """Options of the text of a response. Other fields are refused, one by one."""

    model_config = ConfigDict(extra="allow")
    format: dict[str, Any] | None = None
    verbosity: Verbosity | None = None


#: What a response can include besides its text. Only log-probabilities have an effect: the others
#: are of tools and images, or encrypt reasoning that is returned as text.
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
INCLUDE_LOGPROBS = "message.output_text.logprobs"


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class ResponsesRequest(Options):
    """`POST /v1/responses`."""

    IGNORED = {
        **{name: value for name, value in _IGNORED.items() if name not in ("metadata", "store")},
        "access_programs": ({},),
        "background_options": ({}, {"completion_window": "soonest"}),
        "context_management": ([],),
        "image": ({},),
        "include": ([], [INCLUDE_LOGPROBS]),
        "max_tool_calls": (),
        "reasoning.context": ("auto",),
        "reasoning.generate_summary": (),
        "reasoning.mode": ("standard",),
        "reasoning.summary": (),
        "text.verbosity": ("medium",),
    }
    REFUSED = {
        "conversation": ((), "conversations are not stored; send previous_response_id"),
        "moderation": ((), _MODERATION),
        "personality": ((), "the model has no presets of its style; send instructions"),
        "prompt": ((), "prompts are not stored; send the text as input"),
    }
    input: str | Objects | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Objects | None = None
    tool_choice: Name | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    service_tier: ServiceTier | None = None
    include: Annotated[list[Includable], Field(fail_fast=True, max_length=100)] | None = None
    top_logprobs: Alternatives | None = None
    truncation: Literal["auto", "disabled"] | None = None
