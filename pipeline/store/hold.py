"""`cache/lock`: encoders and runs hold it shared, `gc --apply` and `repair` exclusively.

A flock(2): it ends with the process that holds it, however that dies, and is never stale. On
Linux it also works over NFS. The file itself is never removed, for whoever waits has it open.

Object stores have no locks: there, whoever deletes keeps off what is younger than a grace period.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import LockedError, StoreError
from pipeline.store.files import write_error
from pipeline.store.formats import refuse_newer
from pipeline.store.layout import LOCK
from pipeline.store.location import Location

GRACE_S = 48 * 3600

_POLL_S = 0.2
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def hold_shared(
    root: Location, *, say: Callable[[str], object] = lambda message: None
) -> Iterator[None]:
    """Use the cache: nothing in it is deleted meanwhile, in an object store nothing used of late.

    Waits while a `gc` or `repair` works, told once through `say`, as is an older format beside
    this one. Raises StoreError where the cache holds a newer format or can't be made.
    """
    for message in refuse_newer(root):
        say(message)
    descriptor = _open(root / LOCK) if isinstance(root, Path) else None
    if descriptor is None or not isinstance(root, Path):
        yield
        return
    try:
        _wait(descriptor, root, say)
        yield
    finally:
        os.close(descriptor)


def _wait(descriptor: int, root: Path, say: Callable[[str], object]) -> None:
    try:
        if _take(descriptor, fcntl.LOCK_SH):
            return
        say(f"waiting for {_holders(descriptor)} to end its work on the cache `{root}`")
        while not _take(descriptor, fcntl.LOCK_SH):
            time.sleep(_POLL_S)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        say(
            f"the file system of `{root}` has no locks: `gc` and `repair` will refuse to work on it"
        )


@contextmanager
def hold_alone(root: Location, grace_s: float = GRACE_S) -> Iterator[int]:
    """Delete or move what is in the cache; gives the time since when nobody else uses it.

    That time, in ns since the epoch, is by the file system's own clock, as mtimes are. Raises
    LockedError, naming the holders, while an encoder or a run is alive. In an object store it is
    `grace_s` ago: what is older is not being written, and was not used of late.
    """
    refuse_newer(root)
    if not isinstance(root, Path):
        yield int((time.time() - grace_s) * 1e9)
        return
    path = root / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise write_error(path, error) from error
    try:
        try:
            alone = _take(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            hint = "without locks, others that use it can't be kept out"
            raise StoreError(f"can't lock `{path}`: {error.strerror or error}", hint) from error
        if not alone:
            raise LockedError(
                f"the cache `{root}` is in use by {_holders(descriptor)}",
                "wait for the encoders and runs to end; a dead process never holds the lock",
            )
        os.utime(descriptor)
        yield os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def is_in_use(root: Location) -> bool:
    """True while anyone holds the lock, shared or not, or may do so unseen in an object store."""
    if not isinstance(root, Path):
        return True
    try:
        descriptor = os.open(root / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _take(descriptor, fcntl.LOCK_EX)
    except OSError:  # NFS locks exclusively only what is open for writing
        return True
    finally:
        os.close(descriptor)


def _open(path: Path) -> int | None:
    """The lock file, made if needed; None in a cache that can't be written and has none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise write_error(path, error) from error
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a cache that is only read: nobody here could delete from it either
        return None


def _take(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holders(descriptor: int, locks: Path = Path("/proc/locks")) -> str:
    """The processes that hold the lock, as far as this machine knows them; see proc(5)."""
    inode = str(os.fstat(descriptor).st_ino)
    try:
        lines = [line.split() for line in locks.read_text().splitlines()]
    except OSError:
        lines = []
    found = {
        int(words[4])
        for words in lines
        if len(words) == 8 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode
    }
    pids = sorted(found - {0, -1})
    if not pids:
        return "another process"
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
