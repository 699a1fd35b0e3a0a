"""Installs the build into a scratch prefix and builds and runs a C++17 project against it, by pkg-config and by CMake.

Usage: install_test.py MESON_COMMAND BUILD_FOLDER PREFIX COMPILER
"""
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tap import Tap  # noqa: E402


def run(command, **options):
    """The problem that `command` met, as a list of text; empty when it succeeded."""
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **options)
    return [] if result.returncode == 0 else [f"$ {shlex.join(map(str, command))}\n{result.stdout}"]


def first_problem(*steps):
    for step in steps:
        problem = step()
        if problem:
            return problem
    return []


def installed_files(root):
    expected = ["include/sidestream/version.h", "include/sidestream/error.h"]
    problems = [f"not installed: {name}" for name in expected if not (root / name).exists()]
    for pattern in ("**/libsidestream.so", "**/pkgconfig/sidestream.pc", "**/cmake/Sidestream/SidestreamConfig.cmake"):
        if not list(root.glob(pattern)):
            problems.append(f"not installed: {pattern}")
    internal = [path for path in root.rglob("*.h") if "include/sidestream/" not in path.as_posix()]
    return problems + [f"installed, but not public: {path}" for path in internal]


def with_pkg_config(root, scratch, compiler):
    folder = next(root.glob("**/pkgconfig"))
    environment = {**os.environ, "PKG_CONFIG_PATH": str(folder)}
    flags = subprocess.run(["pkg-config", "--define-variable=prefix=" + str(root), "--cflags", "--libs", "sidestream"],
                           env=environment, text=True, capture_output=True, check=False)
    if flags.returncode != 0:
        return [flags.stderr]
    program = scratch / "by_pkg_config"
    return first_problem(
        lambda: run([*compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", HERE / "consumer" / "main.cpp", "-o", program,
                     *shlex.split(flags.stdout)]),
        lambda: run([program]))


def with_cmake(root, scratch, compiler):
    build = scratch / "by_cmake"
    return first_problem(
        lambda: run(["cmake", "-S", HERE / "consumer", "-B", build, f"-DCMAKE_PREFIX_PATH={root}",
                     f"-DCMAKE_CXX_COMPILER={compiler[-1]}"]),
        lambda: run(["cmake", "--build", build]),
        lambda: run([build / "consumer"]))


def main(meson, build, prefix, compiler):
    tap = Tap()
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = pathlib.Path(scratch_name)
        stage = scratch / "stage"
        problem = run([*meson, "install", "-C", build, "--no-rebuild", "--quiet"], env={**os.environ, "DESTDIR": str(stage)})
        tap.case("meson install", problem)
        if not problem:
            # Moved out of the staging folder, so that what is built against it shows that the tree can be relocated.
            root = scratch / "installed"
            shutil.move(str(stage) + prefix, root)
            tap.case("headers, library, pkg-config file and CMake package, and no internal header", installed_files(root))
            tap.case("a C++17 consumer by pkg-config", with_pkg_config(root, scratch, compiler))
            tap.case("a C++17 consumer by CMake", with_cmake(root, scratch, compiler))
    tap.finish()


main(shlex.split(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
