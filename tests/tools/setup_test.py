"""tools/setup on a pretended machine: every command it calls is a stub, so that nothing is installed or downloaded.

Usage: setup_test.py SETUP
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402

REAL = ["cat", "cut", "dirname", "flock", "grep", "mkdir", "rm", "sh", "sha256sum", "sleep", "touch", "tr"]
PRESENT = "#!/bin/sh\nexit 0\n"
# Makes an environment, not over another, whose own python logs each installation and fails while the file `broken` exists.
PYTHON = """#!/bin/sh
case "$1" in
  -c) case $2 in *print*) echo 3.11 ;; esac ;;
  -m) mkdir "$3" "$3/bin" || exit 1
      printf '#!/bin/sh\\nsleep 0.2\\necho installed >>"$MACHINE/log"\\n[ ! -e "$MACHINE/broken" ]\\n' >"$3/bin/python"
      chmod +x "$3/bin/python" ;;
esac
"""


class Machine:
    """A folder that is the PATH, the home and the LibTorch of the script."""

    def __init__(self, folder):
        self.folder = folder
        self.commands = folder / "commands"
        self.commands.mkdir()
        for name in [*REAL, "chmod"]:
            (self.commands / name).symlink_to(shutil.which(name))
        for name in ("ccache", "g++", "pkg-config", "cmake", "make", "sudo"):
            self.add(name, PRESENT)
        self.add("python3", PYTHON)
        self.add("id", "#!/bin/sh\necho 1000\n")
        (folder / "torch" / "lib").mkdir(parents=True)
        (folder / "torch" / "lib" / "libtorch_cpu.so").touch()

    def add(self, name, text):
        path = self.commands / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, setup, *arguments):
        environment = {"PATH": str(self.commands), "HOME": str(self.folder), "MACHINE": str(self.folder),
                       "SIDESTREAM_TORCH": str(self.folder / "torch")}
        return subprocess.Popen(["/bin/sh", setup, *arguments], env=environment, text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, setup, *arguments):
        process = self.start(setup, *arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def installations(self):
        log = self.folder / "log"
        return len(log.read_text().splitlines()) if log.exists() else 0


def expect(condition, *seen):
    return [] if condition else [f"seen: {seen}"]


def main(setup):
    tap = Tap()

    def machine_case(name, check):
        with tempfile.TemporaryDirectory() as folder:
            tap.case(name, check(Machine(pathlib.Path(folder))))

    def prints_assignments(machine):
        status, out, err = machine.run(setup)
        lines = out.splitlines()
        return expect(status == 0 and len(lines) == 3 and lines[0].startswith("SIDESTREAM_VENV='")
                      and lines[1] == f"SIDESTREAM_TORCH='{machine.folder / 'torch'}'"
                      and lines[2].startswith("export CCACHE_BASEDIR='"), status, out, err)

    def second_run_does_nothing(machine):
        machine.run(setup)
        status, _, err = machine.run(setup)
        return expect(status == 0 and err == "" and machine.installations() == 1, status, err, machine.installations())

    def two_at_once(machine):
        processes = [machine.start(setup), machine.start(setup)]
        results = [process.communicate(timeout=60) for process in processes]
        return expect(all(process.returncode == 0 for process in processes) and machine.installations() == 1
                      and results[0][0] == results[1][0], results, machine.installations())

    def interrupted(machine):
        (machine.folder / "broken").touch()
        first, _, _ = machine.run(setup)
        (machine.folder / "broken").unlink()
        second, _, err = machine.run(setup)
        return expect(first != 0 and second == 0 and machine.installations() == 2, first, second, err)

    def no_root_no_sudo(machine):
        (machine.commands / "sudo").unlink()
        (machine.commands / "cmake").unlink()
        (machine.commands / "g++").unlink()
        status, _, err = machine.run(setup)
        return expect(status == 1 and "apt-get install g++ cmake" in err and machine.installations() == 0, status, err)

    def installs_as_root(machine):
        (machine.commands / "cmake").unlink()
        machine.add("id", "#!/bin/sh\necho 0\n")
        machine.add("env", '#!/bin/sh\nshift\nexec "$@"\n')
        machine.add("apt-get", '#!/bin/sh\n[ "$1" = update ] || { shift 3; for package; do\n'
                               'printf "#!/bin/sh\\n" >"$MACHINE/commands/$package"; chmod +x "$MACHINE/commands/$package"\n'
                               'done; }\n')
        status, _, err = machine.run(setup)
        return expect(status == 0 and (machine.commands / "cmake").exists(), status, err)

    def packages_that_apt_has_not(machine):
        (machine.commands / "cmake").unlink()
        machine.add("id", "#!/bin/sh\necho 0\n")
        machine.add("env", '#!/bin/sh\nshift\nexec "$@"\n')
        machine.add("apt-get", '#!/bin/sh\n[ "$1" = update ] || exit 100\n')
        status, _, err = machine.run(setup)
        return expect(status == 1 and "could not install: cmake" in err and "universe" in err, status, err)

    def asked_for(option, programs, packages):
        """`packages`, which bring `programs`, are missing only if `option` asks for them."""
        def case(machine):
            (machine.commands / "sudo").unlink()
            plain, _, _ = machine.run(setup)
            missing, _, err = machine.run(setup, option)
            for program in programs:
                machine.add(program, PRESENT)
            there, _, _ = machine.run(setup, option)
            return expect(plain == 0 and missing == 1 and f"apt-get install {packages}" in err and there == 0, plain, missing, err, there)
        return case

    def pictures(machine):
        machine.run(setup)
        machine.run(setup, "--pictures")
        status, _, err = machine.run(setup, "--pictures")
        return expect(status == 0 and err == "" and machine.installations() == 2, status, err, machine.installations())

    def bad_torch(machine):
        (machine.folder / "torch" / "lib" / "libtorch_cpu.so").unlink()
        status, _, err = machine.run(setup)
        return expect(status == 1 and "no lib/libtorch_cpu.so" in err, status, err)

    def bad_argument(machine):
        status, _, err = machine.run(setup, "--fast")
        return expect(status == 1 and "--fast" in err and "usage" in err, status, err)

    machine_case("prints what it prepared", prints_assignments)
    machine_case("does nothing the second time", second_run_does_nothing)
    machine_case("two at once make one environment", two_at_once)
    machine_case("an environment that was not finished is made anew", interrupted)
    machine_case("without root and sudo says what to install", no_root_no_sudo)
    machine_case("installs what is missing as root", installs_as_root)
    machine_case("says what apt could not install", packages_that_apt_has_not)
    machine_case("asks for clang-tidy only where it is wanted", asked_for("--tidy", ["clang-tidy-14"], "clang-tidy-14"))
    machine_case("asks for Doxygen only where it is wanted", asked_for("--api", ["doxygen"], "doxygen"))
    machine_case("asks for Clang only where it is wanted",
                 asked_for("--clang", ["clang++-14", "llvm-symbolizer-14", "ld.lld-14"],
                          "clang-14 libclang-rt-14-dev lld-14 llvm-14"))
    machine_case("installs matplotlib once, where it is wanted", pictures)
    machine_case("refuses a LibTorch that is none", bad_torch)
    machine_case("refuses an unknown argument", bad_argument)
    tap.finish()


main(sys.argv[1])
