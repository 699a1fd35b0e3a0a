"""What a process loads and registers, and what the two libraries show.

Usage: loading_test.py TRAINER LIBRARY SIMULATOR BROKEN_DRIVER
BROKEN_DRIVER is empty where the cuda backend is not built.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402

# Kinds of symbols in nm's output that clash with others of the name: all that are neither weak nor local nor undefined.
STRONG = set("ABCDGRST")


def run(trainer, mode, **environment):
    return subprocess.run([trainer, mode], text=True, capture_output=True, check=False, env={**os.environ, **environment})


def passes(trainer, mode):
    result = run(trainer, mode)
    return [] if result.returncode == 0 else [f"exit {result.returncode}", result.stdout, result.stderr]


def prints(result, *patterns):
    """Problems unless the output has one line for each pattern, and no more."""
    lines = result.stdout.splitlines()
    problems = [] if result.returncode == 0 else [f"exit {result.returncode}", result.stderr]
    if len(lines) != len(patterns):
        problems.append(f"{len(lines)} lines, not {len(patterns)}: {result.stdout}")
    return problems + [f"no line '{pattern}' in: {result.stdout}" for pattern in patterns
                       if not any(re.search(pattern, line) for line in lines)]


def has_gpu(trainer):
    return run(trainer, "automatic").stdout.startswith("device cuda")


def without_a_gpu(trainer):
    return prints(run(trainer, "automatic", CUDA_VISIBLE_DEVICES=""), r"^device sim", r"^warning sidestream: .*simulated.*: \S+")


def with_a_broken_driver(trainer, driver):
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(driver, pathlib.Path(folder) / "libcuda.so.1")
        path = os.pathsep.join(filter(None, [folder, os.environ.get("LD_LIBRARY_PATH")]))
        result = run(trainer, "automatic", LD_LIBRARY_PATH=path)
        return prints(result, r"^error device auto: the NVIDIA driver .*does not work: .*find_device")


def without_its_library(trainer, library):
    """The trainer beside a libsidestream that has no simulator beside it."""
    with tempfile.TemporaryDirectory() as folder:
        soname = library.name.split(".so")[0] + ".so." + library.name.split(".so.")[1].split(".")[0]
        shutil.copy(library, pathlib.Path(folder) / soname)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("LD_LIBRARY_PATH")]))
        result = run(trainer, "simulated", LD_LIBRARY_PATH=path, LD_PRELOAD=str(pathlib.Path(folder) / soname))
        return prints(result, r"^error the library of the simulated device cannot be loaded: .*libsidestream_sim.*beside libsidestream")


def symbols(library, *options):
    listing = subprocess.run(["nm", "--defined-only", "-C", *options, library], text=True, capture_output=True, check=True)
    return [line.split(maxsplit=2)[1:] for line in listing.stdout.splitlines()]


def strong_outside(library):
    """Exported strong symbols that are not of the namespace. Where the compiler links its own runtime statically nothing is
    said: that must stay exported, or the two libraries would have one each."""
    if "libstdc++" not in subprocess.run(["readelf", "-d", library], text=True, capture_output=True, check=True).stdout:
        return []
    ours = re.compile(r"^(?:(?:vtable|typeinfo|typeinfo name|VTT|guard variable|TLS (?:init|wrapper) function) for |"
                      r"(?:non-)?virtual thunk to )?sidestream::")
    return [f"{library.name}: {kind} {name}" for kind, name in symbols(library, "-D")
            if kind in STRONG and not ours.match(name)]


def main(trainer, library, simulator, driver):
    tap = Tap()
    tap.case("the simulator loads after a backward on the CPU", passes(trainer, "after_a_backward"))
    tap.case("several threads ask for it at once", passes(trainer, "from_several_threads"))
    tap.case("a trainer that asks for cuda carries no simulator", passes(trainer, "carries_no_simulator"))
    tap.case("a name with an index", prints(run(trainer, "simulated"), r"^device sim:0$"))
    if not has_gpu(trainer):
        tap.case("auto says on one line that it simulates, and why", without_a_gpu(trainer))
    if driver:
        tap.case("a driver that is there and does not work is an error", with_a_broken_driver(trainer, driver))
    tap.case("a missing simulator is named", without_its_library(trainer, library))
    tap.case("libsidestream holds no simulator",
             [f"{kind} {name}" for kind, name in symbols(library) if "sidestream::sim::" in name])
    tap.case("no strong symbol outside of the namespace", strong_outside(library) + strong_outside(simulator))
    tap.case("what is hidden is hidden", [f"{kind} {name}" for kind, name in symbols(library, "-D")
                                          if kind in STRONG and "sidestream::GraphSequence::" in name])
    tap.finish()


main(sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4])
