"""README's picture is what tools/draw_results.py draws from the checked-in report.

Usage: draw_results_test.py DRAW_RESULTS
"""
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402


def main(script):
    root = pathlib.Path(script).resolve().parent.parent
    checked_in = root / "docs" / "results.svg"
    tap = Tap()
    with tempfile.TemporaryDirectory() as folder:
        drawn = pathlib.Path(folder) / "results.svg"
        result = subprocess.run([sys.executable, script, drawn], text=True, capture_output=True, check=False)
        tap.case("the picture is drawn", [result.stderr] if result.returncode else [])
        same = drawn.exists() and drawn.read_text() == checked_in.read_text()
        tap.case("docs/results.svg is up to date", [] if same else ["differs: run tools/draw_results.py"])
    shown = [element.text for element in xml.etree.ElementTree.parse(checked_in).iter() if element.tag.endswith("}text")]
    tap.case("the picture names its report", [] if any("copies_beside_8192x12.json" in text for text in shown) else shown)
    tap.case("README shows it", [] if "](docs/results.svg)" in (root / "README.md").read_text() or
             'src="docs/results.svg"' in (root / "README.md").read_text() else ["not there"])
    tap.finish()


main(sys.argv[1])
