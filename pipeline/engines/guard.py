"""No engine outlives its driver, and no engine is left behind by a dead one.

Three nets, since each has a hole. The child leads a process group and watches a pipe from the
driver: at end-of-file it kills the group. vLLM's processes in that group ask the kernel to die
with their parent, for the case that the child is killed as well. Process ids with start times
stand in the run directory; the next run ends what still lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.parent import die_with_parent

LIVENESS_ENV = "PIPELINE_LIVENESS_FD"
CORES_ENV = "PIPELINE_CORES"  # of one engine among several, on CPU


def kill_group_at_end_of(file_descriptor: int) -> None:
    """Watch a pipe in a thread; at end-of-file SIGKILL this process group, engine included."""

    def watch() -> None:
        while os.read(file_descriptor, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="liveness", daemon=True).start()


def lead_group() -> None:
    """First thing in the child: keep to its cores, watch the driver's pipe.

    The child itself does not ask for the parent-death signal: it would be gone before it could
    kill its group.
    """
    if cores := os.environ.pop(CORES_ENV, ""):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    descriptor = os.environ.pop(LIVENESS_ENV, None)
    if descriptor is not None:
        assert os.getpgrp() == os.getpid(), "the child must lead its own process group"
        kill_group_at_end_of(int(descriptor))


def die_with_leader() -> None:
    """In the other processes of the group: die with the parent, or now if the leader is gone."""
    leader = os.getpgrp()
    if leader == os.getpid():
        return
    die_with_parent()
    if _stat_fields(leader) is None:
        os.kill(os.getpid(), signal.SIGKILL)


# -- the next run's net ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process id that can't be mistaken for a later process with the same number."""

    pid: int
    start_ticks: int


def group_members(group: int) -> list[ProcessId]:
    """All live processes of a process group, from /proc."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat_fields(int(entry.name))
        if fields is not None and fields[2] == str(group) and fields[0] != "Z":
            members.append(ProcessId(int(entry.name), int(fields[19])))
    return members


def record_group(path: Path, group: int) -> None:
    """Write the members of the group, for `end_leftovers` of a later run."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps([asdict(member) for member in group_members(group)]))
    os.replace(temporary, path)


def end_leftovers(path: Path) -> int:
    """SIGKILL recorded processes that still live; returns how many there were."""
    try:
        recorded = [ProcessId(**record) for record in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        return 0
    ended = 0
    for process in recorded:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                ended += 1
    path.unlink(missing_ok=True)
    return ended


def is_alive(process: ProcessId) -> bool:
    """True if the very process lives; False for a zombie or for another with its number."""
    fields = _stat_fields(process.pid)
    return fields is not None and int(fields[19]) == process.start_ticks and fields[0] != "Z"


def kill_group(group: int) -> None:
    """SIGKILL a whole process group, whatever is left of it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on; proc(5). None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the command name, in parentheses, may hold anything
    return text.rpartition(")")[2].split()
