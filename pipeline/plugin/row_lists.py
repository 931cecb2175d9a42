"""InternVL and LLaVA-NeXT take pages of different size in one step of the engine.

vLLM hands all images of a step to the model together, as a list where their rows differ in number,
and the schema of these two classes then refuses the list: the engine dies of any two pages of
different size that happen to be scheduled together. Nothing after the schema needs equal sizes.
"""

from __future__ import annotations

import ast
from typing import Any

from pipeline.plugin.replace import replace
from pipeline.plugin.sources import MODELS, parse

_SCHEMAS = {
    f"{MODELS}.interns1": (
        "InternS1ImageEmbeddingInputs",
        "Annotated[torch.Tensor | list[torch.Tensor], TensorShape('ni', 'tifs', 'hs')]",
    ),
    f"{MODELS}.llava_next": (
        "LlavaNextImageEmbeddingInputs",
        "Annotated[torch.Tensor, TensorShape('bn', 'ifs', 'hs')]",
    ),
}
MODULES = tuple(_SCHEMAS)


def source_misfit(name: str, text: str) -> str:
    """Why the schema can't be patched; empty where it can."""
    schema, expected = _SCHEMAS[name]
    for node in parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == schema:
            fields = {
                ast.unparse(item.target): ast.unparse(item.annotation)
                for item in node.body
                if isinstance(item, ast.AnnAssign)
            }
            has_methods = any(isinstance(item, ast.FunctionDef) for item in node.body)
            if fields.get("data") == expected and not has_methods:
                return ""
    return f"`{schema}` is not as expected"


def patch(module: Any) -> None:
    """Patch vLLM's interns1 (InternVL in transformers' format) or llava_next."""
    schema, _ = _SCHEMAS[module.__name__]
    replace(getattr(module, schema), "validate", _takes_lists)


def _takes_lists(validate: Any) -> Any:
    def checked(self: Any) -> None:
        rows = self.data
        if not isinstance(rows, list | tuple):
            return validate(self)  # type: ignore[no-any-return]
        shapes = [tuple(image.shape) for image in rows]
        if any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
            raise ValueError(f"images of shapes {shapes} are no (rows, width) of one width")

    return checked
