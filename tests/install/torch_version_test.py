"""The set-up of a build names a LibTorch that was never tried, and the list of those that were. No LibTorch is needed: the folder
given for it has a version and no libraries, so each set-up ends soon after.

Usage: torch_version_test.py MESON_COMMAND SOURCE_FOLDER
"""
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from tap import Tap  # noqa: E402

UNTRIED = "WARNING: Sidestream was never tried with LibTorch"


def said_of(version, meson, source, *options):
    """What Meson says of a LibTorch with this version."""
    with tempfile.TemporaryDirectory() as folder:
        torch = pathlib.Path(folder) / "torch"
        header = torch / "include" / "torch" / "csrc" / "api" / "include" / "torch" / "version.h"
        header.parent.mkdir(parents=True)
        header.write_text(f'#define TORCH_VERSION \\\n  "{version}"\n')
        (torch / "lib").mkdir()
        (torch / "lib" / "libtorch_cpu.so").touch()
        command = [*meson, "setup", pathlib.Path(folder) / "build", source, f"-Dtorch={torch}", "-Dcuda=disabled", *options]
        return subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False).stdout


def main(meson, source):
    tap = Tap()
    untried = said_of("1.2.3", meson, source)
    listed = re.search(UNTRIED + r" 1\.2\.3; it was tried with ([^;]*?)\. ", untried)
    tap.case("a LibTorch that was never tried is named, with the list", [] if listed else [untried])
    tap.case("the build goes on", [] if "Fatal" not in untried and "library 'c10' not found" in untried else [untried])
    fatal = said_of("1.2.3", meson, source, "--fatal-meson-warnings")
    tap.case("--fatal-meson-warnings refuses it", [] if UNTRIED in fatal and "library 'c10' not found" not in fatal else [fatal])

    versions = listed.group(1).split(", ") if listed else []
    for version in versions:
        tried = said_of(version, meson, source)
        tap.case(f"LibTorch {version} was tried", [] if UNTRIED not in tried and "library 'c10' not found" in tried else [tried])
    row = next((line for line in (source / "docs" / "installing.md").read_text().splitlines() if line.startswith("| LibTorch |")), "")
    tap.case("docs/installing.md lists the same", [] if versions and re.findall(r"\d+\.\d+\.\d+", row) == versions else [row])
    pinned = re.search(r"^torch==(\S+)$", (source / "requirements.txt").read_text(), re.MULTILINE)
    tap.case("tools/setup installs one of them", [] if pinned and pinned.group(1) in versions else ["requirements.txt: see torch=="])
    tap.finish()


main(shlex.split(sys.argv[1]), pathlib.Path(sys.argv[2]))
