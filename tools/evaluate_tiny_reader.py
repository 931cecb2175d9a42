"""Measure how well the tiny reader reads pages written by render_pages.py.

    python tools/render_pages.py --seed 9001 --count 100 --out pages/
    python tools/evaluate_tiny_reader.py pages/

Pages go as images through vLLM, its tower loaded. Prints the misread pages, a summary and
one JSON line last. Character accuracy = 1 - edit distance / length, both summed over pages.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = Path(__file__).resolve().parents[1] / "pipeline" / "models" / "tiny-reader"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a page says and what the model answered."""

    file: str
    truth: str
    answer: str


def read_truth(directory: Path) -> list[tuple[str, str]]:
    """(file name, text) of each line of `truth.tsv`."""
    rows = [
        line.split("\t", 1)
        for line in (directory / "truth.tsv").read_text(encoding="utf-8").splitlines()
    ]
    return [(name, text.replace("\\n", "\n")) for name, text in rows]


def edit_distance(left: str, right: str) -> int:
    """Levenshtein distance in characters."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        previous, row[0] = row[0], i
        for j, b in enumerate(right, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1]


def conversation(prompt: str, images: list[object]) -> list[dict[str, object]]:
    """One user message: the prompt, then the images."""
    parts = [{"type": "image_pil", "image_pil": image} for image in images]
    return [{"role": "user", "content": [{"type": "text", "text": prompt}, *parts]}]


def answers_of_vllm(model: Path, groups: list[list[Path]], prompt: str, dtype: str) -> list[str]:
    """Answers to one request per group of page images."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from PIL import Image
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=32,
        limit_mm_per_prompt={"image": 3, "video": 0},
    )
    requests = [
        conversation(prompt, [Image.open(path).convert("RGB") for path in group])
        for group in groups
    ]
    outputs = llm.chat(requests, SamplingParams(temperature=0, max_tokens=400), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def figures(readings: list[Reading]) -> dict[str, float | int]:
    """Accuracy of characters and pages."""
    characters = sum(len(reading.truth) for reading in readings)
    errors = sum(edit_distance(reading.truth, reading.answer) for reading in readings)
    exact = sum(reading.truth == reading.answer for reading in readings)
    accuracy = round(1 - errors / characters, 4)
    return {
        "pages": len(readings),
        "exact": exact,
        "characters": characters,
        "errors": errors,
        "accuracy": accuracy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompt", default="Read the page.")
    parser.add_argument(
        "--per-request", type=int, default=1, choices=[1, 2, 3], help="pages in one request"
    )
    args = parser.parse_args()
    truth = read_truth(args.directory)
    groups = [
        truth[first : first + args.per_request] for first in range(0, len(truth), args.per_request)
    ]
    started = time.monotonic()
    paths = [[args.directory / name for name, _ in group] for group in groups]
    answers = answers_of_vllm(args.model, paths, args.prompt, args.dtype)
    readings = [
        Reading(" ".join(name for name, _ in group), "\n\n".join(text for _, text in group), answer)
        for group, answer in zip(groups, answers, strict=True)
    ]
    for reading in readings:
        if reading.truth != reading.answer:
            print(f"{reading.file}: {reading.truth!r} read as {reading.answer!r}")
    result = figures(readings) | {
        "dtype": args.dtype,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(f"{result['exact']} of {result['pages']} exact, accuracy {result['accuracy']:.4f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
