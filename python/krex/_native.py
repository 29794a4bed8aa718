"""Finding the native program `krex`, which launches commands, from Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

_ELF_MAGIC = b"\x7fELF"


class NativeProgramError(FileNotFoundError):
    """The native program `krex` is in none of the places where an installer puts it."""


def native_program() -> str:
    """Return the path of the native program `krex` that was installed with this package.

    Looked for beside the package (``pip install --target``), among the interpreter's scripts,
    among the user's scripts, and in the record of installed files, in this order. A file counts
    only if it is an executable ELF program: another project's script of that name does not.

    Raises:
        NativeProgramError: it is nowhere; the message has the command that installs it.
    """
    looked: list[str] = []
    for candidate in _candidates():
        if _is_native(candidate):
            return candidate
        if candidate not in looked:
            looked.append(candidate)
    raise NativeProgramError(
        f"the native program krex is not installed (looked for {', '.join(looked)}); "
        f"mend it with: {reinstall_command()}"
    )


def interposer() -> str | None:
    """Return the library that `krex run` loads into commands; None if it loads none.

    It is where the native program looks for it: see rust/krex-supervisor/src/preload.rs.
    """
    if os.environ.get("KREX_PRELOAD") == "0":
        return None
    scripts, _ = os.path.split(os.path.realpath(native_program()))
    for directory in (os.path.join(os.path.dirname(scripts), "lib", "krex"), scripts):
        path = os.path.join(directory, "libkrex_preload.so")
        if os.path.isfile(path):
            return path
    return None


def _candidates() -> Iterator[str]:
    package = os.path.dirname(os.path.abspath(__file__))
    yield os.path.join(os.path.dirname(package), "bin", "krex")

    import sysconfig

    yield os.path.join(sysconfig.get_path("scripts"), "krex")
    yield os.path.join(
        sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")), "krex"
    )

    from importlib import metadata

    try:
        files = metadata.files("krex") or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == "krex":
            yield os.path.abspath(str(file.locate()))


def _is_native(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            magic = file.read(len(_ELF_MAGIC))
    except OSError:
        return False
    return magic == _ELF_MAGIC and os.access(path, os.X_OK)


def reinstall_command() -> str:
    """Return the command that installs this very copy of krex again.

    The package index's `krex` is another project, so the command names the checkout or wheel that
    krex was installed from, as recorded by the installer, or else the current directory.
    """
    import shlex

    interpreter = shlex.quote(sys.executable or "python3")
    return f"{interpreter} -m pip install --force-reinstall {shlex.quote(_origin() or '.')}"


def _origin() -> str | None:
    import json
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    try:
        record = metadata.distribution("krex").read_text("direct_url.json")
        url = urlsplit(json.loads(record)["url"]) if record else None
    except (metadata.PackageNotFoundError, KeyError, TypeError, ValueError):
        return None
    return unquote(url.path) if url is not None and url.scheme == "file" else None
