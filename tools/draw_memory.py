"""Draws device memory over a step, from files that `sidestream train --trace` or OffloadEngine::trace_json gives.

Usage: draw_memory.py TRACE... SVG

One line for each mode in a trace, so `--compare` gives the memory with and without offload. Needs matplotlib (tools/setup --pictures).
"""
import json
import pathlib
import sys

MIB = 1 << 20
COLOURS = ["#1f2328", "#0969da", "#1a7f37", "#bc4c00"]


def modes(trace):
    """By process: its name, and its memory as times in ms and MiB, each of which holds until the next time."""
    found = {}
    for event in trace["traceEvents"]:
        name, points = found.get(event["pid"], ("", []))
        if event["ph"] == "M" and event["name"] == "process_name":
            name = event["args"]["name"]
        elif event["ph"] == "C":
            points.append((event["ts"] / 1e3, event["args"]["bytes"] / MIB))
        found[event["pid"]] = (name, sorted(points))
    return [mode for mode in found.values() if mode[1]]


def draw(drawn, target):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "sidestream"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.4), layout="constrained")
    for (name, points), colour in zip(drawn, COLOURS * len(drawn)):
        times, sizes = zip(*[(time - points[0][0], size) for time, size in points])
        axes.step(times, sizes, where="post", color=colour, label=f"{name}: peak {max(sizes):.0f} MiB")
    axes.set_xlabel("ms since the step began")
    axes.set_ylabel("live device memory, MiB")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    figure.savefig(target, metadata={"Date": None, "Creator": None})


def main(arguments):
    if len(arguments) < 2:
        sys.exit(__doc__.strip())
    *sources, target = map(pathlib.Path, arguments)
    drawn = []
    for source in sources:
        try:
            found = modes(json.loads(source.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.exit(f"draw_memory: {source} is no trace of a step: {error}")
        if not found:
            sys.exit(f"draw_memory: {source} has no memory of a step; write it with `sidestream train --trace`")
        drawn += [(f"{source.stem}, {name}" if len(sources) > 1 else name, points) for name, points in found]
    try:
        draw(drawn, target)
    except ImportError as error:
        sys.exit(f"draw_memory: {error}; run tools/setup --pictures")
    except OSError as error:
        sys.exit(f"draw_memory: {target} cannot be written: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
