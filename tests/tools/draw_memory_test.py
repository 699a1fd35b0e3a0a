"""Draws the memory of a made-up trace, and refuses what is none.

Usage: draw_memory_test.py DRAW_MEMORY
"""
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402

MIB = 1 << 20


def process(pid, name, points):
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "X", "name": "a forward", "pid": pid, "tid": 1, "ts": 0, "dur": 5, "args": {}}
    for time, mib in points:
        yield {"ph": "C", "name": "live device memory", "pid": pid, "tid": 0, "ts": time, "args": {"bytes": mib * MIB}}


def main(script):
    tap = Tap()
    trace = {"traceEvents": [*process(1, "graphs", [(0, 10), (2000, 40), (1000, 20)]),
                             *process(2, "graphs+offload", [(500, 10), (1500, 15)])]}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        source, target = folder / "trace.json", folder / "memory.svg"

        def run(text, *others):
            source.write_text(text)
            return subprocess.run([sys.executable, script, source, *others, target], text=True, capture_output=True, check=False)

        def texts(result):
            return [element.text for element in xml.etree.ElementTree.parse(target).iter() if element.tag.endswith("}text")] \
                if target.exists() else [result.stderr]

        for what, text in (("cut off", json.dumps(trace)[:-9]), ("another's", '{"figures": []}'), ("a number", "7")):
            result = run(text)
            refused = result.returncode == 1 and "is no trace of a step" in result.stderr and not target.exists()
            tap.case(f"a file that is {what} is refused", [] if refused else [result.stderr])
        result = run('{"traceEvents": []}')
        tap.case("a trace without memory is refused", [] if "has no memory of a step" in result.stderr else [result.stderr])
        if importlib.util.find_spec("matplotlib") is None:
            tap.skip("each mode is a line with its peak", "matplotlib is not installed: tools/setup --pictures")
            tap.finish()
        shown = texts(run(json.dumps(trace)))
        wanted = ["graphs: peak 40 MiB", "graphs+offload: peak 15 MiB", "live device memory, MiB"]
        tap.case("each mode is a line with its peak", [f"{text} is missing in {shown}" for text in wanted if text not in shown])
        first = target.read_text()
        run(json.dumps(trace))
        tap.case("the same trace gives the same picture", [] if target.read_text() == first else ["differs"])
        other = folder / "other.json"
        other.write_text(json.dumps({"traceEvents": [*process(1, "step 3", [(0, 12)])]}))
        shown = texts(run(json.dumps(trace), other))
        wanted = ["trace, graphs: peak 40 MiB", "other, step 3: peak 12 MiB"]
        tap.case("several traces are one picture", [f"{text} is missing in {shown}" for text in wanted if text not in shown])
        root = pathlib.Path(script).resolve().parent.parent
        checked_in = root / "docs" / "memory.svg"
        wanted = texts(run((root / "docs/measurements/traced_step_h200.trace.json").read_text()))
        shown = [element.text for element in xml.etree.ElementTree.parse(checked_in).iter() if element.tag.endswith("}text")]
        tap.case("docs/memory.svg has the texts of its trace", [f"{text} is missing" for text in wanted if text not in shown])
    tap.finish()


main(sys.argv[1])
