"""Every header compiles alone: public ones as C++17 and without a warning, private ones as C++20.

Usage: headers_test.py --source FOLDER --work FOLDER [--clang PROGRAM] [--include FOLDER]... [--without FOLDER]... -- COMPILER ARGUMENT...

In the build a precompiled header may hide that a private header lacks an include.
--clang: reads private headers in less than half of g++'s time. Without Clang, private headers are skipped. The build's compiler decides,
without a precompiled header, about a header that Clang refuses, or that is refused after a precompiled header.
--include: a folder below the source folder in which private headers look for others.
--without: a folder whose headers this build cannot compile.
--work: precompiled headers are made below it, and removed.

A header that compiled alone is not compiled again as long as it, all of our headers that it includes, the compiler and its arguments are
the same: a mark in the user's cache folder says so, for all clones.
"""
import argparse
import collections
import concurrent.futures
import functools
import hashlib
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402

PRIVATE_FOLDERS = ("src", "graphs", "tests", "tools", "examples")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
# Sets of slow headers of other projects, the slowest first. A header is compiled after the first set that it includes anyway, directly
# or through our own headers. So the set hides no missing include, and is parsed once for all such headers.
SLOW = (
    ("gtest/gtest.h", "torch/nn/module.h"),
    ("torch/nn/module.h",),
    ("torch/csrc/autograd/function.h",),
    ("ATen/core/Tensor.h",),
    ("c10/core/Stream.h",),
)


class Headers:
    """What the headers below some folders include."""

    def __init__(self, folders):
        self.folders = folders

    def find(self, name, beside):
        return next((folder / name for folder in (beside.parent, *self.folders) if (folder / name).is_file()), None)

    @functools.lru_cache(maxsize=None)
    def closure(self, path):
        """Our headers that `path` includes, itself among them, and the names of those of other projects."""
        ours, foreign, left = {path}, set(), [path]
        while left:
            here = left.pop()
            for name in INCLUDE.findall(here.read_text()):
                found = self.find(name, here)
                if found is None:
                    foreign.add(name)
                elif found.resolve() not in ours:
                    ours.add(found.resolve())
                    left.append(found.resolve())
        return ours, foreign

    def foreign(self, path):
        return self.closure(path)[1]


class Marks:
    """Which headers compiled alone, in the user's cache folder."""

    def __init__(self, source, command, headers):
        cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        self.folder = pathlib.Path(cache) / "sidestream" / "headers"
        self.headers = headers
        version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
        arguments = [argument.replace(str(source), "") for argument in command]
        self.compiler = "\0".join([version, *arguments, pathlib.Path(__file__).read_text()])

    def mark(self, path):
        texts = sorted(header.read_text() for header in self.headers.closure(path.resolve())[0])
        return self.folder / hashlib.sha256("\0".join([self.compiler, path.read_text(), *texts]).encode()).hexdigest()

    def has(self, path):
        return self.mark(path).exists()

    def set(self, path):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mark(path).touch()


