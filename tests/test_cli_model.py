"""`pipeline model` shows what is true of a model, without torch, and refuses as the others do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_layouts import fp8_tower
from checkpoints import make_qwen3_vl
from click.testing import CliRunner, Result
from conftest import ROOT, Pipeline

from pipeline.checkpoint import model_identity, resolve_model, tower_fingerprint
from pipeline.cli import main
from pipeline.config import cpu_build_installed
from pipeline.families import family_of
from pipeline.models import BUNDLED_PATH


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    return make_qwen3_vl(tmp_path_factory.mktemp("made") / "qwen3-vl")


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["model", *map(str, words)])


def facts(*words: object) -> dict:
    done = call(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_bundled_model_is_shown_in_full() -> None:
    done = call()
    assert (done.exit_code, done.stderr) == (0, "")
    model = resolve_model()
    eager = "              --enforce-eager\n" if cpu_build_installed() else ""
    assert done.stdout == (
        f"""\
model         tiny-reader ({BUNDLED_PATH})
family        qwen3_vl
quantised     no
tower         Qwen3VLVisionModel, 1,811,584 parameters (BF16 1,811,584)
              3.5 MiB in 57 tensors
              on 2 of 3 files: model-00002-of-00003.safetensors, model-00003-of-00003.safetensors
fingerprint   {tower_fingerprint(model, family_of(model))}
identity      {model_identity(model)}
processor     Qwen2VLImageProcessor, torchvision
sizes         smart_resize: patch_size 16, merge_size 2, min_pixels 1,024, max_pixels 1,048,576
row           384 values = 128 x (1 + 2 DeepStack layers), 768 bytes
A4 100 dpi    827 x 1169 px, at the model 832 x 1184 px: 962 tokens, 0.7 MiB
A4 150 dpi    1240 x 1754 px, at the model 832 x 1216 px: 988 tokens, 0.7 MiB
A4 200 dpi    1654 x 2339 px, at the model 832 x 1216 px: 988 tokens, 0.7 MiB
delivery      grid, the plugin patches qwen3_vl
drivers       llm, run-batch
vLLM          --model {BUNDLED_PATH}
              --served-model-name tiny-reader
              --dtype auto
              --limit-mm-per-prompt '{{"image": 0, "video": 0}}'
              --mm-processor-cache-gb 0
              --worker-extension-cls pipeline.plugin.probe.TowerProbe
              --max-num-seqs 16
              --tensor-parallel-size 1
              --pipeline-parallel-size 1
              --enable-mm-embeds
{eager}limits        one page is one image; video and audio are not encoded
              this package's plugin must be installed beside vLLM
warnings      none
"""
    )


def test_the_json_has_the_same_facts(made: Path) -> None:
    found = facts(made)
    model = resolve_model(str(made))
    assert found["tower"] == {
        "class": "Qwen3VLVisionModel",
        "parameters": 143_200,
        "bytes": 286_400,
        "parameters_by_type": {"BF16": 143_200},
        "tensors": 45,
        "shards": [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)],
        "files": 3,
        "fingerprint": tower_fingerprint(model, family_of(model)),
    }
    page = {"height_px": 1184, "width_px": 832, "tiles": 1, "grid": [1, 74, 52], "tokens": 962}
    assert found["a4"]["100"] == page | {"bytes": 962 * 192 * 2}
    geometry = {"patch_size": 16, "merge_size": 2, "min_pixels": 1024, "max_pixels": 1_048_576}
    assert found["geometry"] == geometry | {"kind": "smart_resize"}
    processor = {"class": "Qwen2VLImageProcessor", "backend": "torchvision", "contract": 1}
    assert found["processor"] == processor
    names = ("model", "revision", "model_type", "delivery", "row_width", "deepstack_layers")
    assert [found[name] for name in names] == ["qwen3-vl", None, "qwen3_vl", "grid", 192, 2]
    assert found["identity"] == model_identity(model)


def test_an_fp8_tower_is_shown_with_its_scales_and_its_limit(made: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(made, tmp_path / "fp8")
    fp8_tower(copy, "channel")
    found = facts(copy)
    assert found["quantisation"] == "fp8"
    kinds = found["tower"]["parameters_by_type"]
    assert kinds.keys() == {"BF16", "F8_E4M3"} and sum(kinds.values()) == 143_200
    plain = kinds["BF16"] * 2 + kinds["F8_E4M3"]
    assert plain < found["tower"]["bytes"] < 1.1 * plain  # and the factors
    limit = "the tower is stored in FP8 and computed in full, unlike natively in vLLM"
    assert limit in found["limits"] and limit in call(copy).output


def test_a_checkpoint_s_traps_are_warned_of(made: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(made, tmp_path / "trap")
    path = copy / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({n: v for n, v in settings.items() if n != "image_mean"}))
    assert any("image_mean" in warning for warning in facts(copy)["warnings"])


def test_a_model_that_can_not_be_used_is_an_error_with_a_hint(
    made: Path, tmp_path: Path, pipeline: Pipeline
) -> None:
    done = pipeline("model", "missing", cwd=tmp_path, code=1)
    assert done.stderr == (
        "Error: no model directory `missing`\n\n"
        "hint: give a directory that holds config.json, or a hub id\n"
    )
    done = pipeline("model", made, "--revision", "main", cwd=tmp_path, code=2)
    assert done.stderr.startswith("Error: `--revision` is for hub models\n\nhint: ")


def test_the_facts_of_a_hub_model_tell_its_commit(made: Path, tmp_path: Path) -> None:
    commit = "c" * 40
    root = tmp_path / "hub" / "models--acme--reader"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    shutil.copytree(made, root / "snapshots" / commit)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "model", "acme/reader", "--json"],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["model"], found["revision"]) == ("acme/reader", commit)
    assert found["tower"]["fingerprint"] == facts(made)["tower"]["fingerprint"]
    names = found["engine_arguments"].index("--served-model-name")
    assert found["engine_arguments"][names + 1] == "acme/reader"


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys\nfrom pipeline.cli import main\n"
        "try: main(['model'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules), 'heavy import'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("model  "), done.stderr


def test_help_has_an_example() -> None:
    assert "Example:\n    pipeline model /" in call("--help").output
