"""Modules that predict further tokens, in the checkpoints of their models: published layouts
against forward passes in torch, and files that do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from anydecode import LLM
from anydecode.benchmarks.speculative_bench import bench_speculative
from anydecode.certification.tiny import tiny_network
from anydecode.certification.tiny_heads import MTP_LAYOUTS, mtp_checkpoint
from anydecode.errors import CheckpointError, UnsupportedCombinationError
from anydecode.kernels.formats import dequantize
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.drafters import find_loader
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.mtp import MtpNetwork, _Mtp, has_mtp, load_mtp
from anydecode.models.network import Network
from anydecode.models.spec import StateSpec
from anydecode.scoring.draft_states import DraftStates
from draft_folders import changed, drafter_folder, set_keys, target_folder, tensor, without
from mtp_models import assert_module_drafts, mtp_llm
from parity_cases import parity_module
from tiny_models import LATENT_SIZES, LONGCAT_SIZES, checkpoint_of, hf_model, with_fused_qkv

PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42]
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
}
GATED_DELTA: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
QWEN_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
#: With fewer heads some scores are exactly 0, and torch selects any of equal ones.
SPARSE: dict[str, Any] = {
    **EXPERTS,
    **LATENT_SIZES,
    "num_key_value_heads": 4,
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
}
MIMO_V2: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_key_value_heads": 1,
    "head_dim": 20,
    "v_head_dim": 12,
    "sliding_window": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_OF_HY4 = "model.mtp_layers.0."
LAYOUTS = {
    **MTP_LAYOUTS,
    "mimo v2.5": MTP_LAYOUTS["mimo v2"],
    "final norm": (*MTP_LAYOUTS["nextn"][:5], "final_layernorm"),
    "step": (
        *("model.layers.1.", "model.layers.1.", "enorm", "hnorm", "eh_proj"),
        "transformer.shared_head.norm",
    ),
    "hy4": (_OF_HY4, _OF_HY4, "enorm", "hnorm", "eh_proj", "final_layernorm"),
}
#: The classes of modules whose layers are not those of their models.
MODULES = {"longcat": "DeepseekV3"}
#: The class, the settings, those of a model of one layer like the module's, and the layout.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "deepseek v3": (
        "DeepseekV3",
        {**EXPERTS, **LATENT_SIZES, "num_key_value_heads": 4},
        {"first_k_dense_replace": 0},
        "nextn",
    ),
    "glm 4.5": (
        "Glm4Moe",
        {**EXPERTS, "head_dim": 16, "use_qk_norm": True},
        {"first_k_dense_replace": 0},
        "nextn",
    ),
    "hy3": (
        "HYV3",
        {
            "num_hidden_layers": 2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
        },
        {"mlp_layer_types": ["sparse"]},
        "final norm",
    ),
    "qwen3 next": (
        "Qwen3Next",
        {**GATED_DELTA, **QWEN_EXPERTS},
        {"layer_types": ["full_attention"]},
        "qwen",
    ),
    "qwen3.5": ("Qwen3_5", GATED_DELTA, {"layer_types": ["full_attention"]}, "qwen"),
    "qwen3.5 moe": (
        "Qwen3_5Moe",
        {**GATED_DELTA, **QWEN_EXPERTS},
        {"layer_types": ["full_attention"]},
        "qwen",
    ),
    "mimo": ("Qwen2", {"num_hidden_layers": 2}, {}, "mimo"),
    "deepseek v3.2": ("DeepseekV32", SPARSE, {"first_k_dense_replace": 0}, "nextn"),
    "glm 5, the last layer without an indexer": (
        "GlmMoeDsa",
        {
            **SPARSE,
            "n_group": 1,
            "topk_group": 1,
            "num_hidden_layers": 3,
            "indexer_types": ["full", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        {"indexer_types": ["full"], "mlp_layer_types": ["sparse"]},
        "nextn",
    ),
    "mimo v2": (
        "MiMoV2Flash",
        MIMO_V2,
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        "mimo v2",
    ),
    "step 3.5": (
        "Step3p7",
        {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "layer_types": ["full_attention", *["sliding_attention"] * 2],
            "attention_other_setting": {"num_attention_heads": 6},
            "sliding_window": 6,
            "moe_layers_enum": "1,2",
            "swiglu_limits": [0.0, 0.2, 0.3],
            "swiglu_limits_shared": [0.0, 0.3, 0.0],
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "share_expert_dim": 40,
        },
        {
            "layer_types": ["sliding_attention"],
            "moe_layers_enum": "9",
            "swiglu_limits": [0.0],
            "swiglu_limits_shared": [0.0],
        },
        "step",
    ),
    "longcat flash": (
        "LongcatFlash",
        {
            **LONGCAT_SIZES,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        {"first_k_dense_replace": 1, "num_layers": None},
        "longcat",
    ),
    "hy4": (
        "HYV4",
        {**parity_module("test_parity").HY_V4, "num_hidden_layers": 3},
        {"mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
        "hy4",
    ),
    "glm 5.3": (
        "Glm5Next",
        {**parity_module("test_parity").GLM_5_NEXT, "index_topk": 60},  # all of the text
        {"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"]},
        "nextn",
    ),
    "mimo v2.5": (
        "MiMoV2Flash",
        {**MIMO_V2, "num_key_value_heads": 2},
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        "mimo v2.5",
    ),
}


class _Reference:
    """A model with a module, in torch."""

    def __init__(self, case: str, own_head: bool = False) -> None:
        import torch

        family, settings, own, self.layout = CASES[case]
        self.target = hf_model(family, **settings)
        family = MODULES.get(self.layout, family)
        self.module = hf_model(family, 1, **{**settings, **own, "num_hidden_layers": 1})
        if hasattr(self.module.model, "hc_head"):
            _with_one_stream(self.module)
        norm, size = self.module.model.norm, self.target.config.hidden_size
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        self.norms = [type(norm)(size, eps=eps) for _ in range(2)]
        self.projection = torch.nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            for one in self.norms:
                one.weight.add_(0.3 * torch.randn(size))
        self.head = (self.module if own_head else self.target).lm_head
        self.own_head = own_head

    def checkpoint(self) -> Checkpoint:
        """The model with its module, as published."""
        depth = self.target.config.num_hidden_layers
        layer, module, *norms, projection, last = (
            name.replace("layers.1.", f"layers.{depth}.") for name in LAYOUTS[self.layout]
        )
        model_type = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        keys = model_type if self.layout == "mimo" else {}
        whole = checkpoint_of(self.target, num_nextn_predict_layers=1, **keys)
        tensors = dict(whole.tensors)
        for name, value in self.module.state_dict().items():
            if name.startswith("model.layers.0."):
                if self.layout in ("mimo v2", "mimo v2.5"):
                    name = name.replace("post_attention_layernorm", "pre_mlp_layernorm")
                if self.layout == "longcat":
                    name = name.replace(".mlp.", ".transformer_layer.mlp.")
                    if name.endswith("_a_layernorm.weight"):  # whose factors are the model's
                        value = value / (self.target.config.hidden_size / len(value)) ** 0.5
                tensors[layer + name.removeprefix("model.layers.0.")] = value.numpy()
        parts = [*(one.weight for one in self.norms), self.projection.weight]
        for name, weight in zip([*norms, projection], parts, strict=True):
            tensors[f"{module}{name}.weight"] = weight.detach().numpy()
        tensors[f"{module}{last}.weight"] = self.module.model.norm.weight.detach().numpy()
        if self.own_head:
            name = "transformer.shared_head.output" if self.layout == "step" else "shared_head.head"
            tensors[f"{module}{name}.weight"] = self.head.weight.detach().numpy()
        if self.layout == "mimo v2.5":
            return _mimo_v2_5(whole.config, tensors)
        return Checkpoint("tiny", Path("tiny"), whole.config, tensors)

    def chain(self, text: list[int], count: int) -> list[int]:
        """The `count` most probable tokens after `text`, in order."""
        import torch

        is_raw = self.layout.startswith(
            ("mimo v2", "step")
        )  # whose states are those before the norms
        with torch.inference_mode():
            raw, normed = _states(self.target.model, input_ids=torch.tensor([text]))
            states = list((raw if is_raw else normed)[:-1])
            tokens, drafted = text[1:], list[int]()
            for _ in range(count):
                embedded = self.target.model.embed_tokens(torch.tensor(tokens))
                pair = [self.norms[0](embedded), self.norms[1](torch.stack(states))]
                x = self.projection(torch.cat(pair[::-1] if self.layout == "mimo" else pair, -1))
                raw, normed = _states(self.module.model, inputs_embeds=x[None])
                drafted.append(int(self.head(normed[-1]).argmax()))
                states.append((raw if is_raw else normed)[-1])
                tokens.append(drafted[-1])
        return drafted


def _with_one_stream(model: Any) -> None:
    """Replace the hyper-connections of a model of one layer, so that all streams are the same."""
    import torch

    layer, is_mixed = model.model.layers[0], model.config.model_type != "hy_v4"

    class Connection(torch.nn.Module):
        def forward(self, streams: Any) -> Any:
            ones, mix = torch.ones(streams.shape[:-1]), torch.eye(streams.shape[-2])
            return (ones, mix, streams[..., 0, :]) if is_mixed else (ones, streams[..., 0, :])

    class Head(torch.nn.Module):
        def forward(self, streams: Any) -> Any:
            return streams[..., 0, :]

    layer.attn_hc, layer.ffn_hc, model.model.hc_head = Connection(), Connection(), Head()


def _states(model: Any, **inputs: Any) -> tuple[Any, Any]:
    """The last hidden states `[positions, hidden_size]` before and after the final norm."""
    before: list[Any] = []
    hook = model.norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
    normed = model(**inputs).last_hidden_state
    hook.remove()
    return before[0][0], normed[0]


def _mimo_v2_5(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Checkpoint:
    """The config of `transformers` and the tensors of MiMo-V2-Flash as those of MiMo-V2.5."""
    lists = {
        "hybrid_layer_pattern": [int(one != "full_attention") for one in config["layer_types"]],
        "moe_layer_freq": [int(one == "sparse") for one in config["mlp_layer_types"]],
    }
    published = {
        key: x for key, x in config.items() if key not in ("layer_types", "mlp_layer_types")
    }
    published |= {
        **lists,
        "model_type": "mimo_v2",
        "architectures": ["MiMoV2ForCausalLM"],
        "attention_projection_layout": "fused_qkv",
    }
    fused = with_fused_qkv(tensors, config["num_key_value_heads"])
    names = {
        name: name.replace("self_attn.sinks", "self_attn.attention_sink_bias") for name in fused
    }
    return Checkpoint(
        "tiny", Path("tiny"), published, {names[name]: x for name, x in fused.items()}
    )


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_a_forward_pass_in_torch(case: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    reference = _Reference(case, own_head=case in ("glm 4.5", "step 3.5"))
    with mtp_llm(reference.checkpoint()) as llm:
        assert_module_drafts(llm, PROMPT, reference.chain, more_than=5)


def test_states_after_the_norm_are_noticed_in_mimo_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong twin: the states that the modules of other models read."""
    made = DraftStates.__init__

    def normed(self: DraftStates, spec: StateSpec, *given: Any) -> None:
        made(self, replace(spec, taps=()), *given)

    monkeypatch.setattr(DraftStates, "__init__", normed)
    with pytest.raises(AssertionError):
        test_drafts_are_those_of_a_forward_pass_in_torch("mimo v2")


