"""Includes go one way: base <- runtime <- memory <- offload <- graphs <- tools, and the walls between the rooms stand.

Usage: layers_test.py SOURCE_FOLDER
"""
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402

# Rooms that a room's files may include, beside include/sidestream and itself.
MAY_INCLUDE = {
    "include": set(),
    "base": set(),
    "analysis": {"base"},
    "runtime": {"base", "analysis"},
    "observe": {"base", "analysis", "runtime"},
    "sim": {"base", "analysis", "runtime", "observe"},
    "memory": {"base", "analysis", "runtime"},
    "offload": {"base", "analysis", "runtime", "observe", "memory"},
    "graphs": {"base", "analysis", "runtime", "observe", "memory", "offload"},
    "examples": set(),
    "cli": {"examples"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
FLAG_IN_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*?(?<![\w-])(--[a-z][a-z-]*|sidestream (?:train|check|order|info))')
LIBTORCH_CUDA = {"src/runtime/cuda/libtorch.cpp", "src/runtime/cuda/libtorch_graph.cpp"}
COUNTS_REFERENCES = "graphs/outputs/storage_holders.h"
REFERENCE_COUNT = r"(?<!module)(?:\.|->)(?:weak_)?use_count\(\)|(?:\.|->)unique\(\)"  # who owns a module is another question
SLOW_HEADERS = {"torch/torch.h", "ATen/ATen.h", "torch/all.h", "torch/extension.h"}


def room_of(path):
    """The room that a file of the repository lies in, None for tests and benchmarks."""
    parts = path.parts
    if parts[0] == "include":
        return "include"
    if parts[0] == "src":
        return parts[1]
    if parts[0] in ("graphs", "examples"):
        return parts[0]
    if parts[:2] == ("tools", "cli"):
        return "cli"
    return None


def room_included(include, path, root):
    """The room that an include names, None for another project's or the file's own folder."""
    first, slash, _ = include.partition("/")
    if not slash:
        return None
    if first == "sidestream":
        return "include"
    if first == "tools" or (root / path.parent / include).exists():
        return room_of(pathlib.Path(include) if first == "tools" else path.parent / include)
    return first if first in MAY_INCLUDE else None


def backend_of(path_text):
    found = re.match(r"(?:src/)?(?:runtime/(cuda)|(sim))/", path_text)
    return found.group(1) or found.group(2) if found else None


class Repository:
    def __init__(self, root):
        self.includes = {}
        self.texts = {}
        self.root = root
        for folder in ("include", "src", "graphs", "examples", "tools"):
            for path in sorted((root / folder).rglob("*")):
                if path.suffix in (".h", ".cpp"):
                    relative = path.relative_to(root)
                    text = path.read_text()
                    self.texts[relative] = text
                    self.includes[relative] = INCLUDE.findall(text)

    def floors(self):
        for path, includes in self.includes.items():
            room = room_of(path)
            if room is None:
                continue
            for include in includes:
                other = room_included(include, path, self.root)
                if other not in (None, room, "include") and other not in MAY_INCLUDE[room]:
                    yield f"{path} includes {include}: {room} may not see {other}"

    def backends(self):
        for path, includes in self.includes.items():
            if room_of(path) is None:
                continue
            own = backend_of(path.as_posix())
            for include in includes:
                other = backend_of(include)
                if other is not None and own != other:
                    yield f"{path} includes {include}: a backend registers itself and is named by nobody"

    def within(self, floors):
        """Breaches of the one direction between the parts of a room: `floors` is the lowest part first."""
        for path, includes in self.includes.items():
            own = next((floor for floor in floors if path.as_posix().startswith(floor)), None)
            for include in includes:
                other = next((floor for floor in floors if ("src/" + include).startswith(floor) or include.startswith(floor)), None)
                if own is not None and other is not None and floors.index(other) > floors.index(own):
                    yield f"{path} includes {include}: {own} lies below {other}"

    def files_including(self, *prefixes):
        return sorted(path.as_posix() for path, includes in self.includes.items()
                      if room_of(path) is not None and any(include.startswith(prefixes) for include in includes))

    def files_matching(self, pattern):
        return sorted(path.as_posix() for path, text in self.texts.items()
                      if room_of(path) is not None and re.search(pattern, text))

    def slow_headers(self):
        for path, includes in self.includes.items():
            for include in SLOW_HEADERS.intersection(includes):
                yield f"{path} includes {include}: name the narrow headers"

    def insides_outside(self):
        """Examples and the command line are what a trainer is: they see the interface alone."""
        for path, includes in self.includes.items():
            for include in includes:
                if room_of(path) in ("cli", "examples") and include.startswith("sidestream/detail/"):
                    yield f"{path} includes {include}: include/sidestream/detail is no interface"

    def cuda_outside(self):
        for path in self.files_including("cuda_runtime", "c10/cuda/", "ATen/cuda/", "cuda.h"):
            if not path.startswith("src/runtime/cuda/"):
                yield f"{path} includes CUDA headers outside of src/runtime/cuda"

    def libtorch_cuda_outside(self):
        for path in self.files_including("c10/cuda/", "ATen/cuda/"):
            if path not in LIBTORCH_CUDA:
                yield f"{path} includes LibTorch's CUDA headers outside of {' and '.join(sorted(LIBTORCH_CUDA))}"

    def climbing(self):
        for path, includes in self.includes.items():
            for include in includes:
                if ".." in include.split("/"):
                    yield f"{path} includes {include}: name it from its root, so that these checks see it"

    def flags_in_texts(self):
        for path, text in self.texts.items():
            if room_of(path) not in (None, "cli", "examples"):
                for found in FLAG_IN_TEXT.findall(text):
                    yield f"{path} advises {found}: a library's caller has no command line; name the call to make"

    def unguarded(self):
        for path, text in self.texts.items():
            if path.suffix == ".h" and not text.startswith("#pragma once\n"):
                yield f"{path} does not begin with #pragma once"


def drawn_folders(text):
    """The folders that docs/design.md lists under "The tree", in its order."""
    section = text.split("## The tree\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^    (\S+)/ +\S", section, re.MULTILINE)


def folders_on_disk(root):
    """Those of the product with files of their own, and the top of what lies beside it."""
    folders = set()
    for top in ("include", "src", "graphs", "examples", "meson", "tools", "docs"):
        for path in (root / top).rglob("*"):
            if path.is_file() and path.name != "meson.build" and "__pycache__" not in path.parts:
                folders.add(path.parent.relative_to(root).as_posix())
    return folders | {"meson", "tests"}


def tree_problems(root):
    drawn, there = drawn_folders((root / "docs" / "design.md").read_text()), folders_on_disk(root)
    return ([f"docs/design.md does not list {folder}/" for folder in sorted(there - set(drawn))] +
            [f"docs/design.md lists {folder}/, which is not there" for folder in drawn if folder not in there])


def rooms_of_graphs(root):
    """The folders of graphs/ that docs/design.md lists, each with those that it may include."""
    page = (root / "docs" / "design.md").read_text()
    lines = page.split("A folder includes only the folders beside its name:\n\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return {room: set(others.split(", ")) - {"none"} for room, others in (line.split(maxsplit=1) for line in lines)}


def room_problems(repository, rooms):
    """The list is what the folders include, and each folder includes only those that stand above it."""
    there = {}
    for path, includes in repository.includes.items():
        if path.parts[0] == "graphs":
            room = there.setdefault(path.parts[1], set())
            room |= {include.split("/")[1] for include in includes if include.startswith("graphs/")} - {path.parts[1]}
    order = list(rooms)
    for room in sorted(set(there) | set(rooms)):
        listed, included = rooms.get(room, set()), there.get(room, set())
        if room not in rooms or room not in there:
            yield f"graphs/{room} is in one of the folder and the list of docs/design.md only"
        for other in sorted(listed ^ included):
            yield f"graphs/{room}: {other} is in one of its includes and the list of docs/design.md only"
        for other in sorted(listed & set(order)):
            if room in order and order.index(other) > order.index(room):
                yield f"docs/design.md lists {other} for graphs/{room}, which stands above it"


def files_of_walks(text):
    """The files that docs/design.md names in the lists of "Where to look"."""
    for line in text.split("## Where to look\n", 1)[1].split("\n## ", 1)[0].splitlines():
        if line.startswith("    "):
            yield from re.findall(r"[a-z_]+(?:/[a-z_0-9]+)+", line)


def walk_problems(root):
    files = list(files_of_walks((root / "docs" / "design.md").read_text()))
    bases = [root / (name if name.startswith(("src/", "include/")) else f"graphs/{name}") for name in files]
    return ([f"docs/design.md names {base.relative_to(root)}, which is not there" for base in bases
             if not any(base.with_suffix(suffix).exists() for suffix in (".h", ".cpp"))] + ([] if files else ["no walk is found"]))


def at_most_one(paths, what):
    return [f"{what}: {', '.join(paths)}"] if len(paths) > 1 else []


def main(root):
    repository = Repository(root)
    tap = Tap()
    tap.case("sources are found", [] if repository.texts else [f"none under {root}"])
    tap.case("includes go one way", list(repository.floors()))
    tap.case("nothing but itself includes a backend", list(repository.backends()))
    tap.case("the simulated device knows nothing of its reruns",
             list(repository.within(["src/sim/device/", "src/sim/rerun/"])))
    tap.case("inside graphs includes go one way, as docs/design.md lists them",
             list(room_problems(repository, rooms_of_graphs(root))))
    tap.case("CUDA headers stay in src/runtime/cuda", list(repository.cuda_outside()))
    tap.case("c10/cuda and ATen/cuda stay in two files", list(repository.libtorch_cuda_outside()))
    tap.case("one file installs the autograd engine hook",
             at_most_one(repository.files_matching(r"set_default_engine_stub\s*\("), "several files install it"))
    tap.case("one file numbers the entries in LibTorch's debug info",
             at_most_one(repository.files_matching(r"static_cast<c10::DebugInfoKind>"), "several files number them"))
    tap.case("base alone names NVTX", [f"{path} names NVTX" for path in repository.files_matching(r"nvtx(?:3/|[A-Z])")
                                       if not path.startswith("src/base/")])
    tap.case("one header of graphs counts references to tensors",
             [f"{path} counts references: ask {COUNTS_REFERENCES}" for path in repository.files_matching(REFERENCE_COUNT)
              if path.startswith("graphs/") and path != COUNTS_REFERENCES])
    tap.case("nothing includes LibTorch's slow headers", list(repository.slow_headers()))
    tap.case("examples and the command line see the interface alone", list(repository.insides_outside()))
    tap.case("no include climbs out of its folder", list(repository.climbing()))
    tap.case("no text of the library names a flag of the program", list(repository.flags_in_texts()))
    tap.case("docs/design.md lists the folders that there are", tree_problems(root))
    tap.case("docs/design.md walks through files that there are", walk_problems(root))
    tap.case("headers begin with #pragma once", list(repository.unguarded()))
    tap.finish()


main(pathlib.Path(sys.argv[1]).resolve())
