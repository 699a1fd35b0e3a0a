"""tools/tidy_commands.py on a pretended build: one command a source, those of unity builds too.

Usage: tidy_commands_test.py TIDY_COMMANDS
"""
import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402


def entry(build, file, flag):
    return {"directory": str(build), "file": file, "command": f"c++ {flag} -o x.o -c {file}", "output": "x.o"}


def main(script):
    tap = Tap()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder).resolve()
        build = root / "build"
        (build / "tests.p").mkdir(parents=True)
        for name in ("alone.cpp", "first.cpp", "second.cpp"):
            (root / name).touch()
        (build / "tests.p" / "tests-unity0.cpp").write_text(f"#include<{root}/first.cpp>\n#include<{root}/second.cpp>\n")
        (build / "compile_commands.json").write_text(json.dumps([
            entry(build, "../alone.cpp", "-Done"), entry(build, "../alone.cpp", "-Dtwo"),
            entry(build, "tests.p/tests-unity0.cpp", "-Dtests"), entry(build, "generated_later.cpp", "-Dlater")]))
        result = subprocess.run([sys.executable, script, build, build / "tidy"], text=True, capture_output=True, check=False)
        tap.case("commands are written", [result.stderr] if result.returncode else [])
        written = {command["file"]: command for command in
                   json.loads((build / "tidy" / "compile_commands.json").read_text())}
        files = sorted(pathlib.Path(file).name for file in written)
        tap.case("one for each source that is there", [] if files == ["alone.cpp", "first.cpp", "second.cpp"] else files)
        alone = written[str(root / "alone.cpp")]["command"]
        tap.case("the first, where several programs compile it", [] if "-Done" in alone else [alone])
        second = written[str(root / "second.cpp")]
        expected = {"directory": str(build), "file": f"{root}/second.cpp", "command": f"c++ -Dtests -o x.o -c {root}/second.cpp"}
        tap.case("a part of a unity file by itself", [] if second == expected else [second])
    tap.finish()


main(sys.argv[1])
