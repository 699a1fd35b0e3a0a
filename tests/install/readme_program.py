"""The program that README shows: its blocks of CMake and C++, as files of a project.

A block is marked by a comment line before it: <!-- file: NAME -->.
"""
import re

BLOCK = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files_of(readme):
    """Each file's name and text, in README's order."""
    return BLOCK.findall(readme)


def write(readme, folder):
    """Writes the files into `folder` and returns their names."""
    folder.mkdir()
    for name, text in files_of(readme):
        (folder / name).write_text(text)
    return [name for name, _ in files_of(readme)]
