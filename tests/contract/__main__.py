"""Runs the cases without pytest."""

from __future__ import annotations

import argparse
import sys

from contract import CASES, run_case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", choices=["sim", "real"], default="real")
    parser.add_argument("names", nargs="*", help="parts of the names of cases; default: all")
    options = parser.parse_args()
    chosen = [it for it in CASES if not options.names or any(part in it for part in options.names)]
    failed = 0
    for case_name in chosen:
        try:
            if options.driver == "sim":
                import simgpu

                with simgpu.device() as gpu:
                    run_case(case_name, "sim", gpu.environment)
            else:
                run_case(case_name, "real", {})
            print("passed ", case_name, flush=True)
        except AssertionError as error:
            failed += 1
            print("FAILED ", case_name, flush=True)
            print("    " + str(error).strip().replace("\n", "\n    "), flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
