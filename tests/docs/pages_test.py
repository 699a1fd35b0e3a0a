"""The documents are consistent with the repository: links, figures, quoted messages, and lengths.

Usage: pages_test.py SOURCE_FOLDER
"""
import json
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))
import message_texts  # noqa: E402
import page_checks  # noqa: E402
from tap import Tap  # noqa: E402

MOST_IN_A_CELL = 120
MOST_LINES_OF_TUTORIAL = 120
SOURCES = ("include", "src", "graphs", "tools", "tests", "examples", "meson")


def pages_of(root):
    return [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((root / "docs").glob("*.md"))


def sources_of(root):
    """Sources and scripts, but for these tests, which name documents that do not exist."""
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            text = path.is_file() and path.suffix in (".h", ".cpp", ".py", ".build", ".md", ".txt", "")
            if text and HERE not in path.parents and "corpus" not in path.parts:
                yield path


def faults_are_found():
    """Every check finds the fault that it is for, and nothing in a page without it."""
    problems = []

    def expect(what, found, count):
        if len(found) != count:
            problems.append(f"{what}: {len(found)} problems instead of {count}: {found}")

    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "docs" / "measurements").mkdir(parents=True)
        (root / "docs" / "there.md").write_text("# A title\n\n## Part one: `x`, two\n\n## Same\n\n## Same\n")
        (root / "docs" / "measurements" / "run.json").write_text(json.dumps({"step_ms": 270.44, "bytes": 3331330048, "note": "1.005"}))
        (root / "docs" / "measurements" / "ratios.json").write_text(json.dumps(
            {"layers": 12, "modes": [{"step_over_graphs": 1.922}, {"forecast_ms": 55.4, "step_ms_median": 50}]}))
        good = "[a](docs/there.md) [b](docs/there.md#part-one-x-two) [c](docs/there.md#same-1) [d](https://x.y) [e](#own)\n\n# Own\n"
        expect("good links", page_checks.links(root, "README.md", good), 0)
        expect("a link in code", page_checks.links(root, "README.md", "`[a](no.md)`\n\n```\n[b](no.md)\n```\n"), 0)
        expect("a link to no file", page_checks.links(root, "README.md", "[a](docs/no.md) ![p](no.svg)"), 2)
        expect("a link to no heading", page_checks.links(root, "README.md", "[a](docs/there.md#part) [b](#own)"), 2)
        expect("a mention", page_checks.mentions(root, "x.h", "// see docs/there.md\n// and docs/gone.md"), 1)
        expect("cells", page_checks.long_cells("a.md", f"| {'x' * 120} | y |\n", 120), 0)
        expect("a long cell", page_checks.long_cells("a.md", f"| y | {'x' * 121} |\n", 120), 1)
        expect("lines", page_checks.too_long("a.md", "x\n" * 120, 120) + page_checks.too_long("a.md", "x\n" * 121, 120), 1)
        table = "| | step | over | offloaded |\n|---|---|---|---|\n| **ours** | **270.4 ms** | 1.005 | 3,177 MiB |\n\n"
        link = "Figures: [run](docs/measurements/run.json).\n"
        expect("figures", page_checks.readme_figures(root, "![p](p.svg)\n\n" + link + "\n" + table + link), 0)
        expect("a table without a file", page_checks.readme_figures(root, table + "## Next\n\n" + link), 1)
        expect("a picture without a file", page_checks.readme_figures(root, "![p](p.svg)\n\ntext\n"), 1)
        expect("a missing file", page_checks.readme_figures(root, table + link.replace("run.", "gone.")), 1)
        expect("wrong figures", page_checks.readme_figures(root, table.replace("270.4", "269.9").replace("177", "178") + link), 2)
        prose = "A step takes 270.4 ms.\n\n"
        expect("a paragraph without a file", page_checks.readme_figures(root, prose + link), 1)
        expect("a paragraph further down", page_checks.readme_figures(root, "## Next\n\n" + prose), 0)
        expect("paragraphs", page_checks.readme_figures(root, (prose.strip() + " " + link) + "\n- pieces of 1 MiB\n"), 0)
        expect("a wrong paragraph", page_checks.readme_figures(root, (prose.strip() + " " + link).replace("270", "271")), 1)
        ratios = "Steps take 1.92\ntimes as long, forecasts are 11 percent off ([run](docs/measurements/ratios.json)).\n"
        expect("ratios", page_checks.readme_figures(root, ratios + "\n" + ratios.replace("11 percent", "11 to 92 percent")), 0)
        expect("ratios without a file", page_checks.readme_figures(root, "Steps take 1.92 times as long.\n\n" + link), 1)
        expect("a wrong ratio", page_checks.readme_figures(root, ratios.replace("1.92", "1.52")), 1)
        expect("a ratio that is a count", page_checks.readme_figures(root, ratios.replace("1.92", "12")), 1)
        expect("wrong percent", page_checks.readme_figures(root, ratios.replace("11 percent", "12 to 93 percent")), 2)
        expect("a wrong list", page_checks.readme_figures(root, "- it takes 269 ms, " + link), 1)
        expect("a table without measurements", page_checks.readme_figures(root, "| a | b |\n|---|---|\n| 1 | two |\n"), 0)
        tests = 'TEST(ATest, One) {\nTEST_F(BTest,\n       Two) {\n{"a_program", 1}\n'
        rows = "| x | what | test |\n|---|---|---|\n| y | left out | no reason. None |\n"
        named = "| y | z | ATest.One, BTest.Two, ATest, .One (program `a_program`) |\n"
        expect("tests", page_checks.tests_named("a.md", rows + named + "\nNoTest.Case in prose\n", tests), 0)
        expect("tests that are gone", page_checks.tests_named("a.md", rows + named.replace("Two", "Three").replace("a_p", "p"), tests), 2)
        expect("suites that are gone", page_checks.tests_named("a.md", rows + "| y | z | CTest, ATest.One, .Two |\n", tests), 2)
        expect("a row without a test", page_checks.tests_named("a.md", rows + "| y | z | later |\n", tests), 1)
        source = 'f("the page " + x + " is\\" " "full"\n  "now")\nNLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(T, one,\n two)'
        said = "\n".join(message_texts.texts_of(source))
        expect("quotes", page_checks.quoted_messages('| `is" fullnow`, `two` | x |\n| the page | `y` |\n', said), 0)
        expect("a stale quote", page_checks.quoted_messages("| `is empty` | x |\n", said), 1)
    return problems


