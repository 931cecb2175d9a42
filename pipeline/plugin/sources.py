"""Which vLLM is installed, and whether its code is the code that our patches were written for.

Everything here reads files: importing vLLM takes ten seconds, this takes a tenth of one.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import lru_cache
from pathlib import Path

KNOWN = ("0.32.", "0.33.")
DENSE = "vllm.model_executor.models.qwen3_vl"
MOE = "vllm.model_executor.models.qwen3_vl_moe"
PATCHED = (DENSE, MOE)

# The only use of the name that we replace, as `ast.unparse` writes it.
_TOWER_TEST = (
    "self.use_deepstack = hasattr(config.vision_config, 'deepstack_visual_indexes') "
    "and (not isinstance(self.visual, StageMissingLayer))"
)
_PARSER = (
    "return Qwen3VLMultiModalDataParser(self.get_hf_config().vision_config.spatial_merge_size, "
    "video_needs_metadata=True, expected_hidden_size=self._get_expected_hidden_size(), "
    "allow_missing_mm_embeddings=self.allow_missing_mm_embeddings)"
)


def vllm_directory() -> Path | None:
    """Where the package `vllm` lies; None where it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def vllm_version() -> str | None:
    """The version written into the installed package.

    Not the distribution's: builds for CPU carry another distribution name.
    """
    directory = vllm_directory()
    path = directory and directory / "_version.py"
    if path is None or not path.is_file():
        return None
    found = re.search(r"^__version__\s*=.*?['\"]([^'\"]+)['\"]", path.read_text(), re.MULTILINE)
    return found[1] if found else None


def is_known(version: str | None) -> bool:
    """Whether the patches were written for this release."""
    return version is not None and version.startswith(KNOWN)


def read_source(name: str) -> str:
    """The text of vLLM's module `name`; raises OSError where there is none."""
    directory = vllm_directory()
    if directory is None:
        raise FileNotFoundError("vLLM is not installed")
    return directory.joinpath(*name.split(".")[1:]).with_suffix(".py").read_text()


def misfit(name: str) -> str:
    """Why module `name` can't be patched; empty where it can."""
    try:
        text = read_source(name)
    except OSError as error:
        return f"no source: {error}"
    return _misfit(name, text)


@lru_cache(maxsize=4)
def _misfit(name: str, text: str) -> str:
    nodes = list(ast.walk(ast.parse(text)))
    if not _tests_tower_once(nodes):
        return "`StageMissingLayer` is not used as expected"
    if name == DENSE and not _makes_parser(nodes):
        return "`Qwen3VLProcessingInfo.get_data_parser` is not as expected"
    return ""


def _tests_tower_once(nodes: list[ast.AST]) -> bool:
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == "StageMissingLayer"]
    statements = [node for node in nodes if isinstance(node, ast.Assign) and _targets_flag(node)]
    return len(uses) == 1 and [ast.unparse(node) for node in statements] == [_TOWER_TEST]


def _targets_flag(node: ast.Assign) -> bool:
    target = node.targets[0]
    return isinstance(target, ast.Attribute) and target.attr == "use_deepstack"


def _makes_parser(nodes: list[ast.AST]) -> bool:
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    info = classes.get("Qwen3VLProcessingInfo")
    parser = classes.get("Qwen3VLMultiModalDataParser")
    if info is None or parser is None or "_parse_image_data" in _methods(parser):
        return False
    made = _methods(info).get("get_data_parser")
    return made is not None and [ast.unparse(node) for node in made.body] == [_PARSER]


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
