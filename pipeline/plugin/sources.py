"""Which vLLM is installed, and whether its code is the code that our patches were written for.

Everything here reads files: importing vLLM takes ten seconds, this takes a tenth of one.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache

from pipeline.config import vllm_directory

KNOWN = ("0.32.", "0.33.")
MODELS = "vllm.model_executor.models"


def is_known(version: str | None) -> bool:
    """Whether the patches were written for this release."""
    return version is not None and version.startswith(KNOWN)


def read_source(name: str) -> str:
    """The text of vLLM's module `name`; raises OSError where there is none."""
    directory = vllm_directory()
    if directory is None:
        raise FileNotFoundError("vLLM is not installed")
    return directory.joinpath(*name.split(".")[1:]).with_suffix(".py").read_text()


@lru_cache(maxsize=8)
def parse(text: str) -> ast.Module:
    """The syntax tree of a module's text."""
    return ast.parse(text)


def changed(text: str, expected: Mapping[str, str]) -> str:
    """Which of the methods is not as expected, in words; empty where all are.

    `expected` maps `Class.method` to the source of its body, docstring, comments and layout
    aside; an empty source means that the class must not have the method itself.
    """
    classes = {node.name: node for node in parse(text).body if isinstance(node, ast.ClassDef)}
    for qualified, source in expected.items():
        owner, name = qualified.split(".")
        if owner not in classes or _body(classes[owner], name) != _statements(ast.parse(source)):
            return f"`{qualified}` is not as expected"
    return ""


def _body(owner: ast.ClassDef, name: str) -> list[str]:
    for item in owner.body:
        if isinstance(item, ast.FunctionDef) and item.name == name:
            return _statements(item)
    return []


def _statements(node: ast.FunctionDef | ast.Module) -> list[str]:
    """Without a docstring; compared as trees, which no formatter changes."""
    body = node.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return [ast.dump(statement) for statement in body]