@pytest.mark.parametrize("layout", ["mimo v2", "longcat"])
def test_only_modules_of_mimo_v2_draft_one_token_each(layout: str) -> None:
    """The first one of LongCat drafts all tokens; it has the same name for its projection."""
    target = tiny_network(layers=4)
    drafter = mtp_checkpoint(target, layout=layout, modules=3)
    first = load_mtp(drafter, target)
    assert isinstance(first, MtpNetwork)
    modules = [first, *first.further]
    states = [module.spec.states for module in modules]
    assert [one and one.lag for one in states] == ([1, 2, 3] if layout == "mimo v2" else [1])
    norms = [module.weights.states and module.weights.states.state_norm for module in modules]
    assert len({tuple(norm) for norm in norms if norm is not None}) == len(modules)


def test_the_layer_of_a_module_has_an_indexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong twin: the last layer of the model, which has none."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    whole = _Reference("glm 5, the last layer without an indexer").checkpoint()
    network = load_network(whole)
    assert load_mtp(whole, network).spec.layers[0].indexer is not None
    monkeypatch.setattr(_Mtp, "_layer_index", lambda self: self.whole.num_layers - 1)
    with pytest.raises(CheckpointError):
        load_mtp(whole, network)


def test_a_module_whose_layer_the_config_does_not_tell_is_refused() -> None:
    """The module of MiMo-V2-Flash, of a config without the types of layers: the next layer of the
    default pattern has experts."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    whole = _Reference("mimo v2").checkpoint()
    config = {key: x for key, x in whole.config.items() if key != "mlp_layer_types"}
    with pytest.raises(CheckpointError, match="lists of the model's layers") as refused:
        load_mtp(replace(whole, config=config), load_network(whole))
    assert "\n" not in str(refused.value)


def test_the_fused_matrix_of_a_module_is_in_the_shards_of_its_model() -> None:
    """In MiMo-V2.5 the module has twice as many key heads as its fused matrix has shards. Wrong
    twins: rows one after the other, and a shard for each of the module's own key heads."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    reference = _Reference("mimo v2.5")
    fused = reference.checkpoint()
    network = load_network(fused)
    attention = reference.module.model.layers[0].self_attn
    expected = [one.weight.detach().numpy() for one in (attention.q_proj, attention.k_proj)]

    def queries_and_keys(**keys: Any) -> list[np.ndarray]:
        config = {**fused.config, **keys}
        layer = load_mtp(replace(fused, config=config), network).weights.layers[0]
        assert layer.query is not None and layer.key is not None
        return [dequantize(one.weight) for one in (layer.query, layer.key)]

    assert all(map(np.array_equal, queries_and_keys(), expected))
    own_heads = {"num_key_value_heads": 4, "swa_num_key_value_heads": 4}
    for wrong in ({"attention_projection_layout": "split"}, own_heads):
        assert not any(map(np.array_equal, queries_and_keys(**wrong), expected))


