"""Every public header compiles alone, as C++17 and without a warning.

Usage: headers_test.py INCLUDE_FOLDER COMPILER ARGUMENT...
"""
import concurrent.futures
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402


def compile_alone(header, include_folder, compiler):
    # Twice, so that a missing include guard shows.
    source = f"#include <{header}>\n#include <{header}>\n"
    command = [*compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror",
               "-I", str(include_folder), "-x", "c++", "-"]
    return subprocess.run(command, input=source, text=True, capture_output=True, check=False)


def main(include_folder, compiler):
    headers = sorted(path.relative_to(include_folder).as_posix() for path in include_folder.rglob("*.h"))
    tap = Tap()
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = pool.map(lambda header: compile_alone(header, include_folder, compiler), headers)
        for header, result in zip(headers, results):
            tap.case(header, [result.stderr] if result.returncode else [])
    tap.case("there are public headers", [] if headers else [f"none under {include_folder}"])
    tap.finish()


main(pathlib.Path(sys.argv[1]), sys.argv[2:])
