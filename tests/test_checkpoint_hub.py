"""Of a hub model only what is needed is fetched, at one commit; the real client, a hub of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_layouts import INDEX, save_files, tower_alone
from checkpoints import load_weights, make_qwen3_vl, write_json
from hub_server import COMMIT, Hub, serve

from pipeline.checkpoint import model_identity, resolve_model, tower_fingerprint
from pipeline.families import family_of

TOWER = "model-00003-of-00003.safetensors"
TEXT = ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors")
NOT_NEEDED = ("README.md", "pytorch_model.bin", *TEXT)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose tower lies alone on the last shard."""
    directory = make_qwen3_vl(tmp_path_factory.mktemp("made") / "reader")
    assert tower_alone(directory) == TOWER
    (directory / "README.md").write_text("a card")
    (directory / "pytorch_model.bin").write_bytes(bytes(1000))
    return directory


def fingerprint(directory: Path) -> str:
    model = resolve_model(str(directory))
    return tower_fingerprint(model, family_of(model))


def call(
    home: Path, code: str, endpoint: str = "http://127.0.0.1:1", **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run code with a hub cache in `home` and the hub at `endpoint`."""
    environment = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint} | settings
    if "HF_HUB_OFFLINE" not in settings:
        environment.pop("HF_HUB_OFFLINE", None)
    code = "from pipeline.checkpoint import *\nfrom pipeline.families import family_of\n" + code
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


FINGERPRINT = (
    "m = resolve_model('acme/reader', REVISION)\n"
    "print(m.repo, m.revision, tower_fingerprint(m, family_of(m)), model_identity(m))\n"
)


def code_for(revision: str | None) -> str:
    return f"REVISION = {revision!r}\n{FINGERPRINT}"


# ---------------------------------------------------------------- fetching


@pytest.fixture(scope="module")
def fetched(made: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Hub, list[str]]:
    """The client's home after a first use at tag v1, what the hub sent, what was printed."""
    home = tmp_path_factory.mktemp("home")
    with serve(made) as hub:
        done = call(home, code_for("v1"), hub.url)
    assert done.returncode == 0, done.stderr
    return home, hub, done.stdout.split()


def test_only_small_files_and_the_shards_with_vision_tensors_are_fetched(
    made: Path, fetched: tuple[Path, Hub, list[str]]
) -> None:
    _, hub, _ = fetched
    wanted = {path.name for path in made.iterdir()} - set(NOT_NEEDED)
    assert hub.sent == {name: (made / name).stat().st_size for name in wanted}
    assert {"config.json", "preprocessor_config.json", INDEX, TOWER} <= wanted


def test_everything_is_fetched_at_the_commit_that_the_tag_stood_for(
    made: Path, fetched: tuple[Path, Hub, list[str]]
) -> None:
    _, hub, printed = fetched
    assert hub.revisions == {COMMIT}
    assert printed[:3] == ["acme/reader", COMMIT, fingerprint(made)]


def test_what_was_fetched_is_used_again_without_a_network(
    fetched: tuple[Path, Hub, list[str]],
) -> None:
    home, _, printed = fetched
    done = call(home, code_for("v1") + code_for(COMMIT), HF_HUB_OFFLINE="1")
    assert done.stdout.split() == [*printed, *printed], done.stderr


def test_all_shards_are_fetched_where_an_engine_needs_them(
    made: Path, fetched: tuple[Path, Hub, list[str]], tmp_path: Path
) -> None:
    home, _, printed = fetched
    home = shutil.copytree(home, tmp_path / "home", symlinks=True)
    with serve(made) as hub:
        code = f"fetch_weights(resolve_model('acme/reader', 'v1'))\n{code_for('v1')}"
        done = call(home, code, hub.url)
    assert hub.sent == {name: (made / name).stat().st_size for name in TEXT}
    assert done.stdout.split() == printed, "the same model, fetched in full"


def test_a_stale_index_costs_the_headers_of_the_other_shards(made: Path, tmp_path: Path) -> None:
    stale = shutil.copytree(made, tmp_path / "stale")
    index = json.loads((stale / INDEX).read_text())["weight_map"]
    write_json(stale / INDEX, {"weight_map": dict.fromkeys(index, TEXT[0])})
    with serve(stale) as hub:
        done = call(tmp_path / "home", code_for("main"), hub.url)
    assert done.stdout.split()[2] == fingerprint(made), done.stderr
    assert hub.sent[TEXT[0]] == (made / TEXT[0]).stat().st_size
    assert hub.sent[TEXT[1]] <= 100_001  # the client asks for that many bytes of a header
    assert hub.sent[TOWER] >= (made / TOWER).stat().st_size


def test_a_model_in_one_file_of_any_name_is_found(made: Path, tmp_path: Path) -> None:
    single = shutil.copytree(made, tmp_path / "single")
    save_files(single, {"weights.safetensors": load_weights(made)}, index=False)
    with serve(single) as hub:
        done = call(tmp_path / "home", code_for("main"), hub.url)
    assert done.stdout.split()[2] == fingerprint(made), done.stderr


def test_an_unknown_revision_is_a_clear_error(made: Path, tmp_path: Path) -> None:
    with serve(made) as hub:
        done = call(tmp_path, code_for("v9"), hub.url)
    assert "CheckpointError: can't fetch `acme/reader` from the hub: " in done.stderr
    assert hub.sent == {}


# ---------------------------------------------------------------- offline


def in_hub_cache(made: Path, home: Path, *leave_out: str) -> None:
    """Lay a checkpoint out as the hub's client keeps it."""
    root = home / "hub" / "models--acme--reader"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    ignored = shutil.ignore_patterns(*leave_out)
    shutil.copytree(made, root / "snapshots" / COMMIT, ignore=ignored)


def test_a_missing_shard_of_a_hub_model_is_named_offline(made: Path, tmp_path: Path) -> None:
    in_hub_cache(made, tmp_path, "*.safetensors")
    show = (
        "from pipeline.errors import CheckpointError\n"
        "try: tower_fingerprint((m := resolve_model('acme/reader')), family_of(m))\n"
        "except CheckpointError as error: print(error.message); print(error.hint)"
    )
    done = call(tmp_path, show, HF_HUB_OFFLINE="1")
    message, hint = done.stdout.splitlines()
    assert message.startswith(f"can't fetch {TOWER} of `acme/reader`: ")
    assert hint == "unset HF_HUB_OFFLINE, or give the directory of a downloaded model"


def test_an_unknown_hub_model_is_a_clear_error_offline(tmp_path: Path) -> None:
    done = call(tmp_path, code_for(None), HF_HUB_OFFLINE="1")
    assert "CheckpointError: can't fetch `acme/reader` from the hub: " in done.stderr


def test_the_identity_of_a_hub_model_is_its_commit_not_what_is_fetched(
    made: Path, tmp_path: Path
) -> None:
    seen = set()
    for home, leave_out in (("all", ()), ("some", NOT_NEEDED)):
        in_hub_cache(made, tmp_path / home, *leave_out)
        done = call(tmp_path / home, code_for(None), HF_HUB_OFFLINE="1")
        assert done.stdout.split()[:3] == ["acme/reader", COMMIT, fingerprint(made)], done.stderr
        seen.add(done.stdout.split()[3])
    assert len(seen) == 1 and seen != {model_identity(resolve_model(str(made)))}
