"""The pictures of docs/pipelines.md are, byte for byte, what the program draws with the command that stands above each.

Where the output stands between the two, it is what the command prints.

Usage: orders_test.py SOURCE_FOLDER PROGRAM
"""
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tap import Tap  # noqa: E402

PAGE = "docs/pipelines.md"
COMMAND = re.compile(r"^    sidestream (\w+ .*) --svg (docs/\S+\.svg)\n\n((?:(?: {6}.*)?\n)*)!\[[^\]]+\]\((\S+)\)$", re.MULTILINE)


def problems_of(root, program, command, file, printed, shown):
    if file != f"docs/{shown}":
        return [f"{PAGE}: the command for {file} stands above {shown}; name the same file in both"]
    with tempfile.TemporaryDirectory() as folder:
        drawn = pathlib.Path(folder) / "order.svg"
        ran = subprocess.run([program, *shlex.split(command), "--svg", str(drawn)], text=True, capture_output=True, check=False)
        if ran.returncode:
            return [f"{PAGE}: 'sidestream {command}' fails: {ran.stderr}"]
        if printed and textwrap.dedent(printed).rstrip() != ran.stdout.rstrip():
            return [f"{PAGE}: 'sidestream {command}' prints something else:\n{ran.stdout}"]
        if not (root / file).exists() or (root / file).read_bytes() != drawn.read_bytes():
            return [f"{file} is not what the program draws; draw it again: build/sidestream {command} --svg {file}"]
    return []


def main(root, program):
    page = (root / PAGE).read_text()
    commands = COMMAND.findall(page)
    tap = Tap()
    tap.case("each picture has its command", [] if len(commands) == page.count("](pipeline_") == 4 else [
        f"{PAGE}: {len(commands)} commands for {page.count('](pipeline_')} pictures; write the command above its picture"])
    for command, file, printed, shown in commands:
        tap.case(f"{file} is drawn by the program", problems_of(root, program, command, file, printed, shown))
    tap.finish()


main(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2])
