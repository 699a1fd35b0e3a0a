"""Writes a corpus as a fuzzer reads it: the bytes that .hex files stand for, other files as they are.

Usage: seeds.py CORPUS OUTPUT
"""
import pathlib
import sys


def main(corpus, output):
    output.mkdir(parents=True, exist_ok=True)
    for path in sorted(corpus.iterdir()):
        content = path.read_bytes()
        if path.suffix == ".hex":
            lines = path.read_text().splitlines()
            content = bytes.fromhex("".join(line.partition("#")[0] for line in lines))
        (output / path.stem).write_bytes(content)


main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