def _folder(tmp_path: Path, layout: str = "nextn") -> Path:
    """The folder of a Llama with a module."""
    folder = target_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    depth, size = config["num_hidden_layers"], config["intermediate_size"]
    module = mtp_checkpoint(load_network(load_checkpoint(folder)), layout=layout)
    for name, value in module.tensors.items():
        rows = slice(size if name.endswith(("gate_proj.weight", "up_proj.weight")) else None)
        columns = slice(size if name.endswith("down_proj.weight") else None)
        part = value[rows, columns] if np.ndim(value) == 2 else value
        stored = name.replace("model.layers.1.", f"model.layers.{depth}.")
        tensors[stored] = np.ascontiguousarray(part)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder


@pytest.mark.parametrize("layout", [one for one in MTP_LAYOUTS if one != "mimo v2"])
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_module_is_found_in_the_folder_of_its_model(
    tmp_path: Path, layout: str, dtype: str | None
) -> None:
    """Without a draft model, and with one that names the same folder."""
    folder = _folder(tmp_path, layout)
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.7, "seed": 1}
    drafts = []
    for draft in (None, folder):
        with LLM(folder, draft=draft, dtype=dtype) as llm:
            plain = llm.generate([5, 6, 7], decoder="autoregressive", **options)
            drafted = llm.generate([5, 6, 7], decoder="mtp", trace=True, **options)
            assert llm.engine.runners["draft"].model.spec.architecture == "MTP"
            assert drafted.draft_models == [f"{llm.model.name} (MTP)"]
        assert drafted.tokens == plain.tokens
        drafts.append([event["drafted"] for event in drafted.trace or ()])
    assert drafts[0] == drafts[1] and any(drafts[0])


