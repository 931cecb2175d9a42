"""A key changes with everything that changes bytes, and with nothing else."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.geometry import PixelBudget
from pipeline.keys import (
    DecodeRules,
    EncodeSpec,
    RenderSpec,
    cache_key,
    canonical_json,
    file_digest,
    payload_digest,
    pixel_digest,
)

RULES = DecodeRules("once", "white", "shift", "icc", "first", "pdfium", "100")
SPEC = EncodeSpec(
    family="qwen3_vl",
    processor="Qwen2VLImageProcessor/torchvision",
    contract=1,
    geometry=PixelBudget(16, 2, 1024, 1_048_576),
    resample="bicubic",
    rescale_factor=1 / 255,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    precision="float32",
    dtype="bfloat16",
    rules=RULES,
)


def variants(value: Any) -> list[Any]:
    """The value with one leaf changed, once for each leaf of it."""
    if is_dataclass(value) and not isinstance(value, type):
        return [
            replace(value, **{field.name: changed})
            for field in fields(value)
            if field.init
            for changed in variants(getattr(value, field.name))
        ]
    if isinstance(value, tuple):
        return [
            (*value[:place], changed, *value[place + 1 :])
            for place, item in enumerate(value)
            for changed in variants(item)
        ]
    return [value + 1 if isinstance(value, int | float) else value + "x"]


def test_each_field_of_the_spec_changes_the_key() -> None:
    specs = [SPEC, *variants(SPEC)]
    assert len(specs) >= 1 + len(fields(EncodeSpec)) + len(fields(PixelBudget)) - 2
    keys = {cache_key("p" * 64, spec, "t" * 64) for spec in specs}
    assert len(keys) == len(specs)


def test_two_rules_with_equal_numbers_have_different_keys() -> None:
    """The rule's name is in the key."""
    assert b'"kind":"smart_resize"' in canonical_json(asdict(SPEC))


def test_pixels_and_tower_change_the_key() -> None:
    assert len({cache_key(pixels, SPEC, tower) for pixels in "ab" for tower in "cd"}) == 4


def test_the_key_of_an_equal_spec_is_equal_and_has_64_hex_digits() -> None:
    key = cache_key("p", replace(SPEC), "t")
    assert key == cache_key("p", SPEC, "t")
    assert len(key) == 64 and int(key, 16) >= 0


def test_each_field_of_the_render_spec_changes_the_manifest_name() -> None:
    spec = RenderSpec(RULES, 200, SPEC.geometry)
    specs = [spec, replace(spec, geometry=None), *variants(spec)]
    geometries = len(fields(PixelBudget)) - 1  # `kind` can't be varied
    assert len(specs) == 2 + len(fields(RULES)) + 1 + geometries + 1
    assert len({spec.digest("pdf") for spec in specs}) == len(specs)


def test_what_only_a_pdf_depends_on_is_not_in_the_manifest_name_of_an_image() -> None:
    spec = RenderSpec(RULES, 200, SPEC.geometry)
    others = [replace(spec, geometry=None), replace(spec, dpi=72)]
    assert {other.digest("png") for other in others} == {spec.digest("png")}
    assert replace(spec, allow_truncated=True).digest("png") != spec.digest("png")


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": (1, 2.5), "a": "ä"}) == '{"a":"ä","b":[1,2.5]}'.encode()
    with pytest.raises(ValueError):
        canonical_json(float("nan"))


def test_pixel_digest_covers_shape_and_every_byte() -> None:
    rgb = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    changed = rgb.copy()
    changed[3, 5, 2] ^= 1
    assert len({pixel_digest(rgb), pixel_digest(rgb.reshape(6, 4, 3)), pixel_digest(changed)}) == 3


def test_pixel_digest_does_not_depend_on_memory_layout() -> None:
    rgb = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    assert pixel_digest(np.asfortranarray(rgb)) == pixel_digest(rgb)


def test_payload_digest_covers_key_shape_grid_and_planes() -> None:
    plain: dict[str, Any] = {
        "key": "k",
        "rows": 2,
        "width": 4,
        "grid": (1, 2, 4),
        "planes": (b"aaaa", b"bbbb"),
    }
    changes = [
        {"key": "l"},
        {"rows": 4, "width": 2},
        {"grid": (1, 4, 2)},
        {"grid": None},
        {"planes": (b"bbbb", b"aaaa")},
        {"planes": (b"aaaab", b"bbb")},
    ]
    digests = {payload_digest(**plain | change) for change in [{}, *changes]}
    assert len(digests) == 1 + len(changes)


def test_file_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    from blake3 import blake3

    data = bytes(range(256)) * 10_000
    (tmp_path / "page").write_bytes(data)
    assert file_digest(tmp_path / "page") == blake3(data).hexdigest()
