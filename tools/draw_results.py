"""Draws the picture of README, docs/results.svg, from the checked-in report of one run of bench_layers.

Usage: draw_results.py [OUTPUT]     without OUTPUT: docs/results.svg

The run's command and commit are those that docs/measurements.md names beside the figures.
"""
import json
import pathlib
import re
import sys
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = "docs/measurements/copies_beside_8192x12.json"
RUN = re.compile(r"`(build/bench_layers) --modes eager,eager\+offload,graphs,graphs\+offload --rounds 10` \| ([0-9a-f]{7,40}) \|")

GIB = 1 << 30
ROWS = {  # the report's name of a mode: how the picture calls it
    "eager": ("eager", ""),
    "graphs": ("graphs", ""),
    "graphs+offload": ("graphs + offload", ""),
}
HIGHLIGHT = "graphs+offload"

WIDTH = 920
LEFT = 172  # where the first panel's bars begin
PANEL = 232
GAP = 22
TOP = 128
ROW = 46
BAR = 22
BOTTOM = TOP + len(ROWS) * ROW

STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de; }
  .ink { fill: #1f2328; }
  .quiet { fill: #59636e; }
  .bar { fill: #afb8c1; }
  .best { fill: #0969da; }
  .grid { stroke: #d8dee4; }
  .axis { stroke: #818b98; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d; }
    .ink { fill: #f0f6fc; }
    .quiet { fill: #9198a1; }
    .bar { fill: #656c76; }
    .best { fill: #4493f8; }
    .grid { stroke: #2a313c; }
    .axis { stroke: #656c76; }
  }
  text { font-family: -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', Helvetica, Arial, sans-serif; }
"""


class Panel:
    """One quantity over the modes: bars from zero, each with its value."""

    def __init__(self, title, unit, ticks, value, label):
        self.title = title
        self.unit = unit
        self.ticks = ticks
        self.value = value
        self.label = label


def text(x, y, size, content, style="ink", anchor="start", bold=False):
    weight = ' font-weight="600"' if bold else ""
    return f'<text class="{style}" x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(content)}</text>'


def draw_panel(panel, left, modes):
    # Room for the longest label beside the longest bar.
    scale = (PANEL - 84) / panel.ticks[-1]
    yield text(left, TOP - 32, 14, panel.title, bold=True)
    yield text(left, TOP - 14, 12, panel.unit, "quiet")
    for tick in panel.ticks:
        x = left + tick * scale
        yield f'<line class="{"axis" if tick == 0 else "grid"}" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{BOTTOM}"/>'
        yield text(x, BOTTOM + 16, 11, f"{tick:g}", "quiet", "middle")
    for row, mode in enumerate(modes):
        y = TOP + row * ROW + (ROW - BAR) / 2
        best = mode["name"] == HIGHLIGHT
        width = panel.value(mode) * scale
        yield f'<rect class="{"best" if best else "bar"}" x="{left}" y="{y:g}" width="{width:.1f}" height="{BAR}" rx="2"/>'
        yield text(left + width + 6, y + 15.5, 12, panel.label(mode), bold=best)


def picture(report, commit, program):
    by_name = {mode["name"]: mode for mode in report["modes"]}
    modes = [by_name[name] for name in ROWS]
    memory = Panel("Device memory reserved", "GiB above weights and gradients", [0, 5, 10, 15],
                   lambda mode: mode["reserved_bytes"] / GIB,
                   lambda mode: f'{mode["reserved_bytes"] / GIB:.1f}' + change(mode["reserved_over_eager"]))
    step = Panel("Training step", "ms, forward and backward, median", [0, 100, 200, 300],
                 lambda mode: mode["step_ms_median"],
                 lambda mode: f'{mode["step_ms_median"]:.0f}' + change(mode["step_over_graphs_paired_median"], 1))
    host = Panel("Host CPU for a step", "ms, all threads, until issued", [0, 4, 8, 12],
                 lambda mode: mode["cpu_ms_median"], lambda mode: f'{mode["cpu_ms_median"]:.1f}')

    offloaded = by_name[HIGHLIGHT]["offloaded_bytes"]
    drop = by_name["graphs"]["reserved_bytes"] - by_name[HIGHLIGHT]["reserved_bytes"]
    height = BOTTOM + 74
    title = (f'{report["layers"]} transformer layers, {report["tokens"]:,} tokens, hidden {report["hidden"]}, '
             f'{report["dtype"]}, on one {report["device"]}')
    summary = (f'With offload {offloaded / GIB:.1f} GiB leave the device in each step, '
               f'and reserved memory falls by {100 * drop / offloaded:.0f}% of that.')
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-labelledby="title summary">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="summary">{escape(describe(modes) + " " + summary)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text(20, 34, 17, title, bold=True),
        text(20, 56, 13, summary, "quiet"),
    ]
    for row, mode in enumerate(modes):
        middle = TOP + row * ROW + ROW / 2
        name, detail = ROWS[mode["name"]]
        best = mode["name"] == HIGHLIGHT
        parts.append(text(LEFT - 10, middle + (-2 if detail else 4.5), 13, name, anchor="end", bold=best))
        if detail:
            parts.append(text(LEFT - 10, middle + 13, 11, detail, "quiet", "end"))
    for index, panel in enumerate((memory, step, host)):
        parts += draw_panel(panel, LEFT + index * (PANEL + GAP), modes)
    parts += [
        text(20, BOTTOM + 42, 11, "Percentages: memory against eager; step against graphs, median over rounds of each round's ratio.", "quiet"),
        text(20, BOTTOM + 58, 11, f"{program} at {commit}, {report['rounds']} rounds; {REPORT}", "quiet"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def change(ratio, digits=0):
    """A ratio as a signed percentage in parentheses; nothing where it rounds to none."""
    percent = round(100 * (ratio - 1), digits)
    return f" ({percent:+.{digits}f}%)".replace("-", "\u2212") if percent else ""


def describe(modes):
    return " ".join(f'{" ".join(filter(None, ROWS[mode["name"]]))}: {mode["reserved_bytes"] / GIB:.1f} GiB, '
                    f'{mode["step_ms_median"]:.0f} ms a step, {mode["cpu_ms_median"]:.1f} ms of CPU.' for mode in modes)


def run_named(measurements):
    runs = set(RUN.findall(measurements))
    if len(runs) != 1:
        sys.exit(f"draw_results: docs/measurements.md must name one run that made {REPORT}, but names {len(runs)}")
    return runs.pop()


def main(output):
    report = json.loads((ROOT / REPORT).read_text())
    program, commit = run_named((ROOT / "docs" / "measurements.md").read_text())
    output.write_text(picture(report, commit, program))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "results.svg")
