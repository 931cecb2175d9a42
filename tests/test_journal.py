"""The run directory: one line per custom_id, whatever was cut off when."""

import errno
import json
import os
from pathlib import Path

import pytest

from pipeline.errors import Failure, LockedError, PipelineError, Reason, Stage
from pipeline.journal import open_run_directory, write_atomically


def answer(custom_id: str, identity: str = "i1", attempts: int = 1) -> dict:
    return {
        "custom_id": custom_id,
        "response": {"status_code": 200},
        "pipeline": {"identity": identity, "attempts": attempts},
    }


def results(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "results.jsonl").read_bytes().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with open_run_directory(tmp_path / "x.run") as directory:
        for custom_id in ("a", "b"):
            directory.note("started", custom_id, "i1", 1)
            directory.finish(answer(custom_id))
        directory.note("started", "c", "i1", 1)
    return tmp_path / "x.run"


def test_finished_answers_are_found_again(run: Path) -> None:
    with open_run_directory(run) as directory:
        assert directory.is_done("a", "i1") and directory.is_done("b", "i1")
        assert not directory.is_done("a", "other") and not directory.is_done("c", "i1")
        assert directory.attempts_of("c", "i1") == 1


def test_every_cut_of_results_keeps_whole_lines_and_reruns_torn_ones(run: Path) -> None:
    path = run / "results.jsonl"
    whole = path.read_bytes()
    first_line = len(whole.splitlines(keepends=True)[0])
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with open_run_directory(run) as directory:
            # a line without its newline is whole all the same
            assert directory.is_done("a", "i1") == (cut >= first_line - 1)
            assert directory.is_done("b", "i1") == (cut >= len(whole) - 1)
            if not directory.is_done("b", "i1"):
                directory.finish(answer("b"))
            if not directory.is_done("a", "i1"):
                directory.finish(answer("a"))
        assert sorted(each["custom_id"] for each in results(run)) == ["a", "b"]


def test_a_torn_journal_line_is_ignored_and_the_next_event_starts_a_line(run: Path) -> None:
    journal = run / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + '{"event": "done", "custom_id": "ü'.encode()[:-1])
    with open_run_directory(run) as directory:
        directory.finish(answer("c"))
    with open_run_directory(run) as directory:
        assert directory.is_done("c", "i1") and directory.is_done("a", "i1")


def test_an_answer_whose_event_was_lost_counts(run: Path) -> None:
    lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"done"' not in line]
    (run / "journal.jsonl").write_bytes(b"".join(kept))
    with open_run_directory(run) as directory:
        assert directory.is_done("a", "i1")
    with open_run_directory(run) as directory:
        assert directory.is_done("b", "i1"), "and is in the journal from then on"


def test_an_event_whose_answer_was_lost_does_not_count(run: Path) -> None:
    (run / "results.jsonl").unlink()
    with open_run_directory(run) as directory:
        assert not directory.is_done("a", "i1")


def test_a_changed_request_moves_its_old_answer_aside(run: Path) -> None:
    with open_run_directory(run) as directory:
        directory.supersede({"a": "i2", "b": "i1"})
        assert not directory.is_done("a", "i2") and directory.is_done("b", "i1")
        directory.finish(answer("a", "i2"))
    assert [(r["custom_id"], r["pipeline"]["identity"]) for r in results(run)] == [
        ("b", "i1"),
        ("a", "i2"),
    ]
    aside = (run / "attempts" / "superseded.jsonl").read_text()
    assert json.loads(aside)["pipeline"]["identity"] == "i1"


def test_errors_hold_only_what_is_failed_now(run: Path) -> None:
    failure = Failure("f.png", 1, Stage.ENGINE, Reason.REJECTED, "too long", custom_id="c")
    with open_run_directory(run) as directory:
        directory.fail(failure, "i1")
        directory.write_errors([failure])
    assert [json.loads(line)["custom_id"] for line in (run / "errors.jsonl").open()] == ["c"]
    with open_run_directory(run) as directory:
        directory.write_errors([])
    assert (run / "errors.jsonl").read_bytes() == b""


