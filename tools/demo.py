"""The main job on the bundled model: `make demo`.

Encodes the sample documents, runs the nightly job over them on the real vLLM, and prints the
text read from every page beside its file name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOB = Path("jobs/nightly.jsonl")
NAME_WIDTH = 24


def main() -> None:
    pipeline("encode", "docs/")
    pipeline("run", str(JOB))
    print()
    for name, text in answers(ROOT / JOB.with_suffix(".run") / "results.jsonl").items():
        lines = text.split("\n")
        print(f"{name:<{NAME_WIDTH}}  {lines[0]}")
        for line in lines[1:]:
            print(" " * NAME_WIDTH + "  " + line)


def pipeline(*words: str) -> None:
    """Run a command as a user would; stop with its exit code if it fails."""
    print("$ pipeline", *words, flush=True)
    code = subprocess.run([sys.executable, "-m", "pipeline", *words], cwd=ROOT).returncode
    if code:
        raise SystemExit(code)


def answers(path: Path) -> dict[str, str]:
    """custom_id → text, by name."""
    records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    texts = {
        record["custom_id"]: record["response"]["body"]["choices"][0]["message"]["content"]
        for record in records
    }
    return dict(sorted(texts.items()))


if __name__ == "__main__":
    main()