def main(root):
    tap = Tap()
    tap.case("each check finds its fault", faults_are_found())
    for page in pages_of(root):
        name = page.relative_to(root).as_posix()
        tap.case(f"links of {name}", page_checks.links(root, name, page.read_text()))
    tap.case("documents that sources name", [problem for path in sources_of(root) for problem in page_checks.mentions(
        root, path.relative_to(root).as_posix(), path.read_text(errors="replace"))])
    tap.case("figures of README", page_checks.readme_figures(root, (root / "README.md").read_text()))
    tap.case("cells of docs/contract.md",
             page_checks.long_cells("docs/contract.md", (root / "docs/contract.md").read_text(), MOST_IN_A_CELL))
    tutorial = root / "docs/tutorial.md"
    tap.case("length of docs/tutorial.md", page_checks.too_long("docs/tutorial.md", tutorial.read_text(), MOST_LINES_OF_TUTORIAL)
             if tutorial.exists() else ["docs/tutorial.md does not exist; it is where a reader of README goes next"])
    tap.case("messages that docs/troubleshooting.md quotes",
             page_checks.quoted_messages((root / "docs/troubleshooting.md").read_text(), message_texts.all_texts(root)))
    tests = "\n".join(path.read_text() for path in sorted((root / "tests").rglob("*.cpp")))
    tap.case("tests that docs/conformance.md names",
             page_checks.tests_named("docs/conformance.md", (root / "docs/conformance.md").read_text(), tests))
    tap.finish()


main(pathlib.Path(sys.argv[1]).resolve())