def test_a_failed_page_does_not_undo_the_answer_it_once_gave(run: Path) -> None:
    with open_run_directory(run) as directory:
        gone = Failure("a.png", 1, Stage.READ, Reason.NOT_FOUND, "gone", custom_id="a")
        directory.fail(gone, None)
    with open_run_directory(run) as directory:
        assert directory.is_done("a", "i1")


def test_a_second_run_is_told_who_holds_the_lock(run: Path) -> None:
    with (
        open_run_directory(run),
        pytest.raises(LockedError, match="in use by process"),
        open_run_directory(run),
    ):
        pass


def test_a_replaced_file_is_whole_or_old(tmp_path: Path) -> None:
    target = tmp_path / "errors.jsonl"
    write_atomically(target, [b"old\n"])

    def failing():
        yield b"half"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(target, failing())
    assert target.read_bytes() == b"old\n"


OTHERS_EVENTS = [
    b'{"event": "started", "custom_id": "b", "identity": "i1"}',
    b'{"custom_id": "b", "identity": "i1", "attempt": 3}',
    b'{"event": "started", "custom_id": "b", "identity": "i1", "attempt": "x"}',
    b"[" * 100_000,
    b"\xff\x00",
]


@pytest.mark.parametrize("event", OTHERS_EVENTS, ids=range(len(OTHERS_EVENTS)))
def test_an_event_that_is_not_whole_is_passed_over(run: Path, event: bytes) -> None:
    with (run / "journal.jsonl").open("ab") as file:
        file.write(event + b"\n")
    with open_run_directory(run) as directory:
        assert directory.is_done("b", "i1") and directory.attempts_of("b", "i1") == 1


def test_a_result_without_its_attempts_is_not_ours(run: Path) -> None:
    with (run / "results.jsonl").open("ab") as file:
        file.write(b'{"custom_id": "z", "pipeline": {"identity": "i1"}}\n')
    with open_run_directory(run) as directory:
        assert not directory.is_done("z", "i1")


@pytest.mark.parametrize("name", ["journal.jsonl", "results.jsonl", "lock", "attempts"])
def test_a_file_of_the_wrong_kind_is_an_error_with_its_name(tmp_path: Path, name: str) -> None:
    run = tmp_path / "x.run"
    run.mkdir()
    if name == "attempts":
        (run / name).write_text("")
    else:
        (run / name).mkdir()
    with pytest.raises(PipelineError, match=f"can't write `{run / name}`"), open_run_directory(run):
        pass


@pytest.mark.parametrize("act", ["note", "flush", "finish", "write_errors", "supersede"])
def test_a_full_disk_is_an_error_with_the_path_and_keeps_the_lock_free(
    run: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    arguments: dict[str, tuple] = {
        "note": ("queued", "c", "i1" * 10_000, 1),
        "finish": (answer("c"),),
        "write_errors": ([],),
        "supersede": ({"a": "i2"},),
    }
    with (
        pytest.raises(PipelineError, match=f"can't write `{run}/.*: No space left on device"),
        open_run_directory(run) as directory,
    ):
        if act == "note":
            directory._journal.close()
            directory._journal = open("/dev/full", "ab")  # noqa: SIM115
        else:
            monkeypatch.setattr(os, "fsync", full)
        getattr(directory, act)(*arguments.get(act, ()))
    monkeypatch.undo()
    with open_run_directory(run) as directory:
        assert directory.is_done("b", "i1")


def test_ten_thousand_bad_lines_do_not_wait_for_the_disk_each(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with open_run_directory(run) as directory:
        before = len(synced)
        for number in range(10_000):
            directory.fail(
                Failure("j", None, Stage.VALIDATE, Reason.BAD_LINE, custom_id=str(number)), None
            )
        directory.flush()
        assert len(synced) == before + 1
    assert (run / "journal.jsonl").read_bytes().count(b'"failed"') == 10_000


def test_a_name_of_any_bytes_leaves_every_line_valid(run: Path) -> None:
    failure = Failure("\udcff.png", 1, Stage.READ, Reason.NOT_FOUND, "gone", custom_id="c")
    with open_run_directory(run) as directory:
        directory.fail(failure, None)
        directory.write_errors([failure])
    for name in ("journal.jsonl", "errors.jsonl"):
        lines = (run / name).read_text(encoding="utf-8").splitlines()
        assert json.loads(lines[-1])["file"] == "\udcff.png"
