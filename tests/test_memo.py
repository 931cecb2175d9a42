"""The memo: right while a file is as it was, silent when anything is wrong with it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import memo as memo_module
from pipeline.errors import UsageError
from pipeline.memo import Memo, is_settled, memo_path, state_of


def noted(path: Path, *facts: tuple[str, str, str, object]) -> None:
    with Memo(path) as memo:
        for fact in facts:
            memo.note(*fact)


def recalled(path: Path, subject: str, name: str, state: str) -> object:
    with Memo(path) as memo:
        return memo.recall(subject, name, state)


def test_a_fact_holds_for_its_subject_path_and_state(tmp_path: Path) -> None:
    memo = tmp_path / "below" / "memo.sqlite"
    noted(memo, ("digest", "/a", "1", ["x", 2]), ("digest", "/b", "1", {"y": None}))
    assert recalled(memo, "digest", "/a", "1") == ["x", 2]
    assert recalled(memo, "digest", "/b", "1") == {"y": None}
    for subject, name, state in (("page", "/a", "1"), ("digest", "/c", "1"), ("digest", "/a", "2")):
        assert recalled(memo, subject, name, state) is None
    noted(memo, ("digest", "/a", "2", "new"))
    assert recalled(memo, "digest", "/a", "2") == "new"
    assert recalled(memo, "digest", "/a", "1") is None


def test_many_facts_come_back_in_order(tmp_path: Path) -> None:
    names = [f"/{number}" for number in range(5000)]
    noted(tmp_path / "memo", *(("n", name, "s", name) for name in names[::2]))
    with Memo(tmp_path / "memo") as memo:
        found = list(memo.recall_all("n", [(name, "s") for name in names]))
    assert found == [name if number % 2 == 0 else None for number, name in enumerate(names)]


@pytest.mark.parametrize("name", ["/é", "/\udce9", "/a\nb", "/'\""])
def test_any_name_can_be_remembered(tmp_path: Path, name: str) -> None:
    noted(tmp_path / "memo", ("n", name, "s", 1), ("n", "/other", "s", 2))
    assert recalled(tmp_path / "memo", "n", name, "s") == 1
    assert recalled(tmp_path / "memo", "n", "/other", "s") == 2


def test_one_that_is_distrusted_says_nothing_and_is_renewed(tmp_path: Path) -> None:
    noted(tmp_path / "memo", ("n", "/a", "s", 1))
    with Memo(tmp_path / "memo", distrust=True) as memo:
        assert memo.recall("n", "/a", "s") is None
        memo.note("n", "/a", "s", 2)
    assert recalled(tmp_path / "memo", "n", "/a", "s") == 2


def test_without_a_place_nothing_is_remembered(tmp_path: Path) -> None:
    with Memo(None) as memo:
        memo.note("n", "/a", "s", 1)
        assert memo.recall("n", "/a", "s") is None
    assert recalled(tmp_path / "absent", "n", "/a", "s") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 100, 2000])
def test_a_damaged_file_is_begun_anew(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "memo"
    noted(path, ("n", "/a", "s", 0))
    path.write_bytes(path.read_bytes()[:kept] + b"\xff" * 5000 * bool(kept))
    assert recalled(path, "n", "/a", "s") is None
    noted(path, ("n", "/a", "s", 1))
    noted(path, ("n", "/a", "s", 1))
    assert recalled(path, "n", "/a", "s") == 1


def test_every_flipped_byte_gives_the_fact_or_none(tmp_path: Path) -> None:
    path = tmp_path / "memo"
    noted(path, *(("n", f"/{number}", f"{number}", number) for number in range(50)))
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with Memo(path) as memo:
            memo.recall("n", "/7", "7")  # must not raise


def of_another_program(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.executescript("CREATE TABLE facts (a); INSERT INTO facts VALUES (7);")
    database.close()


def of_nobody(path: Path) -> None:
    path.write_text("no database, just text" * 100)


@pytest.mark.parametrize("make", [of_another_program, of_nobody])
def test_a_file_of_another_program_is_refused_and_never_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "named"
    make(path)
    content = path.read_bytes()
    monkeypatch.setattr(memo_module, "_MAX_BYTES", 10)  # nor for its size
    noted(path, ("n", "/a", "s", 1))
    assert recalled(path, "n", "/a", "s") is None
    assert path.read_bytes() == content
    monkeypatch.setenv("PIPELINE_MEMO", str(path))
    with pytest.raises(UsageError, match="is no memo of this program"):
        memo_path()


def test_a_damaged_one_at_its_own_place_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_MEMO")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = memo_path()
    assert path is not None
    path.parent.mkdir()
    of_nobody(path)
    assert memo_path() == path and not path.exists()


def test_another_version_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "memo"
    noted(path, ("n", "/a", "s", 0))
    with sqlite3.connect(path) as database:
        database.executescript("DROP TABLE facts; CREATE TABLE facts (a); PRAGMA user_version = 9;")
    database.close()
    assert recalled(path, "n", "/a", "s") is None
    noted(path, ("n", "/a", "s", 1))
    assert recalled(path, "n", "/a", "s") == 1


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    noted(tmp_path / "file" / "memo", ("n", "/a", "s", 1))
    assert recalled(tmp_path / "file" / "memo", "n", "/a", "s") is None
    (tmp_path / "directory").mkdir()
    noted(tmp_path / "directory", ("n", "/a", "s", 1))


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pipeline.memo import Memo\n"
        "with Memo(Path(sys.argv[1])) as memo:\n"
        "    for number in range(3000): memo.note(sys.argv[2], f'/{number}', 's', number)\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "memo")]
    running = [subprocess.Popen([*words, str(n)]) for n in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    with Memo(tmp_path / "memo") as memo:
        for n in range(3):
            assert memo.recall(str(n), "/2999", "s") == 2999


def test_who_finds_no_table_takes_away_none_made_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memo"

    def made_meanwhile(database: sqlite3.Connection) -> int:
        monkeypatch.undo()
        found = version(database)
        with Memo(path) as other:
            other.note("n", "/a", "s", 1)
        return found

    version = memo_module._version
    monkeypatch.setattr(memo_module, "_version", made_meanwhile)
    with Memo(path) as late:
        late.note("n", "/b", "s", 2)
    with Memo(path) as memo:
        assert list(memo.recall_all("n", [("/a", "s"), ("/b", "s")])) == [1, 2]


def test_it_may_be_used_by_another_thread(tmp_path: Path) -> None:
    with Memo(tmp_path / "memo") as memo:
        memo.note("n", "/a", "s", 1)
        memo.flush()
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(memo.recall("n", "/a", "s")))
        thread.start()
        thread.join()
    assert found == [1]


def test_a_file_just_changed_is_not_settled(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    found = path.stat()
    assert not is_settled(found)
    assert is_settled(found, found.st_ctime_ns + 3_000_000_000)
    os.utime(path, ns=(0, 0))  # an old time stamp hides nothing: ctime tells
    assert not is_settled(path.stat())
    assert state_of(path.stat()) != state_of(found)


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIPELINE_MEMO", "")
    assert memo_path() is None
    monkeypatch.setenv("PIPELINE_MEMO", str(tmp_path / "m"))
    assert memo_path() == tmp_path / "m"
    monkeypatch.setenv("PIPELINE_MEMO", str(tmp_path))
    assert memo_path() == tmp_path / f"memo-{os.uname().nodename}.sqlite"
    monkeypatch.delenv("PIPELINE_MEMO")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = memo_path()
    assert found is not None and found.parent == tmp_path / "vlm-page-pipeline"
    assert os.uname().nodename in found.name