def test_a_module_is_opened_by_the_benchmark_of_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = _folder(tmp_path), tmp_path / "question.jsonl"
    data.write_text(json.dumps({"category": "a", "turns": ["abc", "more"]}))
    bench_speculative(
        [data], "mtp", str(folder), None, threads=1, tokens=2, temperatures="0", warm=False,
        company="",
    )  # fmt: skip
    assert f"mtp: draft model {folder.name} (MTP)\n" in capsys.readouterr().out


def test_a_model_without_a_module_says_what_is_missing(tmp_path: Path) -> None:
    with (
        LLM(target_folder(tmp_path / "model")) as llm,
        pytest.raises(UnsupportedCombinationError, match="needs a draft model") as refused,
    ):
        llm.generate([5, 6], decoder="mtp", max_tokens=4)
    assert "\n" not in str(refused.value)


def test_a_model_may_be_told_to_open_no_module(tmp_path: Path) -> None:
    """A server, whose requests must not load models."""
    with LLM(_folder(tmp_path)) as llm:
        llm.finds_draft = False
        with pytest.raises(UnsupportedCombinationError, match="needs a draft model"):
            llm.generate([5, 6], decoder="mtp", max_tokens=4)
        llm.open_own_draft()
        assert llm.generate([5, 6], decoder="mtp", max_tokens=4, ignore_eos=True).tokens


