"""Two clones in different folders share what ccache keeps: the second compiles nothing, precompiled headers and debug information
included. Builds one room with LibTorch's headers in two copies of the sources, with a cache of its own.

Usage: shared_cache_test.py SOURCE_FOLDER MESON NINJA TORCH
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402

BUILT = ["meson.build", "meson.options", "meson", "include", "src", "graphs"]
ROOM = "libsidestream_room_memory.a"


def cache_variables(source):
    """What tools/setup gives to every build, here for the copy."""
    prefix = 'echo "export '
    line = next(line for line in (source / "tools" / "setup").read_text().splitlines() if line.startswith(prefix + "CCACHE_"))
    words = line[len(prefix):].rstrip('"').split(" ")
    return {name: value.strip("'") for name, value in (word.split("=", 1) for word in words)}


class Clones:
    def __init__(self, source, folder, meson, ninja, torch, variables):
        self.source, self.folder, self.meson, self.ninja, self.torch = source, folder, meson, ninja, torch
        self.variables = variables

    def environment(self, clone):
        variables = cache_variables(self.source)
        variables = {name: value.replace("$here", str(clone)) for name, value in variables.items()}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CCACHE_", "MESON_"))}
        return {**kept, **variables, "CCACHE_DIR": str(self.folder / "cache"), **self.variables}

    def build(self, name):
        """Builds the room in a copy named so; gives the hits and the misses."""
        clone = self.folder / name
        clone.mkdir()
        for part in BUILT:
            original = self.source / part
            (shutil.copytree if original.is_dir() else shutil.copy)(original, clone / part)
        environment = self.environment(clone)
        # As tools/sanitize: debug information names folders, unless told not to, and Meson names joined sources by their folders.
        options = [f"-Dtorch={self.torch}", "-Dtests=false", "-Dtools=false", "-Dcuda=disabled", "-Doptimization=0", "-Dcpp_args=-g1",
                   "-Dunity_size=8"]
        commands = [[self.meson, "setup", str(clone / "build"), str(clone), *options], ["ccache", "--zero-stats"],
                    [self.ninja, "-C", str(clone / "build"), ROOM]]
        for command in commands:
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        counted = subprocess.run(["ccache", "--print-stats"], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        counts = dict(line.split("\t") for line in counted.splitlines())
        return int(counts["direct_cache_hit"]) + int(counts["preprocessed_cache_hit"]), int(counts["cache_miss"])


def check(tap, compiler, variables, precompiled, source, *tools):
    with tempfile.TemporaryDirectory() as folder:
        clones = Clones(pathlib.Path(source), pathlib.Path(folder), *tools, variables)
        hits, misses = clones.build("first")
        tap.case(f"{compiler}: the first clone compiles", [] if misses > 2 and hits == 0 else [f"{hits} hits, {misses} misses"])
        # The second is alone there, as on a machine where the first was removed.
        pathlib.Path(folder, "first").rename(pathlib.Path(folder, "removed"))
        again, missed = clones.build("second")
        tap.case(f"{compiler}: the second clone finds all in the cache", [] if again == misses and missed == 0 else
                 [f"{again} hits and {missed} misses of {misses} compilations: what of the folder is in their key?"])
        headers = list(pathlib.Path(folder, "second").rglob(f"*.{precompiled}"))
        tap.case(f"{compiler}: a precompiled header is among it", [] if headers else ["none was made"])


def main(*arguments):
    tap = Tap()
    check(tap, "g++", {}, "gch", *arguments)
    if shutil.which("clang++-14") is not None:
        check(tap, "Clang", {"CXX": "ccache clang++-14"}, "pch", *arguments)  # as tools/sanitize
    tap.finish()


main(*sys.argv[1:])
