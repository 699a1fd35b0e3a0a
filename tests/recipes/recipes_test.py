"""The C++ blocks of docs/recipes.md and docs/pipelines.md, and named ones of other pages, compile as C++17 against the public headers.
They run on the simulated device.

A block follows a line <!-- recipe: NAME -->. It takes the place of the line "//@ NAME" of program.cpp, which then has a function for
each recipe. All blocks are one program, compiled once.

Usage: recipes_test.py SOURCE_FOLDER OUTPUT_FOLDER LIBRARY_FOLDER TORCH_LIBRARY_FOLDER COMPILER... -- ARGUMENT...
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tap import Tap  # noqa: E402

WHOLE_PAGES = ("docs/recipes.md", "docs/pipelines.md")  # each block has a name
PAGES = WHOLE_PAGES + ("docs/offload.md", "docs/reference.md")
BLOCK = re.compile(r"^<!-- recipe: ([^\n]+) -->\n```cpp\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"^ *//@ (.+)$", re.MULTILINE)
ERROR = re.compile("(" + "|".join(map(re.escape, PAGES)) + r"):(\d+):\d+:\s+(?:fatal )?(error: .*|required from here)")


class Block:
    def __init__(self, path, page, match):
        self.path = path
        self.name = match[1]
        self.code = match[2]
        self.first = page.count("\n", 0, match.start(2)) + 1
        self.last = self.first + self.code.count("\n") - 1


def problems_of_names(pages, blocks, template):
    """Each C++ block of a whole page has a name, and each name has one place in the program."""
    problems = []
    for path, page in pages.items():
        unnamed = page.count("\n```cpp\n") - sum(block.path == path for block in blocks)
        if unnamed and path in WHOLE_PAGES:
            problems.append(f"{path}: {unnamed} C++ blocks have no name; write <!-- recipe: NAME --> on the line before each")
    names = [block.name for block in blocks]
    places = PLACE.findall(template)
    problems += [f"two blocks are named '{name}'; give each its own name" for name in set(names) if names.count(name) > 1]
    problems += [f"{block.path}: recipe '{block.name}' is not run; add a line '//@ {block.name}' to tests/recipes/program.cpp"
                 for block in blocks if block.name not in places]
    return problems + [f"tests/recipes/program.cpp: '//@ {name}' has no block in a page; add the block or remove the line"
                       for name in places if name not in names]


def program_of(blocks, template):
    """The template with the blocks in their places; the compiler names the page and its line for what is wrong in a block."""
    by_name = {block.name: block for block in blocks}

    def code(match):
        block = by_name.get(match[1])
        if block is None:
            return match[0]
        line = template.count("\n", 0, match.start()) + 2
        return f'#line {block.first} "{block.path}"\n{block.code}#line {line} "tests/recipes/program.cpp"'

    return '#line 1 "tests/recipes/program.cpp"\n' + PLACE.sub(code, template)


def problems_of_compilation(output, blocks):
    """For each recipe with an error its name and its first error; all of the output where no recipe has one."""
    found = {}
    for match in ERROR.finditer(output):
        for block in blocks:
            if block.path == match[1] and block.first <= int(match[2]) <= block.last:
                found.setdefault(block.name, f"{block.path}, line {match[2]}: recipe '{block.name}' does not compile: {match[3]}; "
                                             "write the recipe for the interface as it is now")
    return list(found.values()) + [output[-6000:]]


def main(source, output, libraries, torch_libraries, command):
    pages = {path: (source / path).read_text() for path in PAGES}
    template = (HERE / "program.cpp").read_text()
    blocks = [Block(path, page, match) for path, page in pages.items() for match in BLOCK.finditer(page)]
    tap = Tap()
    names = problems_of_names(pages, blocks, template)
    tap.case("every block has a place, and every place a block", names)
    if names:
        tap.finish()
    output.mkdir(parents=True, exist_ok=True)
    (output / "recipes.cpp").write_text(program_of(blocks, template))
    program = output / "recipes"
    split = command.index("--")
    compiler, arguments = command[:split], command[split + 1:]
    # In the folder of the program, so that a compiler cache finds it again from any folder.
    steps = [[*compiler, "-std=c++17", "-O0", *arguments, f"-I{source / 'include'}", "-c", "recipes.cpp", "-o", "recipes.o"],
             [compiler[-1], "recipes.o", "-o", "recipes", f"-L{libraries}", f"-L{torch_libraries}", "-lsidestream_sim", "-lsidestream",
              "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}:{torch_libraries}",
              f"-Wl,-rpath-link,{libraries}:{torch_libraries}"]]
    for step in steps:
        result = subprocess.run(step, cwd=output, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                                env={**os.environ, "LC_ALL": "C"})
        if result.returncode:
            break
    tap.case("every recipe compiles", problems_of_compilation(result.stdout, blocks) if result.returncode else [])
    if result.returncode:
        tap.finish()
    recipes = subprocess.run([program], text=True, capture_output=True, check=True).stdout.splitlines()
    for recipe in recipes:
        with tempfile.TemporaryDirectory() as scratch:
            ran = subprocess.run([program, recipe], cwd=scratch, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 check=False)
        tap.case(f"recipe '{recipe}' runs", [f"recipe '{recipe}' does not do what its page says:", ran.stdout[-4000:]]
                 if ran.returncode else [])
    tap.finish()


main(*(pathlib.Path(argument).resolve() for argument in sys.argv[1:5]), sys.argv[5:])
