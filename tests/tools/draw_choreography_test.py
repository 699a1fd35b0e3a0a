"""The picture of docs/graphs.md is what tools/draw_choreography.py draws from the checked-in step of a journal.

Usage: draw_choreography_test.py DRAW_CHOREOGRAPHY
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402


def main(script):
    root = pathlib.Path(script).resolve().parent.parent
    checked_in = root / "docs" / "choreography.svg"
    tap = Tap()
    with tempfile.TemporaryDirectory() as folder:
        drawn = pathlib.Path(folder) / "choreography.svg"
        result = subprocess.run([sys.executable, script, drawn], text=True, capture_output=True, check=False)
        tap.case("the picture is drawn", [result.stderr] if result.returncode else [])
        same = drawn.exists() and drawn.read_text() == checked_in.read_text()
        tap.case("docs/choreography.svg is up to date", [] if same else ["differs: run tools/draw_choreography.py"])
    shown = [element.text for element in xml.etree.ElementTree.parse(checked_in).iter() if element.tag.endswith("}text")]
    layers = {entry["call"].split(".")[1]
              for entry in json.loads((root / "docs/measurements/choreography_sim.json").read_text())["operations"]
              if entry["call"]}
    missing = [f"{what} {layer}" for layer in layers for what in ("forward", "backward") if f"{what} {layer}" not in shown]
    tap.case("every graph of the step is shown", missing)
    tap.case("docs/graphs.md shows it",
             [] if "](choreography.svg)" in (root / "docs" / "graphs.md").read_text() else ["not there"])
    tap.finish()


main(sys.argv[1])
