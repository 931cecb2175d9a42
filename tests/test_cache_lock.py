"""The cache's lock, the formats beside it, and the last use of an entry."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from makers_cache import DAY_S, TOWER, another_process, put

import pipeline.emit
import pipeline.run.line
from pipeline.config import EngineOptions
from pipeline.emit import EmitOptions, emit_job
from pipeline.errors import ExitCode, LockedError, StoreError
from pipeline.run import PageOptions, RunOptions, run_job
from pipeline.store import Store
from pipeline.store.formats import refuse_newer
from pipeline.store.hold import hold_alone, hold_shared, is_in_use


def test_any_number_may_use_the_cache_at_once(tmp_path: Path) -> None:
    with another_process(tmp_path), another_process(tmp_path), hold_shared(tmp_path):
        assert is_in_use(tmp_path)
    assert not is_in_use(tmp_path)


def test_nobody_is_alone_while_another_process_lives(tmp_path: Path) -> None:
    with another_process(tmp_path) as other:
        with pytest.raises(LockedError) as error, hold_alone(tmp_path):
            pass
        assert error.value.message == f"the cache `{tmp_path}` is in use by process {other.pid}"
        assert error.value.exit_code is ExitCode.LOCKED
    with hold_alone(tmp_path):
        pass


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    with another_process(tmp_path) as other:
        other.kill()
        other.wait()
        with hold_alone(tmp_path):
            pass


def test_two_are_never_alone(tmp_path: Path) -> None:
    with (
        another_process(tmp_path, "hold_alone"),
        pytest.raises(LockedError),
        hold_alone(tmp_path),
    ):
        pass


def test_a_user_waits_for_the_one_that_is_alone_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    entered = threading.Event()

    def use() -> None:
        with hold_shared(tmp_path, say=said.append):
            entered.set()

    with another_process(tmp_path, "hold_alone") as other:
        thread = threading.Thread(target=use)
        thread.start()
        assert not entered.wait(1.0)
        assert said == [
            f"waiting for process {other.pid} to end its work on the cache `{tmp_path}`"
        ]
    thread.join(30)
    assert entered.is_set()


def test_a_cache_that_is_not_there_yet_is_made(tmp_path: Path) -> None:
    with hold_shared(tmp_path / "a" / "cache"):
        assert (tmp_path / "a" / "cache" / "lock").is_file()
    assert not is_in_use(tmp_path / "none")


def test_a_cache_that_is_a_file_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StoreError) as error, hold_shared(tmp_path / "cache"):
        pass
    assert "a file stands where a directory should be" in error.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_can_only_be_read_is_used_all_the_same(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with hold_shared(tmp_path):
        pass


def test_a_file_system_without_locks_is_used_with_a_word_and_never_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    said: list[str] = []
    with hold_shared(tmp_path, say=said.append):
        assert is_in_use(tmp_path)
    assert said == [
        f"the file system of `{tmp_path}` has no locks: `gc` and `repair` will refuse to work on it"
    ]
    with pytest.raises(StoreError, match="can't lock"), hold_alone(tmp_path):
        pass


class Reached(Exception):
    pass


def test_a_run_and_an_emission_hold_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, cache = tmp_path / "job.jsonl", tmp_path / "cache"
    job.write_text("")

    def survey(source: object) -> None:
        with pytest.raises(LockedError), hold_alone(cache):
            pass
        raise Reached

    monkeypatch.setattr(pipeline.run.line, "survey_job", survey)
    monkeypatch.setattr(pipeline.emit, "survey_job", survey)
    pages = PageOptions(cache=cache)
    with pytest.raises(Reached):
        run_job(RunOptions(job=job, pages=pages, engine=EngineOptions()))
    with pytest.raises(Reached):
        emit_job(EmitOptions(job=job, pages=pages, out=tmp_path / "out"))
    assert not is_in_use(cache)


def test_reading_an_entry_leaves_no_thread(tmp_path: Path) -> None:
    """One of Arrow's that lives when the process ends aborts it now and then."""
    path = put(tmp_path, 1)
    code = (
        "import sys, pyarrow.parquet; from pathlib import Path; from pipeline.store import *\n"
        "def threads():\n"
        "    names = [path.read_text() for path in Path('/proc/self/task').glob('*/comm')]\n"
        "    return sum('jemalloc' not in name for name in names)\n"
        "store = Store(Path(sys.argv[1]), sys.argv[2]); before = threads()\n"
        "entry = store.get(sys.argv[3])\n"
        "assert isinstance(entry, Entry) and store.footer(sys.argv[3])\n"
        "Store(Path(sys.argv[1]) / 'other', sys.argv[2]).put(entry)\n"
        "assert threads() == before"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path, TOWER, path.stem], check=True)


# ---------------------------------------------------------------- formats


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v2").mkdir()
    for hold in (hold_shared, hold_alone):
        with pytest.raises(StoreError) as error, hold(tmp_path):
            pass
        assert error.value.message == (
            f"`{tmp_path}/v2` was written by a newer version of this program, which knows up to "
            "format 1"
        )
        assert "upgrade this program" in error.value.hint


def test_an_older_format_is_left_alone_with_a_word(tmp_path: Path) -> None:
    (tmp_path / "v0").mkdir()
    put(tmp_path, 1)
    said: list[str] = []
    with hold_shared(tmp_path, say=said.append):
        pass
    (message,) = said
    assert message.startswith(f"`{tmp_path}/v0` is of an older format and left alone")
    assert (tmp_path / "v0").is_dir()


def test_other_names_are_no_formats(tmp_path: Path) -> None:
    for name in ("v", "v1", "v2x", "xv2", "documents"):
        (tmp_path / name).mkdir()
    assert refuse_newer(tmp_path) == ()
    assert refuse_newer(tmp_path / "none") == ()


# ---------------------------------------------------------------- last use


@pytest.mark.parametrize("read", ["get", "footer", "has"])
@pytest.mark.parametrize(("age_days", "touched"), [(3, True), (0.5, False)])
def test_reading_touches_an_entry_at_most_daily(
    tmp_path: Path, read: str, age_days: float, touched: bool
) -> None:
    path = put(tmp_path, 1, age_days=age_days, now_s=time.time())
    before = path.stat().st_mtime
    assert getattr(Store(tmp_path, TOWER), read)(path.stem)
    after = path.stat().st_mtime
    assert (after > before) is touched
    if touched:
        assert time.time() - after < DAY_S / 2


def test_a_bad_entry_is_not_used(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    os.utime(path, (1, 1))
    store = Store(tmp_path, TOWER)
    store.get(path.stem)
    assert store.footer(path.stem) is None
    assert path.stat().st_mtime == 1


def test_verify_touches_nothing(tmp_path: Path) -> None:
    path = put(tmp_path, 1, age_days=9, now_s=time.time())
    before = path.stat().st_mtime_ns
    assert Store(tmp_path, TOWER).verify() == []
    assert path.stat().st_mtime_ns == before
