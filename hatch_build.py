"""Hatch build hook that compiles the C kernels into the wheel, if there is a compiler.

A wheel with the library is tagged `py3-none-<platform>`. Without a compiler, or when the build
fails,
the wheel is pure and uses the torch reference. Environment variables:

- `ANYDECODE_BUILD`: `auto` (default), `never`, or `always` (a failed build fails the wheel; for
  releases).
- `ANYDECODE_PLATFORM`: another platform tag: one of `TARGETS` in `kernels/build.py`, which the
`ziglang`
  package compiles on any machine, or any tag with a cross compiler in `CC`.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelBuildHook(BuildHookInterface):
    """Adds `anydecode/kernels/cpu/<library>` to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        mode = os.environ.get("ANYDECODE_BUILD", "auto")
        if version == "editable" or mode == "never":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="anydecode-build-")
        try:
            library = build_library(Path(self.root), Path(self._folder.name))
        except Exception as error:
            if mode == "always":
                raise
            self.app.display_warning(f"C kernels not built; the torch reference is used: {error}")
            return
        build_data["force_include"][str(library)] = f"anydecode/kernels/cpu/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def build_library(root: Path, out_dir: Path) -> Path:
    """Compile the library with `kernels/build.py`, imported alone because torch may be missing."""
    path = root / "src" / "anydecode" / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("anydecode_kernels_build", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tag = os.environ.get("ANYDECODE_PLATFORM", "")
    if tag in module.TARGETS and "CC" not in os.environ:
        return Path(module.compile_for(tag, out_dir))
    compiler = module.find_compiler()
    if compiler is None:
        raise RuntimeError("no C compiler was found")
    return Path(module.compile_library(out_dir / module.library_name(), compiler))


def platform_tag() -> str:
    """The platform tag in `ANYDECODE_PLATFORM`, or that of this machine."""
    tag = os.environ.get("ANYDECODE_PLATFORM")
    return tag or sysconfig.get_platform().replace("-", "_").replace(".", "_")
