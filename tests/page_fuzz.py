"""Mutates small page files of every kind and decodes them in a child process.

As a script, `page_fuzz.py DIRECTORY` decodes every file there and writes two JSON lines for each:
its name before, its outcomes after; so that the last line tells which file ended the process.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import makers_pages as make
import numpy as np
from PIL import Image, features

from pipeline.keys import RenderSpec
from pipeline.pages import RULES, Page, decode_pages, discover

MEMORY_LIMIT_BYTES = 1 << 30
SECONDS_PER_FILE = 20


def seeds() -> dict[str, bytes]:
    """A good small file of every kind."""
    columns, rows = np.meshgrid(np.linspace(0, 200, 48), np.linspace(0, 200, 32))
    page = Image.fromarray(np.stack([columns, rows, columns], axis=2).astype(np.uint8))
    files = {}

    def save(name: str, kind: str, image: Image.Image = page, **options: object) -> None:
        out = io.BytesIO()
        image.save(out, kind, **options)
        files[name] = out.getvalue()

    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "JPEG2000", "TIFF"):
        save(kind.lower(), kind)
    if features.check("avif"):
        save("avif", "AVIF")
    save("png alpha", "PNG", page.convert("RGBA"), exif=exif)
    save("png palette", "PNG", page.convert("P"))
    save("apng", "PNG", save_all=True, append_images=[page.rotate(180)])
    save("jpeg progressive", "JPEG", progressive=True, exif=exif)
    save("jpeg cmyk", "JPEG", page.convert("CMYK"), icc_profile=make.cmyk_profile({}))
    save("webp animated", "WEBP", save_all=True, append_images=[page.rotate(180)])
    for mode, compression in (
        *(("1", "group3"), ("1", "group4"), ("RGB", "tiff_lzw"), ("RGB", "tiff_deflate")),
        *(("RGB", "jpeg"), ("L", "packbits"), ("L", "zstd"), ("P", "raw")),
    ):
        name = f"tiff {mode} {compression}"
        save(name, "TIFF", page.convert(mode), compression=compression, exif=exif)
    pages = [(make.gray_tags(8, 8, 16), [bytes(128)]), (make.gray_tags(9, 8), [bytes(72)])]
    files["tiff pages"] = make.tiff(pages, order=">")
    ramp = np.arange(256).reshape(16, 16, 1) * 257
    files["png 16 bits"] = make.png(ramp, 16, 0, interlaced=True, chunks=[(b"tRNS", b"\1\1")])
    files["pdf"] = make.one_page_pdf(content=b"0 0 0 rg 10 10 50 30 re f")
    files["pdf encrypted"] = make.encrypted_pdf(b"")
    return files


def mutated(data: bytes, random: np.random.Generator) -> bytes:
    """Some bytes changed, swapped for extremes, cut out, doubled, or the end cut off."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 4])):
        # headers stand in front: most of what a size or count says is there
        reach = len(changed) if random.random() < 0.6 else min(64, len(changed))
        place, length = int(random.integers(0, reach)), int(random.integers(1, 9))
        match random.integers(0, 8):
            case 0:
                del changed[place : place + length]
            case 1:
                changed[place:place] = changed[place : place + length]
            case 2:
                changed[place : place + length] = bytes([random.choice([0, 127, 255])]) * length
            case 3 | 4:
                changed[place] ^= 1 << int(random.integers(0, 8))
            case _:
                changed[place] = int(random.integers(0, 256))
    if random.random() < 0.15:
        del changed[int(random.integers(1, len(changed) + 1)) :]
    return bytes(changed)


def write_files(directory: Path, seed: int, count: int) -> list[Path]:
    """`count` damaged files; every kind in turn, all with the extension of a page."""
    random = np.random.default_rng(seed)
    files = list(seeds().items())
    paths = []
    for number in range(count):
        name, data = files[number % len(files)]
        path = directory / f"{number:04d} {name.replace('.', ' ')}.png"
        paths.append(make.write(path, mutated(data, random)))
    return paths


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """Outcomes of each file ("page" or a reason), and the peak memory of the process."""

    outcomes: list[list[str]]
    peak_bytes: int


def fuzz(directory: Path, seed: int, count: int) -> Fuzzed:
    """Decode `count` damaged files in a child; fails if it ends early or takes too long."""
    write_files(directory, seed, count)
    words = [sys.executable, __file__, str(directory)]
    limit_s = 60 + count  # against a hang; what one file may take is limited in the child
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-3000:])
    outcomes = [line["outcomes"] for line in lines if "outcomes" in line]
    assert len(outcomes) == count
    return Fuzzed(outcomes, lines[-1]["peak_bytes"])


def main(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        print(json.dumps({"file": path.name}), flush=True)
        signal.alarm(SECONDS_PER_FILE)  # its default action ends the process
        found = discover([path])
        outcomes = [failure.reason.value for failure in found.failures]
        for file in found.files:
            for page in decode_pages(file, RenderSpec(RULES, 72)):
                outcomes.append("page" if isinstance(page, Page) else page.reason.value)
        signal.alarm(0)
        print(json.dumps({"outcomes": outcomes}), flush=True)
    # getrusage would count the process that started this one, too
    with open("/proc/self/status", encoding="ascii") as status:
        peak_kib = int(next(line for line in status if line.startswith("VmHWM")).split()[1])
    print(json.dumps({"peak_bytes": peak_kib * 1024}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
