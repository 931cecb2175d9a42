"""What does the cache give back? First and second encode of the same pages, and bytes kept.

Three encodes of 40 rendered pages: cold, again (nothing to do), and the same command's own cost
with nothing to look at. Ratios within one run; the last line is JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = 40
ROW_BYTES = 128 * 3 * 2  # tiny-reader: hidden 128, two DeepStack layers, bfloat16


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        render = [sys.executable, ROOT / "tools" / "render_pages.py", "--seed", "7"]
        subprocess.run([*render, "--count", str(PAGES), "--out", work / "pages"], check=True)
        cold_s, cold = encode(work)
        again_s, again = encode(work)
    assert (cold["encoded"], again["encoded"], again["cached"]) == (PAGES, 0, PAGES)
    kept = cold["bytes"] / (cold["tokens"] * ROW_BYTES)
    print(f"cold {cold_s:.1f} s, again {again_s:.1f} s: {cold_s / again_s:.1f} times quicker")
    print(f"kept {kept:.2f} of the embeddings' own bytes")
    print(json.dumps({"again_to_cold": round(again_s / cold_s, 3), "kept_to_raw": round(kept, 3)}))


def encode(work: Path) -> tuple[float, dict[str, int]]:
    """Wall seconds of one `pipeline encode`, and its report."""
    words = [sys.executable, "-m", "pipeline", "encode", "pages", "--json", "--quiet"]
    started = time.monotonic()
    done = subprocess.run(words, cwd=work, check=True, capture_output=True, text=True)
    return time.monotonic() - started, json.loads(done.stdout)


if __name__ == "__main__":
    main()
