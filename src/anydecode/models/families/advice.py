"""What errors advise for models and formats without an implementation here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

#: How many names an error lists.
_SHORT = 12


def advice(model_type: Any) -> str:
    """What to do with a model type without an implementation of its own, for errors; empty if the
    installed `transformers` has none either."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return ""
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ""
    return _advice("has")


def unsupported(what: str, model_type: Any, supported: Iterable[str]) -> str:
    """The message for a model without an implementation here: `what` it is, whether the installed
    `transformers` has it, and what is supported."""
    hint = advice(model_type) or absence()
    return f"{what} is not supported; {hint}; {listed(model_type, supported)}"


def absence() -> str:
    """What is known of `transformers` where there is no `advice`."""
    if find_spec("transformers") is None:
        return (
            "transformers, which is not installed, may open a folder of it: pip install"
            " 'anydecode[hf]', then backend='transformers' (--backend transformers)"
        )
    return "transformers has no causal model of this type either"


def listed(name: Any, supported: Iterable[str]) -> str:
    """What is supported: all of it if that is short, else where the docs list it, and the names
    that are close to `name`."""
    names = list(supported)
    if len(names) <= _SHORT:
        return f"supported are {', '.join(names)}"
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.7)
    near = f"; close to it are {', '.join(close)}" if close else ""
    return f"supported are the {len(names)} that docs/guides/models.md lists{near}"


def quantization_advice(method: Any) -> str:
    """The same for a `quant_method` of config.json, to be appended to an error."""
    try:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
    except ImportError:
        return ""
    if not isinstance(method, str) or method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return ""
    return f"; {_advice('reads')}"


def _advice(verb: str) -> str:
    name = "transformers"
    return f"{name} {verb} it, with fewer guarantees: backend={name!r} (--backend {name})"
