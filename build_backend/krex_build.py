"""The build backend of krex: maturin, plus the native program.

maturin builds one Cargo target per wheel. krex ships two: the extension
``krex._krex`` and the program ``krex``. The hooks here build the program first,
lay it where maturin looks for the wheel's scripts (``[tool.maturin] data``), and
leave everything else to maturin.

Environment:

``KREX_BUILD_FEATURES``
    Cargo features for both artefacts, separated by commas or blanks
    (``test-hooks`` in test builds).
``KREX_BUILD_GLIBC``
    Such as ``2.17``: link both artefacts against that version of glibc and tag the
    wheel with the manylinux platform of the same number. Needs ziglang and
    cargo-zigbuild. Unset: the host's linker and glibc, and the tag ``linux_ARCH``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import maturin

Settings = Mapping[str, Any] | None

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "build" / "wheel-data"
FEATURES = os.environ.get("KREX_BUILD_FEATURES", "").replace(",", " ").split()
GLIBC = os.environ.get("KREX_BUILD_GLIBC", "")

# Whatever maturin is asked, it wants the directory to be there.
(DATA / "scripts").mkdir(parents=True, exist_ok=True)


def _host() -> str:
    """Return the target triple that cargo builds for when it is told none."""
    return subprocess.run(
        ["rustc", "--print", "host-tuple"], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()


def _maturin_settings(settings: Settings) -> dict[str, Any]:
    """Return what the frontend said, with this build's arguments for maturin added."""
    args = maturin.get_maturin_pep517_args(settings)
    if FEATURES:
        args = [*args, "--features", ",".join(FEATURES)]
    if GLIBC:
        tag = "manylinux_" + GLIBC.replace(".", "_")
        args = [*args, "--zig", "--target", _host(), "--compatibility", tag]
    return {**(settings or {}), "maturin.build-args": args}


def _build_program() -> Path:
    """Build the native program with cargo and return the path of the executable."""
    command = ["cargo", "build", "--release", "--locked", "-p", "krex-supervisor"]
    if GLIBC:
        command[1] = "zigbuild"
        command += ["--target", f"{_host()}.{GLIBC}"]
    if FEATURES:
        command += ["--features", ",".join(FEATURES)]
    # cargo itself says where the program is: target directory and triple may have
    # been set from outside.
    command += ["--message-format", "json-render-diagnostics"]
    try:
        built = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    except FileNotFoundError:
        sys.exit("krex: cargo was not found; building krex needs Rust (a wheel does not)")
    except subprocess.CalledProcessError as error:
        sys.exit(f"krex: {' '.join(command)} failed with status {error.returncode}")
    messages = map(json.loads, built.stdout.splitlines())
    programs = [Path(m["executable"]) for m in messages if m.get("executable")]
    (program,) = programs
    return program


@contextmanager
def _program_in_place() -> Iterator[None]:
    """Hold the data directory, with the program in it, for one run of maturin.

    Builds with other features may run in the same tree at the same time; the lock
    keeps each from packing the other's program.
    """
    program = _build_program()
    with open(DATA.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        in_place = Path(shutil.copy(program, DATA / "scripts" / "krex"))
        in_place.chmod(0o755)
        yield


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel with the extension and the program (PEP 517)."""
    settings = _maturin_settings(config_settings)
    with _program_in_place():
        name: str = maturin.build_wheel(wheel_directory, settings, metadata_directory)
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel that points at ``python/``, with the program (PEP 660)."""
    settings = _maturin_settings(config_settings)
    with _program_in_place():
        name: str = maturin.build_editable(wheel_directory, settings, metadata_directory)
    return name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Build a source distribution (PEP 517)."""
    name: str = maturin.build_sdist(sdist_directory, config_settings)
    return name


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Write the wheel's metadata without building anything (PEP 517)."""
    settings = _maturin_settings(config_settings)
    name: str = maturin.prepare_metadata_for_build_wheel(metadata_directory, settings)
    return name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel
