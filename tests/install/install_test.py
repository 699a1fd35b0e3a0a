"""Installs the build into a scratch prefix, and builds and runs C++17 projects against it: a consumer by pkg-config and by
CMake, each project of examples/, and the program that README shows. They run on the simulated device, README's on what is there.
CMake compiles with ccache if it is there: paths below the scratch folder are relative in its keys, so another run finds the results.
Shows too which versions the package refuses, and that it refuses another LibTorch than the one that it was built with.

Usage: install_test.py MESON_COMMAND BUILD_FOLDER PREFIX SOURCE_FOLDER COMPILER
"""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import readme_program  # noqa: E402
from tap import Tap  # noqa: E402

# What each example is run with, beside its own folder as the working folder.
EXAMPLES = {
    "minimal": ["sim"],
    "byte_model": ["byte_model.cpp", "sim", "4"],
    "graphed_callables": ["sim"],
    "graphed_step": ["sim"],
    "mixture_model": ["mixture_model.cpp", "sim", "4"],
    "pipeline": ["2"],
}


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
    for pattern in ("**/libsidestream.so", "**/libsidestream_sim.so", "**/pkgconfig/sidestream.pc", "**/pkgconfig/sidestream-testing.pc",
                    "**/cmake/Sidestream/SidestreamConfig.cmake"):
        if not list(root.glob(pattern)):
            problems.append(f"not installed: {pattern}")
    internal = [path for path in root.rglob("*.h") if "include/sidestream/" not in path.as_posix()]
    return problems + [f"installed, but not public: {path}" for path in internal]


def installed_program(root):
    """The program runs from the relocated tree, with the library of that tree, and nothing says where that is."""
    program = root / "bin" / "sidestream"
    loaded = subprocess.run(["ldd", program], text=True, capture_output=True, check=False).stdout
    ours = [line for line in loaded.splitlines() if "libsidestream.so" in line]
    if len(ours) != 1 or str(root) not in ours[0]:
        return [f"{program} does not load the library beside it:", loaded]
    return run([program, "info"])


def pkg_config(root, package="sidestream"):
    environment = {**os.environ, "PKG_CONFIG_PATH": str(next(root.glob("**/pkgconfig")))}
    return subprocess.run(["pkg-config", "--cflags", "--libs", package], env=environment, text=True, capture_output=True,
                          check=False)


def no_definition(root):
    """The CMake package is checked by the consumer's own CMakeLists.txt."""
    flags = pkg_config(root)
    defined = [flag for flag in shlex.split(flags.stdout) if flag.startswith("-D")]
    return [flags.stderr] if flags.returncode else [f"pkg-config defines {flag}" for flag in defined]


def with_pkg_config(root, scratch, compiler):
    """As a debug build compiles it: NDEBUG is not defined."""
    flags = pkg_config(root)
    if flags.returncode != 0:
        return [flags.stderr]
    program = scratch / "by_pkg_config"
    return first_problem(
        lambda: run([*compiler, "-std=c++17", "-UNDEBUG", "-Wall", "-Wextra", "-Werror", HERE / "consumer" / "main.cpp", "-o",
                     program, *shlex.split(flags.stdout)]),
        lambda: run([program]))


def checking_with_pkg_config(root, scratch, compiler):
    """Links with the package for testing, and does not without."""
    program = scratch / "checking_by_pkg_config"
    build = [*compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", HERE / "checking" / "main.cpp", "-o", program]
    plain = run([*build, *shlex.split(pkg_config(root).stdout)])
    if not plain or "undefined reference to `sidestream::" not in plain[0]:
        return ["libsidestream alone has what is the simulator's:", *plain]
    return first_problem(lambda: run([*build, *shlex.split(pkg_config(root, "sidestream-testing").stdout)]),
                         lambda: run([program]))


def with_cmake(root, source, build, compiler, arguments, working_folder=None, build_type="Release"):
    """`source` is a CMake project whose program has the folder's name."""
    return first_problem(
        lambda: run(["cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={root}", f"-DCMAKE_BUILD_TYPE={build_type}",
                     f"-DCMAKE_CXX_COMPILER={compiler[-1]}"]),
        lambda: run(["cmake", "--build", build]),
        lambda: run([build / source.name, *arguments], cwd=working_folder))


def version_of(root):
    """The numbers of the installed headers' version."""
    header = (root / "include" / "sidestream" / "version.h").read_text()
    return [int(re.search(rf"{part} (\d+)$", header, re.MULTILINE).group(1)) for part in ("MAJOR", "MINOR", "PATCH")]


def found_versions(root, build, wanted):
    """What find_package finds of `wanted`, each the arguments after the package's name."""
    command = ["cmake", "-S", HERE / "versions", "-B", build, f"-DCMAKE_PREFIX_PATH={root}", f"-DWANTED={';'.join(wanted)}"]
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    answers = dict(re.findall(r"^-- \[(.*)\] (\S+)$", result.stdout, re.MULTILINE))
    if result.returncode != 0 or list(answers) != wanted:
        raise RuntimeError(result.stdout)
    return [version for version, answer in answers.items() if answer in ("1", "TRUE")]


def accepted_versions(root, scratch):
    """Before 1.0 a request for another minor version is refused, and so is one for a newer patch version."""
    major, minor, patch = version_of(root)
    now, before, after = f"{major}.{minor}", f"{major}.{minor - 1}", f"{major}.{minor + 1}"
    exact, newer = f"{now}.{patch}", f"{now}.{patch + 1}"
    accepted = ["", now, exact, f"{exact} EXACT", f"{now}...{exact}", f"{now}...<{after}", f"{before}...<{after}", f"{before}...{after}"]
    refused = [before, f"{before}.0", after, f"{major}", f"{major + 1}.0", f"{major + 1}.{minor}", newer, f"{newer} EXACT",
               f"{before}...<{exact}", f"{newer}...<{after}", f"{after}...{major + 1}.0"]
    found = found_versions(root, scratch / "versions", accepted + refused)
    return ([f"refused: find_package(Sidestream {version})" for version in accepted if version not in found] +
            [f"accepted: find_package(Sidestream {version})" for version in refused if version in found])


def binary_version(root):
    """Both libraries, and what the CMake package says of them, have the major and the minor version in their names."""
    major, minor, _ = version_of(root)
    config = next(root.glob("**/SidestreamConfig.cmake")).read_text()
    problems = []
    for library in ("libsidestream.so", "libsidestream_sim.so"):
        name = f"{library}.{major}.{minor}"
        dynamic = subprocess.run(["readelf", "-d", next(root.glob(f"**/{library}"))], text=True, capture_output=True, check=False).stdout
        if f"soname: [{name}]" not in dynamic:
            problems += [f"not {name}:", *[line for line in dynamic.splitlines() if "SONAME" in line]]
        if f"IMPORTED_SONAME {name}\n" not in config:
            problems.append(f"SidestreamConfig.cmake: not {name}")
    return problems


def other_torch(root, scratch):
    """The package as it is when its LibTorch was replaced, or is gone: refused, and the reason names both versions."""
    config = next(root.glob("**/SidestreamConfig.cmake"))
    include = re.search(r'INTERFACE_INCLUDE_DIRECTORIES "([^;"]+);', config.read_text()).group(1)
    built_with = re.search(r"built with (LibTorch \S+),", config.read_text()).group(1)
    problems = []
    for header, text, reason in [("torch/headeronly/version.h", '#define TORCH_VERSION \\\n  "1.2.3"\n', "now has LibTorch 1.2.3"),
                                 ("torch/csrc/api/include/torch/version.h", '#define TORCH_VERSION "1.2.3"\n', "now has LibTorch 1.2.3"),
                                 ("empty.h", "", "now has no LibTorch")]:
        moved = scratch / header.replace("/", "_")
        replaced = moved / "torch" / header
        replaced.parent.mkdir(parents=True)
        replaced.write_text(text)
        package = moved / "share" / "cmake" / "Sidestream"
        shutil.copytree(config.parent, package)
        (package / config.name).write_text(config.read_text().replace(include, str(moved / "torch")))
        project = moved / "project"
        project.mkdir()
        (project / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.20)\nproject(trainer NONE)\n"
                                                "find_package(Sidestream REQUIRED CONFIG)\n")
        said = " ".join("".join(run(["cmake", "-S", project, "-B", moved / "build", f"-DCMAKE_PREFIX_PATH={moved}"])).split())
        if f"built with {built_with}" not in said or reason not in said:
            problems.append(f"{header}: not refused with '{built_with}' and '{reason}': {said}")
    return problems


