"""The drawn results show the figures of the checked-in reports. They are not drawn anew: that needs matplotlib.

Usage: draw_results_test.py DRAW_RESULTS
"""
import importlib.util
import json
import pathlib
import sys
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402


def load(script):
    spec = importlib.util.spec_from_file_location("draw_results", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(picture):
    return [element.text for element in xml.etree.ElementTree.parse(picture).iter() if element.tag.endswith("}text")]


def main(script):
    root = pathlib.Path(script).resolve().parent.parent
    tap = Tap()
    drawing = load(script)
    report = json.loads((root / drawing.REPORT).read_text())
    shown = texts(root / "docs" / "results.svg")
    figures = {f'{mode["step_ms_median"]:.0f} ms, {mode["reserved_bytes"] / 2**30:.1f} GiB' for mode in report["modes"]
               if mode["name"] in drawing.POINTS}
    tap.case("each point's label has the report's figures", [f"{figure} is missing: run tools/draw_results.py" for figure in sorted(figures - set(shown))])
    measurements = (root / "docs" / "measurements.md").read_text()
    made_by = drawing.caption(report, *drawing.run_named(measurements))
    tap.case("the picture names its report, with the run's command and commit", [] if made_by in shown else [made_by, *shown])
    peers = json.loads((root / drawing.PEERS).read_text())
    shown = texts(root / "docs" / "peers.svg")
    wanted = [line for _, label in drawing.curves(peers).values() for line in label.split("\n")]
    wanted.append(drawing.caption(peers, *drawing.run_named(measurements, drawing.PEERS), drawing.PEERS))
    tap.case("the picture of other ways shows its report's last points, command and commit", [f"{text} is missing" for text in wanted if text not in shown])
    readme = (root / "README.md").read_text()
    tap.case("README shows it", [] if "](docs/results.svg)" in readme or 'src="docs/results.svg"' in readme else ["not there"])
    for what, draw, modes, lacks in (
            ("a mode", drawing.labels, [mode for mode in report["modes"] if mode["name"] != "eager"], "lacks eager: run bench_layers"),
            ("a curve", drawing.curves, [mode for mode in peers["modes"] if not mode["name"].startswith("recomputed ")],
             "lacks recomputed: run bench_peers")):
        try:
            draw({"modes": modes})
            refused = ""
        except SystemExit as error:
            refused = str(error)
        tap.case(f"a report that lacks {what} is refused by name", [] if lacks in refused else [refused])
    tap.finish()


main(sys.argv[1])
