"""The table of the families of diffusion models in guides/models.md, made from the code.

`python docs/_site/families.py` prints it; the tests compare it with the page.
"""

from __future__ import annotations

from anydecode.models.families.diffusion import diffusion_families
from anydecode.models.families.family import Denoising
from anydecode.models.loading.gguf_config import ARCHITECTURES

_CONTEXTS = {
    "canvas": "the whole canvas",
    "blocks": "its block and those before it",
    "causal": "its block and a causal context; blocks start at the end of the prompt",
    "prompt": "its block and those before it; the prompt is one block",
    "order": "what is before it in an order of the decoder's",
}


def table() -> str:
    """The table as Markdown."""
    columns = (
        "models",
        "model type",
        "GGUF architecture",
        "a row sees",
        "it predicts",
        "block",
        "mask token",
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for key, how in sorted(diffusion_families(), key=lambda entry: entry[1].models.lower()):
        files = [f"`{name}`" for name, (family, _) in ARCHITECTURES.items() if family == key]
        cells = [
            how.models,
            f"`{key}`",
            ", ".join(files),
            _CONTEXTS[how.context],
            "the next position" if how.shift else "its position",
            _block(how),
            _noise(how),
        ]
        lines.append("| " + " | ".join(cells).replace("|  |", "| |") + " |")
    return "\n".join(lines)


def _block(how: Denoising) -> str:
    if how.block_size is None:
        return ""
    if how.default_block_size is not None:
        return f"{how.block_size}, or {how.default_block_size}"
    return f"{how.block_size}, or `block=`" if how.needs_block_size else how.block_size


def _noise(how: Denoising) -> str:
    if how.has_canvas or how.time == "noise":
        return "none: random tokens"
    return "as named" if how.mask_token is None else f"as named, or {how.mask_token}"


if __name__ == "__main__":
    print(table())
