"""Writes for clang-tidy how each source is compiled: one command for each file, from Meson's compile_commands.json.

Usage: tidy_commands.py BUILD_FOLDER OUTPUT_FOLDER

Meson's file names what is given to the compiler. A source that several programs compile is in it several times, and one that is
compiled together with others is in it only as a part of another file, which includes it.
"""
import json
import pathlib
import re
import sys

INCLUDED = re.compile(r"^#include<(/[^>]+)>$", re.MULTILINE)


def sources_of(file):
    """The sources that are compiled when `file` is."""
    return INCLUDED.findall(file.read_text()) if "-unity" in file.name else [str(file)]


def main(build, output):
    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = (pathlib.Path(entry["directory"]) / entry["file"]).resolve()
        for source in sources_of(file) if file.exists() else []:
            commands.setdefault(source, {
                "directory": entry["directory"],
                "file": source,
                "command": entry["command"].replace(f"-c {entry['file']}", f"-c {source}"),
            })
    output.mkdir(exist_ok=True)
    (output / "compile_commands.json").write_text(json.dumps(list(commands.values()), indent=1))


main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
