"""List the functions of a cuda.h that cuda.table does not class yet, with their prototypes.

    python rust/krex-driver/new_functions.py [DIRECTORY]

DIRECTORY holds cuda.h and cudaTypedefs.h; without it, those of the package
nvidia-cuda-runtime that this Python has are used. Needs a C compiler.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

TABLE = Path(__file__).with_name("cuda.table")
PROTOTYPE = re.compile(r"\b(?:CUresult|const char \*)\s*(cu[A-Z]\w*)\s*\(([^;{}()]*)\)\s*;")
TYPEDEF = re.compile(r"\*\s*PFN_(cu[A-Z]\w*?)_v(\d+)(_pt[sd][sz])?\)\s*\(")


def include() -> Path:
    """Return the directory of the installed header."""
    for directory in sys.path:
        for header in sorted(Path(directory or ".").glob("nvidia/*/include/cuda.h")):
            return header.parent
    sys.exit("no cuda.h: name its directory, or `pip install nvidia-cuda-runtime`")


def preprocess(directory: Path, header: str) -> str:
    """Return a header as the compiler sees it, with all versions of all functions."""
    arguments = ["-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", "-I", str(directory), "-x", "c", "-"]
    compiler = os.environ.get("CC", "cc")
    source = f"#include <{header}>\n"
    done = subprocess.run(
        [compiler, *arguments], input=source, text=True, stdout=subprocess.PIPE, check=True
    )
    return re.sub(r"__attribute__\s*\(\(.*?\)\)", "", done.stdout)


def parts(name: str) -> tuple[str, str]:
    """Return a function's name without its suffixes, and the suffix of the stream mode."""
    mode = re.search(r"_pt[sd][sz]$", name)
    bare = name[: mode.start()] if mode else name
    return re.sub(r"_v\d+$", "", bare), mode[0] if mode else ""


def main() -> None:
    """Print the lines that are missing."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else include()
    known = set(re.findall(r"cu[A-Z]\w*", TABLE.read_text()))
    functions = dict(PROTOTYPE.findall(preprocess(directory, "cuda.h")))
    versions: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for name, version, mode in TYPEDEF.findall(preprocess(directory, "cudaTypedefs.h")):
        versions[name, mode].append(int(version))
    siblings: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(functions, key=lambda it: (len(it), it)):
        siblings[parts(name)].append(name)
    missing = sorted(set(functions) - known)
    for name in missing:
        # The newest function of a name has the newest version.
        place = siblings[parts(name)][::-1].index(name)
        known_versions = sorted(versions[parts(name)], reverse=True)
        since = [str(it) for it in known_versions[place : place + 1]] or ["?"]
        parameters = re.sub(r"\s*\*\s*", "* ", " ".join(functions[name].split()))
        print(f"{since[0]} {name}({parameters.replace('* *', '**').strip()})")
    print(f"{len(missing)} of {len(functions)} functions are not in {TABLE.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
