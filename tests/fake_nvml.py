"""A management library that says what a test wants: fake_nvml.c, and the file that tells it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")

#: What the driver for tests (rust/krex-simgpu) calls its devices.
SIMGPU_UUID = "GPU-6b726578-2d73-696d-6770-7500000000{index:02x}"


@dataclass(frozen=True)
class Call:
    """A line of its log."""

    function: str
    time: int
    """Nanoseconds of CLOCK_MONOTONIC."""
    pid: int


class FakeNvml:
    """The library, compiled into a directory of its own."""

    def __init__(self, directory: Path) -> None:
        library = directory / "libnvidia-ml.so.1"
        command = ["cc", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
        subprocess.run([*command, "-o", library, SOURCE], check=True)
        self.file = directory / "nvml"
        self.environment = {"KREX_FAKE_NVML": str(self.file), "LD_LIBRARY_PATH": str(directory)}

    def beside(self, environment: dict[str, str]) -> dict[str, str]:
        """The environment for both this library and another one's."""
        paths = [self.environment["LD_LIBRARY_PATH"], environment.get("LD_LIBRARY_PATH", "")]
        both = {**environment, **self.environment}
        return {**both, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}

    def say(self, *directives: str) -> None:
        """Say this from now on: see fake_nvml.c."""
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{it}\n" for it in directives))
        new.rename(self.file)

    def calls(self) -> list[Call]:
        """All calls so far."""
        log = Path(f"{self.file}.log")
        lines = log.read_text().splitlines() if log.exists() else []
        fields = [line.split() for line in lines]
        return [Call(function, int(time), int(pid)) for function, time, pid in fields]
