"""The plugin outside an engine: what it touches, what it leaves alone, what it refuses."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.plugin import (
    deepstack,
    glm4v,
    guard,
    hooks,
    minicpmv4_6,
    paddleocr_vl,
    patch_status,
    patches,
    probe,
    register,
    replace,
    row_lists,
    sources,
    unfit,
)

(GLM,), (PADDLE,), (MINICPM,) = glm4v.MODULES, paddleocr_vl.MODULES, minicpmv4_6.MODULES
ALL = (guard.PARSER, deepstack.DENSE, deepstack.MOE, GLM, PADDLE, MINICPM, *row_lists.MODULES)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which the plugin has done nothing yet."""
    monkeypatch.setattr(hooks, "applied", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


def finders() -> list[hooks._Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, hooks._Finder)]


# -- registering --------------------------------------------------------------------------------


def test_the_installed_vllm_is_supported() -> None:
    status = patch_status()
    assert status["supported"], status
    assert status["modules"] == dict.fromkeys(patches.BY_MODULE, "ready")
    assert set(ALL) <= set(patches.BY_MODULE)
    assert unfit(patches.BY_MODULE) == {}


def test_registering_imports_neither_vllm_nor_torch() -> None:
    script = (
        "import sys; from pipeline.plugin import patch_status, register; register();"
        "assert patch_status()['supported'];"
        "print(sorted({'vllm', 'torch', 'numpy', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_registering_twice_is_registering_once(clean: None) -> None:
    register()
    register()
    assert len(finders()) == 1
    assert set(finders()[0].callbacks) >= set(ALL)


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.0.0", None])
def test_an_unknown_version_is_left_alone_with_one_line(
    version: str | None,
    clean: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pipeline.plugin.vllm_version", lambda: version)
    register()
    assert finders() == []
    assert [record.message for record in caplog.records] == [
        f"vlm-page-pipeline: vLLM {version} is unknown, nothing patched"
    ]
    assert patch_status()["supported"] is False
    assert unfit([GLM]) == {GLM: f"vLLM {version} is unknown"}
    assert unfit([]) == {}


def test_registering_never_raises(
    clean: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> str:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("pipeline.plugin.vllm_version", broken)
    register()
    assert len(caplog.records) == 1


CHANGES = {
    "the tower's test reads another name": (
        deepstack.DENSE,
        ("isinstance(self.visual, Stage", "isinstance(self.tower, Stage"),
        "`StageMissingLayer` is not used as expected",
    ),
    "the tower's name is used elsewhere too": (
        deepstack.MOE,
        ("self.set_moe_parameters()", "self.set_moe_parameters(StageMissingLayer)"),
        "`StageMissingLayer` is not used as expected",
    ),
    "Qwen3-VL's parser takes other arguments": (
        deepstack.DENSE,
        ("video_needs_metadata=True", "video_needs_metadata=False"),
        "`Qwen3VLProcessingInfo.get_data_parser` is not as expected",
    ),
    "Qwen2-VL's parser checks by itself": (
        guard.PARSER,
        ("if isinstance(data, dict):", "if self.check(data):"),
        "`Qwen2VLMultiModalDataParser._parse_image_data` is not as expected",
    ),
    "GLM's parser is another": (
        GLM,
        ("return MultiModalDataParser(", "return Glm4vMultiModalDataParser("),
        "`Glm4vProcessingInfo.get_data_parser` is not as expected",
    ),
    "GLM's model treats embeddings otherwise": (
        GLM,
        ('image_input["image_embeds"].type(self.visual.dtype)', 'image_input["image_embeds"]'),
        "`Glm4vForConditionalGeneration._process_image_input` is not as expected",
    ),
    "PaddleOCR-VL has a parser": (
        PADDLE,
        ("def get_hf_config(self)", "def get_data_parser(self): return 0\n\n    def x(self)"),
        "`PaddleOCRVLProcessingInfo.get_data_parser` is not as expected",
    ),
    "PaddleOCR-VL's model embeds otherwise": (
        PADDLE,
        ("multimodal_embeddings += tuple(image_embeds)", "multimodal_embeddings = image_embeds"),
        "`PaddleOCRVLForConditionalGeneration.embed_multimodal` is not as expected",
    ),
    "MiniCPM-V's processor has other fields": (
        MINICPM,
        ("return _minicpmv4_6_field_config(hf_inputs)", "return other_fields(hf_inputs)"),
        "`MiniCPMV4_6MultiModalProcessor._get_mm_fields_config` is not as expected",
    ),
    "MiniCPM-V counts placeholders otherwise": (
        MINICPM,
        ("return source_tokens + grids[0]", "return source_tokens * grids[0]"),
        "`MiniCPMV4_6ProcessingInfo.get_num_image_tokens` is not as expected",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_source_is_not_patched(
    change: str, clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, (old, new), reason = CHANGES[change]
    read = sources.read_source
    changed = read(name).replace(old, new, 1)
    assert changed != read(name)
    monkeypatch.setattr(
        sources, "read_source", lambda other: changed if other == name else read(other)
    )
    module = ModuleType(name)  # none of the names that a patch would touch
    monkeypatch.setitem(sys.modules, name, module)
    register()
    assert hooks.applied[name] == f"not patched: {reason}"
    status = patch_status()
    assert status["supported"] is False
    others = {state for other, state in status["modules"].items() if other != name}
    assert others <= {"ready", "applied"}, "whatever has been imported here before"
    assert unfit(ALL) == {name: reason}


def test_a_reformatted_source_is_the_same() -> None:
    """Comments, docstrings and layout decide nothing."""
    text = "class A:\n    def f(self):\n        'Doc.'\n        return (  # why\n            1)\n"
    assert sources.changed(text, {"A.f": "return 1"}) == ""
    assert sources.changed(text, {"A.f": "return 2"}) == "`A.f` is not as expected"
    assert sources.changed(text, {"A.g": ""}) == ""
    assert sources.changed(text, {"B.f": ""}) == "`B.f` is not as expected"


def test_a_module_without_a_patch_is_unfit() -> None:
    assert unfit(["vllm.model_executor.models.llava"]) == {
        "vllm.model_executor.models.llava": "there is no patch for it"
    }


# -- after_import -------------------------------------------------------------------------------


@pytest.fixture
def late_module(clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "late_module.py").write_text("VALUE = 1\nLOADER = type(__loader__).__name__\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_module", raising=False)
    return "late_module"


def test_the_callback_runs_after_the_import_and_the_loader_is_the_real_one(
    late_module: str,
) -> None:
    hooks.after_import(late_module, lambda module: setattr(module, "VALUE", module.VALUE + 1))
    assert late_module not in sys.modules
    module = importlib.import_module(late_module)
    assert module.VALUE == 2
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None and module.__spec__.loader is module.__loader__
    assert hooks.applied == {late_module: "applied"}


def test_a_module_that_is_imported_already_is_called_back_at_once(late_module: str) -> None:
    module = importlib.import_module(late_module)
    hooks.after_import(late_module, lambda module: setattr(module, "VALUE", 3))
    hooks.after_import(late_module, lambda module: setattr(module, "VALUE", 4))
    assert module.VALUE == 3


def test_a_callback_that_raises_does_not_break_the_import(late_module: str) -> None:
    hooks.after_import(late_module, lambda module: module.no_such_name)
    assert importlib.import_module(late_module).VALUE == 1
    assert hooks.applied[late_module].startswith("not patched: ")


# -- DeepStack ----------------------------------------------------------------------------------


class Absent:
    """Plays vLLM's StageMissingLayer."""


class Loaded:
    """Plays a vision tower."""


@pytest.mark.parametrize(
    ("architecture", "takes_embeddings", "tower", "counts_as_absent"),
    [
        ("Qwen3VLForConditionalGeneration", True, Absent(), False),
        ("Qwen3VLMoeForConditionalGeneration", True, Absent(), False),
        ("Qwen3VLForConditionalGeneration", False, Absent(), True),
        ("ColQwen3Model", True, Absent(), True),
        ("Qwen3VLForConditionalGeneration", True, Loaded(), False),
        ("Qwen3VLForConditionalGeneration", False, Loaded(), False),
    ],
)
def test_deepstack_stays_on_for_two_models_that_take_embeddings_and_for_no_other(
    architecture: str,
    takes_embeddings: bool,
    tower: object,
    counts_as_absent: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = SimpleNamespace(
        architecture=architecture,
        multimodal_config=SimpleNamespace(enable_mm_embeds=takes_embeddings),
    )
    config = ModuleType("vllm.config")
    current = SimpleNamespace(model_config=model)
    config.get_current_vllm_config_or_none = lambda: current  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    module: Any = ModuleType(deepstack.MOE)
    module.StageMissingLayer = Absent
    deepstack.patch(module)
    deepstack.patch(module)
    assert isinstance(tower, module.StageMissingLayer) is counts_as_absent


@pytest.mark.parametrize(("levels", "width"), [([5, 11, 17], 512), ([], 128), (None, 128)])
def test_a_row_holds_the_merged_patch_and_every_deepstack_level(
    levels: list[int] | None, width: int
) -> None:
    config = SimpleNamespace(out_hidden_size=128, deepstack_visual_indexes=levels)
    assert deepstack.row_width(config) == width


# -- replacing methods --------------------------------------------------------------------------


class Base:
    def twice(self, number: int) -> int:
        """Doc."""
        return 2 * number


class Derived(Base):
    pass


def test_a_method_is_replaced_once_and_in_its_owner_alone() -> None:
    replace.replace(Derived, "twice", lambda twice: lambda self, number: twice(self, number) + 1)
    replace.replace(Derived, "twice", lambda twice: lambda self, number: twice(self, number) + 1)
    assert (Derived().twice(3), Base().twice(3)) == (7, 6)
    assert Derived.twice.__doc__ == "Doc."


@pytest.mark.parametrize(
    ("model_type", "multimodal", "acts"),
    [
        ("glm_ocr", SimpleNamespace(enable_mm_embeds=True), True),
        ("glm_ocr", SimpleNamespace(enable_mm_embeds=False), False),
        ("glm_ocr", None, False),
        ("glm4v_moe", SimpleNamespace(enable_mm_embeds=True), False),
    ],
)
def test_a_patch_acts_for_its_models_and_only_where_embeddings_are_taken(
    model_type: str, multimodal: Any, acts: bool
) -> None:
    context = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=multimodal))
    config = SimpleNamespace(model_type=model_type)
    info = SimpleNamespace(ctx=context, get_hf_config=lambda: config)
    assert replace.takes_embeddings(info, glm4v.MODEL_TYPES) is acts


# -- the guard ----------------------------------------------------------------------------------

GRID = torch.tensor([[1, 4, 6]])
ROWS = torch.ones(6, 8)


def test_images_that_fit_pass() -> None:
    two = {"image_embeds": torch.ones(12, 8), "image_grid_thw": GRID.repeat(2, 1)}
    assert guard.misfit(two, width=8, merge=2) == ""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            {"image_embeds": ROWS},
            "fields ['image_embeds'] instead of ['image_embeds', 'image_grid_thw']",
        ),
        (
            {"image_embeds": [1.0], "image_grid_thw": GRID},
            "image_embeds and image_grid_thw must be tensors",
        ),
        (
            {"image_embeds": ROWS[None], "image_grid_thw": GRID},
            "image_embeds has shape (1, 6, 8) instead of (rows, 8)",
        ),
        (
            {"image_embeds": ROWS.to(torch.int8), "image_grid_thw": GRID},
            "image_embeds is torch.int8 instead of floating point",
        ),
        (
            {"image_embeds": ROWS[:, :4], "image_grid_thw": GRID},
            "image_embeds has 4 columns instead of 8",
        ),
        (
            {"image_embeds": ROWS / 0, "image_grid_thw": GRID},
            "image_embeds has values that are not finite",
        ),
        (
            {"image_embeds": ROWS, "image_grid_thw": GRID[0]},
            "image_grid_thw has shape (3,) instead of (images, 3)",
        ),
        (
            {"image_embeds": ROWS, "image_grid_thw": torch.tensor([[1, 3, 8]])},
            "image_grid_thw [[1, 3, 8]] is no grid of still images",
        ),
        (
            {"image_embeds": ROWS, "image_grid_thw": torch.tensor([[2, 2, 6]])},
            "image_grid_thw [[2, 2, 6]] is no grid of still images",
        ),
        (
            {"image_embeds": ROWS, "image_grid_thw": torch.tensor([[1, -4, -6]])},
            "image_grid_thw [[1, -4, -6]] is no grid of still images",
        ),
        (
            {"image_embeds": ROWS[1:], "image_grid_thw": GRID},
            "image_embeds has 5 rows, image_grid_thw asks for 6",
        ),
    ],
)
def test_images_that_would_kill_or_spoil_the_engine_are_refused(
    data: dict[str, Any], reason: str
) -> None:
    assert guard.misfit(data, width=8, merge=2) == reason


class Parser:
    """As far as the guard touches vLLM's own."""

    _spatial_merge_size = 2

    def _parse_image_data(self, data: Any) -> str:
        return "parsed"


class NarrowerParser(Parser):
    pipeline_row_width = 4


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parser, "_parse_image_data", Parser._parse_image_data)
    guard.guard_parser(Parser)
    guard.guard_parser(NarrowerParser)


@pytest.mark.parametrize("width", [None, "", "0"])
def test_the_guard_lets_everything_pass_in_engines_that_are_not_ours(
    width: str | None, guarded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(guard.ENV_WIDTH, raising=False)
    if width is not None:
        monkeypatch.setenv(guard.ENV_WIDTH, width)
    assert Parser()._parse_image_data({"image_embeds": ROWS[:, :1]}) == "parsed"


def test_the_guard_knows_the_width_from_our_drivers_or_from_the_parser(
    guarded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[dict[str, Any]] = []
    monkeypatch.setattr(guard, "check_images", lambda data, **fit: checked.append(fit))
    monkeypatch.setenv(guard.ENV_WIDTH, "8")
    data = {"image_embeds": ROWS, "image_grid_thw": GRID}
    assert Parser()._parse_image_data(data) == "parsed"
    assert NarrowerParser()._parse_image_data(data) == "parsed"
    for pixels in ([Path("a.png")], None, {"pixel_values": ROWS}):
        assert Parser()._parse_image_data(pixels) == "parsed"
    assert checked == [{"width": 8, "merge": 2}, {"width": 4, "merge": 2}]


# -- the probe ----------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A model of 2 × 3 tower, 2 × 2 connector and 5 × 5 language weights."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False))
        self.projector = torch.nn.Linear(2, 2, bias=False)
        self.language_model = torch.nn.Linear(5, 5, bias=False)

    def get_mm_mapping(self) -> Any:
        return SimpleNamespace(tower_model=["visual."], connector=["projector", "visual.0"])


def test_the_probe_counts_each_weight_of_tower_and_connector_once() -> None:
    report = probe.tower_report(Model())
    assert report["towers"] == {
        "projector": {"class": "Linear", "parameters": 4, "bytes": 16},
        "visual": {"class": "Sequential", "parameters": 6, "bytes": 24},
    }
    assert (report["parameters"], report["bytes"], report["model"]) == (10, 40, "Model")


def test_weights_without_memory_do_not_count() -> None:
    report = probe.tower_report(Model().to("meta"))
    assert (report["parameters"], report["bytes"]) == (0, 0)


def test_a_model_without_a_tower_has_no_tower_class() -> None:
    report = probe.tower_report(torch.nn.Linear(2, 2))
    assert (report["class"], report["towers"], report["deepstack"]) == (None, {}, None)


def test_each_worker_writes_its_report_after_loading(tmp_path: Path) -> None:
    class Worker:
        rank = 1

        def load_model(self, *, load_dummy_weights: bool) -> str:
            return f"loaded {load_dummy_weights}"

        def get_model(self) -> Model:
            return Model()

    probe.report_after_load(Worker, str(tmp_path / "towers"))
    assert Worker().load_model(load_dummy_weights=False) == "loaded False"
    assert [path.name for path in (tmp_path / "towers").iterdir()] == ["tower-00001.json"]
    assert probe.read_reports(tmp_path / "towers")[0]["parameters"] == 10
    assert json.loads((tmp_path / "towers" / "tower-00001.json").read_text())["class"] == "Linear"


def test_a_report_that_cannot_be_written_does_not_stop_the_engine(tmp_path: Path) -> None:
    class Worker:
        def load_model(self) -> str:
            return "loaded"

    (tmp_path / "file").write_text("")
    probe.report_after_load(Worker, str(tmp_path / "file"))
    assert Worker().load_model() == "loaded"


class Schema:
    """Stands for vLLM's schema: it refuses a list of different shapes."""

    def __init__(self, data: object) -> None:
        self.data = data
        self.validate()

    def validate(self) -> None:
        if isinstance(self.data, list) and len({rows.shape for rows in self.data}) > 1:
            raise ValueError("data contains inconsistent shapes")


@pytest.mark.parametrize(
    ("name", "schema"),
    [("interns1", "InternS1ImageEmbeddingInputs"), ("llava_next", "LlavaNextImageEmbeddingInputs")],
)
def test_pages_of_different_size_may_meet_in_one_step(name: str, schema: str) -> None:
    """Else two such pages, scheduled together, kill the engine."""
    pages = [torch.ones(28, 64), torch.ones(12, 64)]
    owner = type(schema, (Schema,), {})
    with pytest.raises(ValueError, match="inconsistent"):
        owner(pages)
    module = SimpleNamespace(__name__=f"vllm.model_executor.models.{name}", **{schema: owner})
    row_lists.patch(module)
    row_lists.patch(module)
    assert owner(pages).data is pages
    owner(torch.ones(2, 28, 64))
    for bad in (torch.ones(12, 63), torch.ones(1, 12, 64)):
        with pytest.raises(ValueError, match="no \\(rows, width\\) of one width"):
            owner([pages[0], bad])
    with pytest.raises(ValueError, match="inconsistent"):
        type(schema, (Schema,), {})(pages)


@pytest.mark.parametrize("name", row_lists.MODULES)
def test_a_changed_schema_is_not_patched(name: str) -> None:
    text = sources.read_source(name)
    assert row_lists.source_misfit(name, text) == ""
    for changed in (text.replace("ImageEmbeddingInputs", "Other"), text.replace("ifs", "xfs")):
        assert "is not as expected" in row_lists.source_misfit(name, changed)