class Compiler:
    """Compiles headers alone; `command` has the standard and the warnings. `clang` is the same command with Clang, which then compiles
    first, or None."""

    # Fewer headers with the same slow ones take less time than the precompiled header.
    FEW = 4

    def __init__(self, command, headers, work, marks, clang=None):
        self.command = command
        self.clang = clang
        self.headers = headers
        self.work = work
        self.marks = marks
        self.precompiled = {}

    def precompile(self, slow):
        header = self.work / f"slow_{SLOW.index(slow)}.h"
        header.write_text("".join(f"#include <{name}>\n" for name in slow))
        if self.clang is not None:
            # Templates are instantiated in the precompiled header, once. Clang would do it again after each header: half of the time.
            command, made = [*self.clang, "-fpch-instantiate-templates"], f"{header}.pch"
            use = ["-include-pch", made]
        else:
            command, made = self.command, f"{header}.gch"
            use = ["-include", str(header)]
        result = subprocess.run([*command, "-x", "c++-header", str(header), "-o", made], capture_output=True, text=True, check=False)
        if result.returncode == 0:
            self.precompiled[slow] = use

    def slow_of(self, path):
        foreign = self.headers.foreign(path.resolve())
        return next((slow for slow in SLOW if foreign.issuperset(slow)), None)

    def compile_alone(self, name, path):
        """What is wrong with the header; nothing if it compiles."""
        # Twice, so that a missing include guard shows.
        source = f"#include <{name}>\n#include <{name}>\n"
        fast = [*(self.clang or self.command), *self.precompiled.get(self.slow_of(path), [])]
        for command in (fast, self.command):
            result = subprocess.run([*command, "-fsyntax-only", "-x", "c++", "-"], input=source, text=True, capture_output=True,
                                    check=False)
            if result.returncode == 0:
                return []
        return [result.stderr]

    def compile_all(self, tap, pool, headers):
        """`headers`: pairs of a name and a path. Returns how many were compiled now."""
        new = [header for header in headers if not self.marks.has(header[1])]
        slow = collections.Counter(self.slow_of(path) for _, path in new)
        list(pool.map(self.precompile, (each for each in SLOW if slow[each] >= self.FEW)))
        problems = dict(zip(new, pool.map(lambda header: self.compile_alone(*header), new)))
        for header in headers:
            tap.case(header[0], problems.get(header, []))
        for header in new:
            if not problems[header]:
                self.marks.set(header[1])
        return len(new)


def sees_missing_includes(compiler, folder):
    """Headers with a fault, of which each must be refused, also after a precompiled header."""
    faulty = {
        "lacks_string.h": "#pragma once\nstruct S { std::string text; };\n",
        "lacks_tensor.h": "#pragma once\n#include <c10/core/Stream.h>\nstruct S { at::Tensor tensor; };\n",
        "lacks_guard.h": "#include <string>\nstruct S { std::string text; };\n",
    }
    if SLOW[-1] not in compiler.precompiled:
        compiler.precompile(SLOW[-1])
    problems = []
    for name, text in faulty.items():
        (folder / name).write_text(text)
        if not compiler.compile_alone(str(folder / name), folder / name):
            problems.append(f"{name} compiles, but must not")
    return problems


def main():
    ours = sys.argv[1:sys.argv.index("--")]
    command = sys.argv[sys.argv.index("--") + 1:]
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--clang")
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--without", action="append", default=[])
    given = parser.parse_args(ours)

    public_folder = given.source / "include"
    folders = [given.source / folder for folder in given.include]
    public = [(path.relative_to(public_folder).as_posix(), path) for path in sorted(public_folder.rglob("*.h"))]
    private = [(path.relative_to(given.source).as_posix(), path)
               for folder in PRIVATE_FOLDERS for path in sorted((given.source / folder).rglob("*.h"))]
    private = [(name, path) for name, path in private
               if not any(name.startswith(folder + "/") for folder in given.without)]
    tap = Tap()
    with tempfile.TemporaryDirectory(dir=given.work) as work_17, tempfile.TemporaryDirectory(dir=given.work) as work_20, \
            concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        command_17 = [*command, "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{public_folder}"]
        headers_17 = Headers([public_folder])
        as_17 = Compiler(command_17, headers_17, pathlib.Path(work_17), Marks(given.source, command_17, headers_17))
        new = as_17.compile_all(tap, pool, public)
        arguments_20 = ["-w", "-std=c++20", *(f"-I{folder}" for folder in folders)]
        command_20 = [*command, *arguments_20]
        headers_20 = Headers(folders)
        clang = [given.clang, *command[1:], *arguments_20] if given.clang else None
        as_20 = Compiler(command_20, headers_20, pathlib.Path(work_20), Marks(given.source, command_20, headers_20), clang)
        if given.clang:
            new += as_20.compile_all(tap, pool, private)
        else:
            tap.skip("private headers compile alone", "no Clang: tools/setup --clang installs it")
        tap.case("a header that lacks an include is refused",
                 sees_missing_includes(as_17, pathlib.Path(work_17)) + sees_missing_includes(as_20, pathlib.Path(work_20)))
    tap.case("there are headers", [] if public and private else [f"none under {given.source}"])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"# {len(public)} public and {len(private)} private headers, {new} compiled now, in {used.ru_utime + used.ru_stime:.0f} CPU seconds")
    tap.finish()


main()
