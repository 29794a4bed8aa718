"""The directories of benches that run, and those that killed ones left behind.

Whoever made a directory holds a lock on a file in it for as long as it lives. So there is no need
to trust numbers of processes, which are given to others in time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "krex-bench-"
_OWNER = "owner"
# For what runs there to be taken out; something that hangs in the kernel may never be.
_PURGE_LIMIT_S = 10.0


class Directory:
    """A directory for runtime directories and locks that are nobody else's.

    In shared memory if there is some, since a segment on a disk is written back to it.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_parent()))
        # It gets its name when it is locked already: one that is not is of nobody.
        made = self.path / f"{_OWNER}.new"
        self._lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.rename(self.path / _OWNER)

    def remove(self, krex: str) -> None:
        """Take krex (the native program is `krex`) out of what is in it, and remove it."""
        _remove(self.path, krex)
        os.close(self._lock)


def abandoned() -> list[Path]:
    """Return this user's directories whose makers were killed."""
    found = []
    for path in sorted(Path(_parent()).glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError), _taken(path) as is_taken:
            if is_taken:
                found.append(path)
    return found


def remove_abandoned(krex: str) -> None:
    """Remove them."""
    for path in abandoned():
        with contextlib.suppress(OSError), _taken(path) as is_taken:
            if is_taken:
                _remove(path, krex)


@contextlib.contextmanager
def _taken(path: Path) -> Iterator[bool]:
    """Take the place of the one who made it, if that is gone."""
    status = os.lstat(path)
    if status.st_uid != os.geteuid():
        yield False
        return
    lock = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def _remove(path: Path, krex: str) -> None:
    for inner in path.iterdir():
        if inner.name == _OWNER:
            continue  # the last, by which what is left would be found
        if (inner / "segment").exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [krex, "recover", "--purge"],
                    env=os.environ | {"KREX_RUNTIME_DIR": str(inner)},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=False,
                    start_new_session=True,
                    timeout=_PURGE_LIMIT_S,
                )
        if inner.is_dir():
            shutil.rmtree(inner, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def _parent() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
