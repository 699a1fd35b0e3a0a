"""Calls that would freeze or borrow what they are given do not compile, and the message says what to pass.

Usage: refused_calls_test.py SOURCE INCLUDE_FOLDER COMPILER ARGUMENT...
"""
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402

MARK = re.compile(r"// refused: (.*)$")


def errors_by_line(source, output):
    """What the compiler says of each line of the source: errors there, and errors in templates that it instantiates."""
    place = re.compile(re.escape(str(source)) + r":(\d+):\d+:\s+(?:required from here|error:)")
    found = {}
    line = 0
    for text in output.splitlines():
        if at := place.match(text):
            line = int(at.group(1))
        if "error:" in text:
            found.setdefault(line, []).append(text.split("error:", 1)[1].strip())
    return found


def main(source, include_folder, compiler):
    # Nothing else may be found after the first error of a line: a message that is one of twenty is not read.
    command = [*compiler, "-std=c++17", "-fsyntax-only", "-fmax-errors=0", "-I", str(include_folder), str(source)]
    result = subprocess.run(command, text=True, capture_output=True, check=False, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"})
    errors = errors_by_line(source, result.stderr)
    tap = Tap()
    marked = {}
    for number, text in enumerate(source.read_text().splitlines(), 1):
        if mark := MARK.search(text):
            marked[number] = (text.split(";")[0].strip(), mark.group(1))
    for number, (call, expected) in marked.items():
        said = errors.get(number, [])
        ok = len(said) == 1 and expected in said[0]
        tap.case(f"line {number}: {call}", [] if ok else [f"expected one error with: {expected}", *said[:5]])
    elsewhere = [f"line {n}: {e}" for n, all_of in errors.items() if n not in marked for e in all_of]
    tap.case("everything else compiles", elsewhere[:10])
    tap.finish()


main(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]), sys.argv[3:])
