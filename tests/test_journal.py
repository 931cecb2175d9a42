"""The run directory: one line per custom_id, whatever was cut off when."""

import json
from pathlib import Path

import pytest

from pipeline.errors import Failure, LockedError, Reason, Stage
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
