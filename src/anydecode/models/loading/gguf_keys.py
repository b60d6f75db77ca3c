"""The metadata of a GGUF file, by the names of its architecture."""

from __future__ import annotations

from typing import Any

from anydecode.errors import CheckpointError
from anydecode.models.families.advice import absence, advice, listed
from anydecode.models.families.dispatch import find_family
from anydecode.models.limits import MAX_LAYERS, MAX_SIZE, integer, number, refusal
from anydecode.models.loading.gguf_file import GGUFFile

#: GGUF architecture -> (model_type, architecture) of Hugging Face.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "llama4": ("llama4_text", "Llama4ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3vl": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3vlmoe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "phi2": ("phi", "PhiForCausalLM"),
    "stablelm": ("stablelm", "StableLmForCausalLM"),
    "olmo": ("olmo", "OlmoForCausalLM"),
    "chatglm": ("glm", "GlmForCausalLM"),
    "nemotron": ("nemotron", "NemotronForCausalLM"),
    "apertus": ("apertus", "ApertusForCausalLM"),
    "arcee": ("arcee", "ArceeForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma3n": ("gemma3n_text", "Gemma3nForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "granite_swa": ("granite_swa", "GraniteSWAForCausalLM"),
    "baichuan": ("baichuan", "BaichuanForCausalLM"),
    "orion": ("orion", "OrionForCausalLM"),
    "pangu-embedded": ("pangu-embedded", "PanguEmbeddedForCausalLM"),
    "xverse": ("xverse", "XverseForCausalLM"),
    "qwen": ("qwen", "QWenLMHeadModel"),
    "dbrx": ("dbrx", "DbrxForCausalLM"),
    "deepseek": ("deepseek", "DeepseekForCausalLM"),
    "deepseek2-ocr": ("deepseek", "DeepseekForCausalLM"),
    "minicpm": ("minicpm", "MiniCPMForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM"),
    "paddleocr": ("paddleocr_vl_text", "PaddleOCRVLForConditionalGeneration"),
    "ernie4_5-moe": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM"),
    "mistral3": ("ministral3", "Ministral3ForCausalLM"),
    "exaone4": ("exaone4", "Exaone4ForCausalLM"),
    "exaone": ("exaone", "ExaoneForCausalLM"),
    "internlm2": ("internlm2", "InternLM2ForCausalLM"),
    "codeshell": ("codeshell", "CodeShellForCausalLM"),
    "starcoder": ("gpt_bigcode", "GPTBigCodeForCausalLM"),
    "refact": ("gpt_refact", "GPTRefactForCausalLM"),
    "hunyuan_vl": ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    "hunyuan-dense": ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "gptneox": ("gpt_neox", "GPTNeoXForCausalLM"),
    "falcon": ("falcon", "FalconForCausalLM"),
    "bloom": ("bloom", "BloomForCausalLM"),
    "mpt": ("mpt", "MptForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "bailingmoe2": ("bailing_moe_v2", "BailingMoeV2ForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "dots1": ("dots1", "Dots1ForCausalLM"),
    "afmoe": ("afmoe", "AfmoeForCausalLM"),
    "minimax-01": ("minimax", "MiniMaxForCausalLM"),
    "minimax-m2": ("minimax_m2", "MiniMaxM2ForCausalLM"),
    "bailingmoe": ("bailing_moe", "BailingMoeForCausalLM"),
    "exaone-moe": ("exaone_moe", "ExaoneMoeForCausalLM"),
    "phimoe": ("phimoe", "PhimoeForCausalLM"),
    "jais2": ("jais2", "Jais2ForCausalLM"),
    "minicpm3": ("minicpm3", "MiniCPM3ForCausalLM"),
    "mistral4": ("mistral4", "Mistral4ForCausalLM"),
    "deepseek32": ("deepseek_v32", "DeepseekV32ForCausalLM"),
    "glm-dsa": ("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    "glm5-next": ("glm5_next_text", "Glm5NextForConditionalGeneration"),
    "hy_v3": ("hy_v3", "HYV3ForCausalLM"),
    "hy_v4": ("hy_v4", "HYV4ForCausalLM"),
    "mellum": ("mellum", "MellumForCausalLM"),
    "mimo2": ("mimo_v2_flash", "MiMoV2FlashForCausalLM"),
    "bailingmoe3": ("bailing_hybrid", "BailingMoeV3ForCausalLM"),
    "kimi-linear": ("kimi_linear", "KimiLinearForCausalLM"),
    "kimi-k3": ("kimi_k3", "KimiK3ForConditionalGeneration"),
    "openelm": ("openelm", "OpenELMForCausalLM"),
    "deci": ("nemotron-nas", "DeciLMForCausalLM"),
    "hunyuan-moe": ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "bitnet": ("bitnet", "BitNetForCausalLM"),
    "bitnet-b1.58": ("bitnet", "BitNetForCausalLM"),
    "laguna": ("laguna", "LagunaForCausalLM"),
    "smallthinker": ("smallthinker", "SmallThinkerForCausalLM"),
    "maincoder": ("maincoder", "MaincoderForCausalLM"),
    "jais": ("jais", "JAISLMHeadModel"),
    "spark2_5": ("spark2_5", "Spark2_5ForCausalLM"),
    "maple": ("maple", "MapleForCausalLM"),
    "nanbeige": ("nanbeige", "NanbeigeForCausalLM"),
    "muse-glimmer": ("muse_glimmer_text", "MuseGlimmerForConditionalGeneration"),
    "grok": ("grok", "Grok1ForCausalLM"),
    "plm": ("plm", "PLMForCausalLM"),
    "hrm_text": ("hrm_text", "HrmTextForCausalLM"),
    "step35": ("step3p5", "Step3p5ForCausalLM"),
    "cohere2moe": ("cohere2_moe", "Cohere2MoeForCausalLM"),
    "minimax-m3": ("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM"),
    "deepseek4": ("deepseek_v4", "DeepseekV4ForCausalLM"),
    "deepseek2": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "mamba": ("mamba", "MambaForCausalLM"),
    "llada": ("llada", "LLaDAModelLM"),
    "llada-moe": ("llada_moe", "LLaDAMoEModelLM"),
    "dream": ("dream", "DreamModel"),
    "rnd1": ("rnd1", "RND1LM"),
    "diffusion-gemma": ("diffusion_gemma_text", "DiffusionGemmaForBlockDiffusion"),
    "rwkv6": ("rwkv6", "Rwkv6ForCausalLM"),
    "arctic": ("arctic", "ArcticForCausalLM"),
    "grovemoe": ("grovemoe", "GroveMoeForCausalLM"),
    "rwkv6qwen2": ("rwkv6qwen2", "RWKV6Qwen2ForCausalLM"),
    "arwkv7": ("arwkv7", "RwkvHybridForCausalLM"),
    "rwkv7": ("rwkv7", "RWKV7ForCausalLM"),
    "plamo2": ("plamo2", "Plamo2ForCausalLM"),
    "plamo3": ("plamo3", "Plamo3ForCausalLM"),
    "jamba": ("jamba", "JambaForCausalLM"),
    "mamba2": ("mamba2", "Mamba2ForCausalLM"),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM"),
    "granitehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "falcon-h1": ("falcon_h1", "FalconH1ForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "nemotron_h_moe": ("nemotron_h", "NemotronHForCausalLM"),
    "qwen3next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen35": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "qwen4exp": ("qwen4_exp_text", "Qwen4ExpForCausalLM"),
    "lfm2moe": ("lfm2_moe", "Lfm2MoeForCausalLM"),
    "bert": ("bert", "BertModel"),
    "nomic-bert": ("nomic_bert", "NomicBertModel"),
    "nomic-bert-moe": ("nomic_bert_moe", "NomicBertModel"),
    "jina-bert-v2": ("jina_bert_v2", "JinaBertModel"),
    "jina-bert-v3": ("jina_embeddings_v3", "JinaEmbeddingsV3Model"),
    "llama-embed": ("llama_bidirec", "LlamaBidirectionalModel"),
    "eurobert": ("eurobert", "EuroBertModel"),
    "modern-bert": ("modernbert", "ModernBertModel"),
    "gemma-embedding": ("embedding_gemma", "Gemma3TextModel"),
}
#: Architectures, and model types, whose layers mix each row with the one before.
TIME_MIXING = ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
#: Architectures of drafters, which are no models by themselves.
DRAFTERS = ("eagle3", "dflash")

#: By the names of `generation_config.json`: the metadata of recommended sampling options.
SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}

_MISSING = object()


class Keys:
    """The metadata of a file's architecture. Errors name the file and the key.

    Raises:
        CheckpointError: The architecture is not supported.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in (*ARCHITECTURES, *DRAFTERS):
            model_type = self.architecture.replace("-", "_")
            if find_family({}, model_type) is not None:
                hint = " (its model opens as a folder with safetensors)"
            elif advised := advice(model_type):
                hint = f" (of a folder with safetensors, {advised})"
            else:
                hint = f" ({absence()})"
            raise CheckpointError(
                f"{file.path}: architecture {self.architecture!r} is not supported"
                f"{hint}; {listed(self.architecture, sorted(ARCHITECTURES))}"
            )

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value of `<architecture>.<key>`. Raises CheckpointError if it is missing without a
        default."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if value is _MISSING:
            raise CheckpointError(f"{self.name(key)} is missing")
        return value

    def count(
        self,
        key: str,
        default: Any = _MISSING,
        high: int = MAX_SIZE,
        low: int = 1,
        skip_zeros: bool = False,
    ) -> int:
        """An integer from `low` to `high`; a list with the same value for every layer (or 0, if
        `skip_zeros`) counts as that value."""
        value = self.get(key, default)
        if isinstance(value, list) and skip_zeros:
            value = [entry for entry in value if entry != 0] or value
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        return integer(self.name(key), value, low, high)

    def counts(self, key: str, default: Any = _MISSING, low: int = 1) -> list[int]:
        """The integer of each layer, from `low` on, from a list or one integer for all."""
        value, count = self.get(key, default), self.count("block_count", high=MAX_LAYERS)
        values = value if isinstance(value, list) else [value] * count
        if len(values) < count:
            raise refusal(self.name(key), value, f"a list of {count} integers")
        return [integer(self.name(key), entry, low) for entry in values[:count]]

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A finite number."""
        return number(self.name(key), self.get(key, default), -1e38, 1e38)

    def name(self, key: str) -> str:
        """The name of a key in errors."""
        return f"{self.file.path}: metadata {self.architecture}.{key}"
