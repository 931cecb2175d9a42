"""What a family has to prove on the real vLLM, and the README's table of what was proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from checkpoints import make_qwen3_vl
from makers_glm import make_glm4v, make_glm_ocr, make_paddleocr_vl
from makers_prompt import (
    make_idefics3,
    make_lfm2_vl,
    make_lightonocr,
    make_mistral3,
    make_pixtral_hf,
    make_smolvlm,
)
from makers_qwen import make_qwen2_5_vl, make_qwen2_vl, make_qwen3_5, make_qwen3_5_moe
from makers_tiled import make_internvl, make_llava, make_llava_next, make_minicpmv4_6
from PIL import Image

from pipeline.checkpoint import resolve_model
from pipeline.config import DRIVERS, EngineOptions, vllm_version
from pipeline.families import Delivery, Family, family_of
from pipeline.parity import ParityOptions, ParityReport, compare
from pipeline.run import PageOptions

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"

Maker = Callable[..., Path]

# Seeds were looked for where a random net repeats one token for every page, or where its best two
# tokens come within the rounding of bfloat16 of each other.
MAKERS: dict[str, Maker] = {
    "qwen2_vl": make_qwen2_vl,
    "qwen2_5_vl": make_qwen2_5_vl,
    "qwen3_vl": partial(make_qwen3_vl, seed=17),
    "qwen3_vl_moe": partial(make_qwen3_vl, seed=9, moe=True),
    "qwen3_5": make_qwen3_5,
    "qwen3_5_moe": make_qwen3_5_moe,
    "glm4v": make_glm4v,
    "glm_ocr": make_glm_ocr,
    "paddleocr_vl": make_paddleocr_vl,
    "internvl": make_internvl,
    "llava": make_llava,
    "llava_next": make_llava_next,
    "minicpmv4_6": make_minicpmv4_6,
    "mistral3": make_mistral3,
    "lightonocr": make_lightonocr,
    "pixtral_hf": make_pixtral_hf,
    "idefics3": make_idefics3,
    "smolvlm": make_smolvlm,
    "lfm2_vl": partial(make_lfm2_vl, seed=36, said=range(65, 73)),
}

# (height, width) in px: of different shape, both larger than a tile of the tiled families
SIZES = {"a.png": (333, 480), "b.png": (416, 224)}


def write_pages(directory: Path) -> Path:
    """Two pages of coloured blocks, so different that any tower tells them apart."""
    directory.mkdir(parents=True)
    for seed, (name, (height, width)) in enumerate(SIZES.items()):
        blocks = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
        if seed:
            blocks = blocks // 3 + 160
        Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC).save(
            directory / name
        )
    return directory


def family_in(checkpoint: Path) -> Family:
    """The family that the checkpoint's config names."""
    return family_of(resolve_model(str(checkpoint)))


def drivers_of(family: Family) -> tuple[str, ...]:
    """The drivers that can hand over the family's embeddings."""
    return DRIVERS[:1] if family.delivery is Delivery.PROMPT else DRIVERS


def prove(checkpoint: Path, work: Path, drivers: tuple[str, ...]) -> ParityReport:
    """Both pages alone and in one request, native images against embeddings, to the last token.

    Engines in float32, or the one dtype that runs here.
    """
    family = family_in(checkpoint)
    options = ParityOptions(
        paths=(write_pages(work / "pages"),),
        pages=PageOptions(cache=work / "cache", model=str(checkpoint)),
        engine=EngineOptions(dtype=family.cpu_dtype or "float32"),
        prompt="Read.",
        max_tokens=16,
        pages_per_request=2,
        drivers=drivers,
        quiet=True,
    )
    return compare(options)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the README's table."""

    family: str
    delivery: str
    plugin: bool
    dtype: str
    report: ParityReport
    drivers: tuple[str, ...]

    def as_markdown(self) -> str:
        """`| family | how | … |`."""
        report = self.report
        told = []
        for driver in DRIVERS:
            wrong = {each.custom_id for each in report.different if each.engine == driver}
            same = f"{report.requests - len(wrong)} of {report.requests}"
            told.append(same if driver in self.drivers else "refused")
        how = f"{self.delivery}, plugin" if self.plugin else self.delivery
        cells = (self.family, how, str(vllm_version()), self.dtype, *told)
        return f"| {' | '.join(cells)} | {report.cosine_min:.6f} |"


def write_table(rows: list[Row]) -> None:
    """Put the rows between the README's marks; rows of families that were not tried stay."""
    head, rest = README.read_text(encoding="utf-8").split(BEGIN)
    old, tail = rest.split(END)
    lines = {line.split(" | ")[0].strip("| "): line for line in old.splitlines() if "| " in line}
    lines |= {row.family: row.as_markdown() for row in rows}
    table = [
        "| family | handed over as | vLLM | dtype | llm: same | run-batch: same | lowest cosine |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(lines[name] for name in MAKERS if name in lines),
    ]
    README.write_text(head + BEGIN + "\n" + "\n".join(table) + "\n" + END + tail, encoding="utf-8")