def main(meson, build, prefix, source, compiler):
    tap = Tap()
    # Meson's tests run with the build folder in it, and what is built here must find the installed library by itself.
    os.environ.pop("LD_LIBRARY_PATH", None)
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = pathlib.Path(scratch_name)
        if shutil.which("ccache"):
            os.environ.update(CMAKE_CXX_COMPILER_LAUNCHER="ccache", CCACHE_BASEDIR=str(scratch))
        for project in ("consumer", "checking"):
            shutil.copytree(HERE / project, scratch / "projects" / project)
        stage = scratch / "stage"
        problem = run([*meson, "install", "-C", build, "--no-rebuild", "--quiet"], env={**os.environ, "DESTDIR": str(stage)})
        tap.case("meson install", problem)
        if not problem:
            # Moved out of the staging folder, so that what is built against it shows that the tree can be relocated.
            root = scratch / "installed"
            shutil.move(str(stage) + prefix, root)
            tap.case("headers, library, pkg-config file and CMake package, and no internal header", installed_files(root))
            if (root / "bin").exists():
                tap.case("the installed program finds its library", installed_program(root))
            tap.case("find_package takes this minor version only", accepted_versions(root, scratch))
            tap.case("libraries are named by major and minor version", binary_version(root))
            tap.case("another LibTorch than the one of the build is refused", other_torch(root, scratch))
            tap.case("the package forces no definition", no_definition(root))
            tap.case("a C++17 consumer by pkg-config, without NDEBUG", with_pkg_config(root, scratch, compiler))
            tap.case("a C++17 consumer by CMake, with NDEBUG",
                     with_cmake(root, scratch / "projects" / "consumer", scratch / "by_cmake", compiler, []))

            tap.case("the component for testing by pkg-config", checking_with_pkg_config(root, scratch, compiler))
            tap.case("the component for testing by CMake",
                     with_cmake(root, scratch / "projects" / "checking", scratch / "checking_by_cmake", compiler, []))

            examples = source / "examples"
            tap.case("every example is built here", [f"examples/{path.name}: not in EXAMPLES" for path in examples.iterdir()
                                                     if path.is_dir() and path.name not in EXAMPLES])
            for name, arguments in EXAMPLES.items():
                # A copy, so that nothing outside of its folder can be part of the example.
                copy = scratch / "examples" / name
                shutil.copytree(examples / name, copy)
                tap.case(f"examples/{name}", with_cmake(root, copy, scratch / f"build_{name}", compiler, arguments, copy))

            shown = scratch / "trainer"
            names = readme_program.write((source / "README.md").read_text(), shown)
            tap.case("README shows a project", [] if sorted(names) == ["CMakeLists.txt", "trainer.cpp"] else [f"found {names}"])
            tap.case("README's project, as it stands",
                     with_cmake(root, shown, scratch / "build_trainer", compiler, [], build_type=""))
    tap.finish()


main(shlex.split(sys.argv[1]), sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4]), sys.argv[5:])
