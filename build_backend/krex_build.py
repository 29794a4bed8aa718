"""The build backend of krex: maturin, plus the native program.

maturin builds one Cargo target per wheel. krex ships three: the extension
``krex._krex``, the program ``krex``, and the library ``libkrex_preload.so`` that
``krex run`` loads into commands. The hooks here build the latter two first, lay
them where maturin looks for the wheel's scripts and data (``[tool.maturin]
data``), and leave everything else to maturin. Installed, they are ``bin/krex`` and
``lib/krex/libkrex_preload.so`` below one prefix, so that each finds the other.

Environment:

``KREX_BUILD_FEATURES``
    Cargo features for all of them, separated by commas or blanks
    (``test-hooks`` in test builds).
``KREX_BUILD_GLIBC``
    Such as ``2.17``: link all of them against that version of glibc and tag the
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
(DATA / "data" / "lib" / "krex").mkdir(parents=True, exist_ok=True)

# Where each goes in the wheel: by the kind and the name of the Cargo target.
PLACES = {
    ("bin", "krex"): DATA / "scripts" / "krex",
    ("cdylib", "krex_preload"): DATA / "data" / "lib" / "krex" / "libkrex_preload.so",
}


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


def _build() -> dict[Path, Path]:
    """Build the program and the library with cargo; returns where each is, and is to go."""
    command = ["cargo", "build", "--release", "--locked", "-p", "krex-supervisor"]
    command += ["-p", "krex-preload"]
    if GLIBC:
        command[1] = "zigbuild"
        command += ["--target", f"{_host()}.{GLIBC}"]
    if FEATURES:
        command += ["--features", ",".join(FEATURES)]
    # cargo itself says where the files are: target directory and triple may have been
    # set from outside.
    command += ["--message-format", "json-render-diagnostics"]
    try:
        built = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    except FileNotFoundError:
        sys.exit("krex: cargo was not found; building krex needs Rust (a wheel does not)")
    except subprocess.CalledProcessError as error:
        sys.exit(f"krex: {' '.join(command)} failed with status {error.returncode}")
    found = {}
    for message in map(json.loads, built.stdout.splitlines()):
        target = message.get("target", {})
        for kind in target.get("kind", ()):
            if (kind, target["name"]) in PLACES:
                (file,) = (it for it in message["filenames"] if Path(it).suffix in ("", ".so"))
                found[Path(file)] = PLACES[kind, target["name"]]
    if len(found) != len(PLACES):
        sys.exit(f"krex: {' '.join(command)} built {sorted(map(str, found))} only")
    return found


@contextmanager
def _files_in_place() -> Iterator[None]:
    """Hold the data directory, with what was built in it, for one run of maturin.

    Builds with other features may run in the same tree at the same time; the lock
    keeps each from packing the other's files.
    """
    built = _build()
    with open(DATA.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for file, place in built.items():
            shutil.copy(file, place)
            place.chmod(0o755)
        yield


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel with the extension, the program and the library (PEP 517)."""
    settings = _maturin_settings(config_settings)
    with _files_in_place():
        name: str = maturin.build_wheel(wheel_directory, settings, metadata_directory)
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel that points at ``python/``, with the program and the library (PEP 660)."""
    settings = _maturin_settings(config_settings)
    with _files_in_place():
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
