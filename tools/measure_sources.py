#!/usr/bin/env python3
"""Measures the size and the structure of the sources, for docs/measurements.md.

usage: measure_sources.py [SOURCE_FOLDER]

Measure an earlier commit in a folder of its own: git archive COMMIT | tar x -C FOLDER
"""
import functools
import pathlib
import re
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
TYPE = re.compile(r"^(?:class|struct|enum class)\s+(?:\[\[[^\]]*\]\]\s+|SIDESTREAM_API\s+)*\w+[^;{()]*\{", re.MULTILINE)
FRIEND = re.compile(r"^\s*friend class (\w+);", re.MULTILINE)


def sources(root, *tops):
    """Headers and sources below `tops`, the simulator left out."""
    found = [path for top in tops for path in sorted((root / top).rglob("*")) if path.suffix in (".h", ".cpp")]
    return [path for path in found if not path.is_relative_to(root / "src" / "sim")]


def lines(paths):
    return sum(path.read_text().count("\n") for path in paths)


def groups_in_cycles(units):
    """Each unit's group: units that include each other, directly or through others, form one."""
    reached = {}
    for unit in units:
        seen, open_units = set(), [unit]
        while open_units:
            for other in units[open_units.pop()] - seen:
                seen.add(other)
                open_units.append(other)
        reached[unit] = seen
    return {unit: frozenset({unit} | {other for other in reached[unit] if unit in reached[other]}) for unit in units}


def levels(root, room):
    """The longest chain of includes in a room. A unit is a header with its source. Units in a cycle count one level each."""
    units = {path.stem: set() for path in sources(root, room)}
    for path in sources(root, room):
        included = {pathlib.Path(name) for name in INCLUDE.findall(path.read_text())}
        units[path.stem] |= {name.stem for name in included if (root / name).parent == root / room} - {path.stem}
    group = groups_in_cycles(units)

    @functools.cache
    def level(members):
        below = {group[other] for unit in members for other in units[unit]} - {members}
        return len(members) + max((level(other) for other in below), default=0)

    return max(level(members) for members in group.values())


def friend_uses(root):
    """Uses of private members by a friend class of another room, as `sequence_.name_` if the class's header is graph_sequence.h."""
    uses = 0
    for header in (path for path in sources(root, "graphs") if path.suffix == ".h"):
        for friend in FRIEND.findall(header.read_text()):
            files = [path for path in sources(root, "graphs") if path.parent != header.parent]
            if any(re.search(rf"^class {friend}\b[^;]*\{{", path.read_text(), re.MULTILINE) for path in files):
                variable = header.stem.split("_")[-1]
                use = re.compile(rf"\b{variable}_?(?:\.|->)[a-z]\w*_\b")
                uses += sum(len(use.findall(re.sub("//.*", "", path.read_text()))) for path in files)
    return uses


def measures(root):
    """Each measure with its value, and with a remark."""
    graphs = sources(root, "graphs")
    rooms = sorted({path.parent.relative_to(root).as_posix() for path in graphs})
    in_rooms = {room: levels(root, room) for room in rooms}
    deepest = max(in_rooms.values())
    types = sum(len(TYPE.findall(path.read_text())) for path in graphs if path.suffix == ".h")
    return {
        "library (include, src without sim, graphs), lines": (lines(sources(root, "include", "src", "graphs")), ""),
        "tests, lines": (lines(sources(root, "tests")), "C++ only"),
        "top-level types in graphs": (types, "in headers"),
        "uses of private members by a friend of another room": (friend_uses(root), ""),
        "levels of includes inside a room of graphs": (deepest, ", ".join(room for room in rooms if in_rooms[room] == deepest)),
        "files in graphs": (sum(path.is_file() for path in (root / "graphs").rglob("*")), ""),
    }


def main(root):
    for name, (value, remark) in measures(root).items():
        print(f"{name}: {value}{f' ({remark})' if remark else ''}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
