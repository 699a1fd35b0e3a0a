"""The ranges of a graphed, offloaded training run, as an NVTX tool sees them: names and nesting.

Usage: program_test.py PROGRAM INJECTION_LIBRARY
"""
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402

LAYERS = 3
ARGUMENTS = ["--device", "sim", "--layers", str(LAYERS), "--hidden", "32", "--heads", "2", "--kv-heads", "1", "--ffn", "64",
             "--seq", "32", "--batch", "2", "--steps", "3", "--graphs", "layer", "--offload", "core_attn,fc1",
             "--side-streams", "1"]


def trace_of(program, library, arguments):
    """The lines that the injection library wrote, and the program's problem if it met one."""
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder) / "text"
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
        log = pathlib.Path(folder) / "ranges"
        environment = {**os.environ, "NVTX_INJECTION64_PATH": library, "SIDESTREAM_NVTX_LOG": str(log)}
        result = subprocess.run([program, "train", "--text", text, *arguments], env=environment, text=True, check=False,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if result.returncode != 0:
            return [], [f"exit {result.returncode}: {result.stdout}"]
        return log.read_text().splitlines() if log.exists() else [], []


def with_parents(lines):
    """Each range's name with those it lies in, outermost first."""
    stack = []
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 2
        del stack[depth:]
        stack.append(line.strip())
        yield tuple(stack)


def missing(ranges, names):
    seen = {path[-1] for path in ranges}
    return [f"no range '{name}'; seen: {sorted(seen)}" for name in names if name not in seen]


def main(program, library):
    tap = Tap()
    lines, problem = trace_of(program, library, ARGUMENTS)
    tap.case("the program runs under the tool", problem)
    ranges = list(with_parents(lines))
    blocks = [f"blocks.{layer}" for layer in range(LAYERS)]
    # With one side stream the last block's groups stay on the device.
    moved = [f"{block}.{group}" for block in blocks[:-1] for group in ("core_attn", "fc1")]
    tap.case("every pop has its push", [line for line in lines if "unmatched" in line])
    tap.case("every name is registered", [line for line in lines if "unregistered" in line])
    tap.case("each block is warmed up, captured and launched in both directions", missing(ranges, [
        f"{kind} {block}" for block in blocks
        for kind in ("warmup", "capture forward", "capture backward", "launch forward", "launch backward")]))
    tap.case("each moved group has its offload", missing(ranges, [f"offload {group}" for group in moved]))
    tap.case("blocks reload", [] if any(path[-1].startswith("reload ") for path in ranges) else ["no reload range"])
    def of_own_block(path):
        block = path[-2].removeprefix("capture forward ").removeprefix("launch forward ")
        return block != path[-2] and path[-1].startswith(f"offload {block}.")

    nested = [path for path in ranges if path[-1].startswith("offload ") and len(path) > 1]
    tap.case("offloads lie in a forward of their own block", [" > ".join(path) for path in nested if not of_own_block(path)] + [
        f"no offload in a {kind} forward, but {len(ranges)} ranges" for kind in ("capture", "launch")
        if not any(path[-2].startswith(f"{kind} forward ") for path in nested)])
    inside = [path for path in ranges if any(outer.startswith("launch") for outer in path[:-1])]
    tap.case("a replay launches and copies, and does nothing else", [
        " > ".join(path) for path in inside if not path[-1].startswith(("offload ", "reload "))]
             + ([] if inside else ["no launch with copies"]))
    tap.finish()


main(*sys.argv[1:])