def test_other_drafts_are_not_replaced(tmp_path: Path) -> None:
    with LLM(_folder(tmp_path), draft="self:int8") as llm:
        llm.generate([5, 6], decoder="mtp", max_tokens=4)
        assert llm.engine.runners["draft"].model.spec.states is None


def test_the_module_of_a_multimodal_checkpoint_is_kept(tmp_path: Path) -> None:
    """Qwen3.5: the language model has a prefix, its module has none."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    whole = _Reference("qwen3.5").checkpoint()
    tensors = {
        re.sub(r"^model\.", "model.language_model.", name): np.ascontiguousarray(value)
        for name, value in whole.tensors.items()
    }
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": whole.config}))
    save_file(tensors, tmp_path / "model.safetensors")
    opened = load_checkpoint(tmp_path)
    assert has_mtp(opened)
    one, two = (list(load_mtp(x, load_network(x)).matrices()) for x in (whole, opened))
    assert all(np.array_equal(a.data, b.data) for a, b in zip(one, two, strict=True))


@pytest.fixture(scope="module")
def target() -> Network:
    return tiny_network()


def test_the_layout_of_speculators_is_read(target: Network) -> None:
    """A folder of its own, whose layers' settings are nested."""
    plain = mtp_checkpoint(target, layout="mimo")

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        nested = dict(config)
        config.clear()
        config |= {"speculators_model_type": "mtp", "transformer_layer_config": nested}
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    other = changed(plain, change)
    assert find_loader(other) is load_mtp
    one, two = (list(load_mtp(x, target).matrices()) for x in (plain, other))
    assert all(np.array_equal(a.data, b.data) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_keys(vocab_size=300), "vocab_size is 300"),
        (set_keys(hidden_size=128, head_dim=16), "hidden_size is 128"),
        (set_keys(model_type="mamba"), "mamba|state_size|without attention"),
        (set_keys(num_attention_heads=0), "num_attention_heads"),
        (tensor("model.layers.1.eh_proj.weight", np.ones((64, 64), np.float32)), "has shape"),
        (tensor("model.layers.1.enorm.weight", np.ones(3, np.float32)), "has shape"),
        (tensor("model.layers.1.shared_head.head.weight", np.ones((3, 64))), "not a matrix"),
        (without("model.layers.1.hnorm.weight"), "hnorm|mtp_module"),
        (without("model.layers.1.mlp.up_proj.weight"), "mlp.up_proj"),
        (without("model.layers.1.shared_head.norm.weight"), "norm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_modules_that_do_not_fit_are_refused(
    target: Network, change: Callable[..., None], message: str
) -> None:
    checkpoint = changed(mtp_checkpoint(target), change)
    assert has_mtp(checkpoint)
    with pytest.raises(CheckpointError, match=message) as refused:
        load_mtp(checkpoint, target)
    assert "\n" not in str(refused.value)


def test_a_module_alone_is_opened_by_its_folder(tmp_path: Path) -> None:
    model = target_folder(tmp_path / "model")
    network = load_network(load_checkpoint(model))
    folder = drafter_folder(tmp_path / "mtp", mtp_checkpoint(network), "model.safetensors")
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    with LLM(model, draft=folder) as llm:
        plain = llm.generate([5, 6, 7], decoder="autoregressive", **options)
        drafted = llm.generate([5, 6, 7], decoder="mtp", trace=True, **options)
    assert drafted.tokens == plain.tokens
    assert any(event["drafted"] for event in drafted.trace or ())
