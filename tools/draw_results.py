"""Draws docs/results.svg and docs/peers.svg, each from the checked-in report of one run of a benchmark.

Usage: draw_results.py [FOLDER]     without FOLDER: docs

docs/measurements.md names the run's command and commit in the row that links the report. Needs matplotlib
(tools/setup --pictures): the test of this script compares the pictures' texts with the reports.
"""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = "docs/measurements/layers_memory_time_h200.json"
PEERS = "docs/measurements/peers_in_one_process_h200.json"

GIB = 1 << 30
BLUE = "#0969da"
GREY = "#59636e"
POINTS = {  # a mode of the report: its label, colour, and where the label stands beside the point, in font points
    "eager": ("eager", GREY, (-12, -9)),
    "graphs": ("graphs", "#1f2328", (12, -5)),
    "graphs+offload": ("graphs + offload of what fits beside compute", BLUE, (12, -12)),
    "graphs+offload:all": ("graphs + offload of everything", BLUE, (-12, -12)),
}
CURVES = {  # a mode's name without its number of layers: the mode without it, the curve's label, colour, and where the last point's label stands
    "graphs+offload": ("graphs", "offload of what fits", BLUE, (8, -16)),
    "graphs+offload:all": ("graphs", "offload of everything", "#0550ae", (12, -10)),
    "recomputed": ("eager", "recomputation", "#1a7f37", (44, -2)),
    "recomputed+offload": ("eager", "recomputation, and offload of what fits", "#8250df", (-10, -12)),
    "saved on CPU": ("eager", "saved on CPU", GREY, (-8, 8)),
}


def run_named(measurements, report=REPORT):
    """The command and the commit of the row that links the report."""
    name = re.escape(pathlib.Path(report).name)
    runs = set(re.findall(r"`(build/bench_\w+ [^`]*)`[^|]*\(measurements/" + name + r"\)[^|]*\| ([0-9a-f]{7,40}) \|", measurements))
    if len(runs) != 1:
        sys.exit(f"draw_results: docs/measurements.md links {report} beside {len(runs)} commands with a commit, not one")
    return runs.pop()


def labels(report):
    """By mode: step time in ms, memory in GiB, and the text beside the point."""
    modes = {mode["name"]: mode for mode in report["modes"]}
    missing = [name for name in POINTS if name not in modes]
    if missing:
        sys.exit(f"draw_results: {REPORT} lacks {', '.join(missing)}: run bench_layers with --modes {','.join(POINTS)}")
    return {name: (modes[name]["step_ms_median"], modes[name]["reserved_bytes"] / GIB,
                   f'{label}\n{modes[name]["step_ms_median"]:.0f} ms, {modes[name]["reserved_bytes"] / GIB:.1f} GiB')
            for name, (label, _, _) in POINTS.items()}


def curves(report):
    """By curve: tokens per second in thousands and memory in GiB of each point, and the text beside the last."""
    drawn = {}
    for curve, (without, label, _, _) in CURVES.items():
        found = [mode for mode in report["modes"] if mode["name"].rpartition(" ")[0] == curve]
        if not found:
            sys.exit(f"draw_results: {PEERS} lacks {curve}: run bench_peers")
        beside = [mode for mode in report["modes"] if mode["name"] == without and mode["set"] == found[0]["set"]]
        points = [(mode["tokens_per_second"] / 1e3, mode["reserved_bytes"] / GIB) for mode in beside + found]
        drawn[curve] = (points, f"{label}\n{points[-1][0]:.1f}, {points[-1][1]:.1f} GiB")
    return drawn


def caption(report, program, commit, path=REPORT):
    return (f"{program.split()[0]} at {commit}, {report['rounds']} rounds, modes in turns; {path}; weights and gradients: "
            f"{report['weights_and_gradients_bytes'] / GIB:.1f} GiB")


def new_axes():
    try:
        import matplotlib
    except ImportError:
        sys.exit("draw_results: matplotlib is not installed: run tools/setup --pictures")
    matplotlib.use("svg")
    # The same input gives the same file: no random identifiers, and text stays text, so that no font of this machine is drawn.
    matplotlib.rcParams.update({"svg.hashsalt": "sidestream", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 11})
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(9.2, 4.6))
    axes.set_ylim(0, 20)
    axes.set_yticks(range(0, 21, 5))
    axes.set_ylabel("Peak device memory reserved, GiB,\nwithout weights and gradients")
    axes.grid(color="#d8dee4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, axes, report, made_by, output):
    axes.set_title(f'{report["layers"]} transformer layers, hidden {report["hidden"]}, {report["tokens"]:,} tokens, '
                   f'{report["dtype"]}, one {report["device"]}', loc="left", fontsize=13)
    figure.text(0.01, 0.01, made_by, fontsize=8, color=GREY)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(output, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})


def draw_results(report, made_by, output):
    figure, axes = new_axes()
    for name, (step, memory, label) in labels(report).items():
        _, colour, offset = POINTS[name]
        axes.plot([step], [memory], "o", color=colour, markersize=8)
        axes.annotate(label, (step, memory), xytext=offset, textcoords="offset points", color=colour,
                      ha="left" if offset[0] > 0 else "right", ma="left")
    axes.set_xlim(0, 600)
    axes.set_xlabel("Training step, forward and backward, ms (median)")
    save(figure, axes, report, made_by, output)


def draw_peers(report, made_by, output):
    figure, axes = new_axes()
    for name, (points, label) in curves(report).items():
        _, _, colour, offset = CURVES[name]
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", color=colour, markersize=6)
        axes.annotate(label, points[-1], xytext=offset, textcoords="offset points", color=colour,
                      ha="left" if offset[0] > 0 else "right", ma="left")
    axes.set_xlim(0, 36)
    axes.set_xlabel("Thousands of tokens per second, forward and backward (median)")
    save(figure, axes, report, made_by, output)


def main(folder):
    measurements = (ROOT / "docs" / "measurements.md").read_text()
    for path, name, draw in ((REPORT, "results.svg", draw_results), (PEERS, "peers.svg", draw_peers)):
        report = json.loads((ROOT / path).read_text())
        draw(report, caption(report, *run_named(measurements, path), path), folder / name)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
