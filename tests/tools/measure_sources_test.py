"""The measures of docs/measurements.md, on a small tree whose values are known.

Usage: measure_sources_test.py MEASURE_SOURCES
"""
import importlib.util
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402

TREE = {
    "include/sidestream/face.h": "#pragma once\n",
    "src/sim/device/left_out.h": "#pragma once\n\n\n\n",
    "src/base/site.h": "#pragma once\nstruct NotInGraphs {\n};\n",
    "tests/one_test.cpp": "int a;\nint b;\n",
    "tests/one_test.py": "no = 'C++'\n",
    "graphs/meson.build": "\n",
    # First and second include each other: two levels. Third includes one of them.
    "graphs/low/first.h": "class Later;\nclass First {\n  struct Inner {\n  };\n};\n",
    "graphs/low/first.cpp": '#include "graphs/low/first.h"\n#include "graphs/low/second.h"\nstruct InASource {\n};\n',
    "graphs/low/second.h": '#include "graphs/low/first.h"\nenum class Second : int { a };\n',
    "graphs/low/third.h": '#include "graphs/low/second.h"\nclass [[nodiscard]] Third {\n};\n',
    "graphs/low/a_sequence.h": "class Sequence {\n  friend class Capture;\n  friend class Beside;\n  int member_;\n};\n",
    "graphs/low/beside.h": "class Beside {\n  int use() { return sequence_.member_; }\n};\n",
    "graphs/high/capture.h": '#include "graphs/low/third.h"\nclass Capture final {\n};\n',
    "graphs/high/capture.cpp": "int use() { return sequence_.member_ + sequence->member_ + sequence_.face(); }  // sequence_.member_\n",
}
EXPECTED = {
    "library (include, src without sim, graphs), lines": 30,
    "tests, lines": 2,
    "top-level types in graphs": 6,
    "uses of private members by a friend of another room": 2,
    "levels of includes inside a room of graphs": 3,
    "files in graphs": 9,
}


def main(script):
    spec = importlib.util.spec_from_file_location("measure_sources", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tap = Tap()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in TREE.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        found = module.measures(root)
        for name, value in EXPECTED.items():
            tap.case(name, [] if found[name][0] == value else [f"{found[name]} instead of {value}"])
    page = (pathlib.Path(script).resolve().parent.parent / "docs" / "measurements.md").read_text()
    tap.case("docs/measurements.md has a row for each", [f"no row {name}" for name in EXPECTED if f"| {name} |" not in page])
    tap.finish()


main(sys.argv[1])
