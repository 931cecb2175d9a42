"""What vLLM is started with."""

import json
from pathlib import Path

import pytest

from pipeline.cli.engine_options import engine_options_of, vllm_argument
from pipeline.config import EngineOptions, available_memory_bytes
from pipeline.engines.arguments import ModelSource, engine_arguments, engine_environment
from pipeline.engines.run_batch import shards
from pipeline.engines.tower import check_tower
from pipeline.errors import PipelineError, UsageError
from pipeline.jobs import Request
from pipeline.run.line import served_names
from pipeline.run.survey import Survey

SOURCE = ModelSource(Path("m"), ("name",), Path("cache"), "f" * 64, deepstack=True)
NATIVE = ModelSource(Path("m"), ("name",), Path("cache"), "f" * 64, native=True)


def limits(source: ModelSource) -> dict[str, int]:
    words = engine_arguments(source, EngineOptions())
    found: dict[str, int] = json.loads(words[words.index("--limit-mm-per-prompt") + 1])
    return found


def test_every_modality_is_limited_to_none_or_its_tower_would_load() -> None:
    assert limits(SOURCE) == {"image": 0, "video": 0}
    assert "--enable-mm-embeds" in engine_arguments(SOURCE, EngineOptions())


def test_the_native_engine_takes_images_and_no_video() -> None:
    assert limits(NATIVE) == {"image": 8, "video": 0}
    assert "--enable-mm-embeds" not in engine_arguments(NATIVE, EngineOptions())


def test_an_option_that_is_not_given_is_left_to_vllm() -> None:
    words = engine_arguments(SOURCE, EngineOptions())
    assert "--max-model-len" not in words and "--gpu-memory-utilization" not in words
    words = engine_arguments(SOURCE, EngineOptions(max_model_len=4096))
    assert words[words.index("--max-model-len") + 1] == "4096"


def test_the_engine_calls_no_one_and_finds_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    environment = engine_environment(SOURCE, EngineOptions())
    assert environment["VLLM_NO_USAGE_STATS"] == environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_MEDIA_CONNECTOR"] == "pipeline-cache"
    assert environment["PIPELINE_CONNECTOR_CACHE"] == str(Path("cache").resolve())
    assert "VLLM_MEDIA_CONNECTOR" not in engine_environment(NATIVE, EngineOptions())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed=1", ("--seed", "1")),
        ("--swap_space=0=1", ("--swap-space", "0=1")),
        ("enable-prefix-caching", ("--enable-prefix-caching",)),
    ],
)
def test_any_other_argument_of_vllm_is_passed_on(text: str, words: tuple[str, ...]) -> None:
    assert vllm_argument(text) == words


def test_an_argument_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="has no name"):
        vllm_argument("=1")


def test_engine_options_are_taken_out_of_the_others() -> None:
    values = {"engine_arguments": ("seed=1",), "dtype": "float32", "driver": "llm", "job": "j"}
    options = engine_options_of(values)
    assert (options.dtype, options.extra_arguments) == ("float32", ("--seed", "1"))
    assert values == {"job": "j"}


def test_what_is_in_flight_is_bounded_by_a_quarter_of_the_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:   4096 kB\n")
    assert available_memory_bytes(meminfo) == 4 << 20
    assert available_memory_bytes(tmp_path / "none") == 8 << 30
    assert EngineOptions(max_in_flight_bytes=7).in_flight_limit_bytes == 7
    assert 0 < EngineOptions().in_flight_limit_bytes <= 2 * available_memory_bytes()


ABSENT = {"class": "StageMissingLayer", "parameters": 0, "deepstack": True}
LOADED = {"class": "Qwen3_VisionTransformer", "parameters": 9, "deepstack": True}


def test_towers_where_they_should_be_pass() -> None:
    check_tower([ABSENT, ABSENT], SOURCE)
    check_tower([LOADED], NATIVE)


@pytest.mark.parametrize(
    ("reports", "source", "message"),
    [
        ([], SOURCE, "no worker reported"),
        ([ABSENT, LOADED], SOURCE, "should be absent, found Qwen3_VisionTransformer with 9"),
        ([ABSENT], NATIVE, "should be loaded"),
        ([ABSENT | {"class": None}], SOURCE, "should be absent, found None"),
        ([ABSENT | {"deepstack": False}], SOURCE, "would drop the DeepStack features"),
    ],
)
def test_a_tower_that_is_not_where_it_should_be_stops_the_run(
    reports: list[dict], source: ModelSource, message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        check_tower(reports, source)


def request(size: int) -> Request:
    """One whose line in a file has about so many bytes; what it refers to does not count."""
    return Request(str(size), "", {"text": "x" * (size - 80)}, "", (), (), 10**9)


def test_shards_are_bounded_by_bytes_and_end_at_barriers() -> None:
    sizes = [400, 400, 400, None, 100, 9900, None, None]
    stream = (None if size is None else request(size) for size in sizes)
    found = [[each.custom_id for each in shard] for shard in shards(stream, 850)]
    assert found == [["400", "400"], ["400"], ["100"], ["9900"]]


def test_a_job_that_names_one_model_is_served_under_that_name() -> None:
    ours = ("org/model", "model")
    assert served_names(None, ours, Survey(1, (), ("theirs",), ())) == ("theirs",)
    assert served_names(None, ours, Survey(1, (), ("a", "b"), ())) == ours
    assert served_names("given", ours, Survey(1, (), ("theirs",), ())) == ("given",)
