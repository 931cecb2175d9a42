"""What every command does alike: names on a terminal, errors of the system, closed streams."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import COMMAND
from PIL import Image

from pipeline.cli import main
from pipeline.cli.options import printable

NAMES = [
    ("Rechnung für 2 €.png", "Rechnung für 2 €.png"),
    ("two\nlines\r.png", "two\\nlines\\r.png"),
    ("\x1b[31mred.png", "\\x1b[31mred.png"),
    ("\udcff.png", "\\udcff.png"),
    ("\u202egnp.exe", "\\u202egnp.exe"),
]


@pytest.mark.parametrize(("name", "shown"), NAMES, ids=range(len(NAMES)))
def test_a_file_name_can_not_command_the_terminal(name: str, shown: str) -> None:
    assert printable(name) == shown


def test_an_error_of_the_system_is_one_line_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "/mnt/scans")

    monkeypatch.setattr("pipeline.cli.pages.list_pages", gone)
    result = CliRunner().invoke(main, ["pages", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.endswith("Error: `/mnt/scans`: Input/output error\n")


def test_closed_streams_take_no_file(tmp_path: Path) -> None:
    """Without the guard the first file opened is descriptor 1, and messages end in it."""
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    watched = (
        "import os, pipeline.cli.pages as command\n"
        "original = command.list_pages\n"
        "def watched(*given, **options):\n"
        "    assert all(os.readlink(f'/proc/self/fd/{n}') == os.devnull for n in range(3))\n"
        "    return original(*given, **options)\n"
        "command.list_pages = watched\n"
        "from pipeline.cli import main\n"
        "main()"
    )
    call = [COMMAND[0], "-c", watched, "pages", str(tmp_path)]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *call]
    assert subprocess.run(closed).returncode == 0


def test_a_reader_that_leaves_ends_the_command_quietly(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, "pages", str(tmp_path)], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert "Traceback" not in done.stderr and "Error" not in done.stderr
