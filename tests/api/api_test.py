"""The API reference: built without a warning from the public headers, and nothing of it names internals or folders of this machine.

Usage: api_test.py SOURCE_FOLDER VERSION
"""
import pathlib
import re
import shutil
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402

BUILDER_FOLDER = "meson/api"
# Pages of these must be there.
DOCUMENTED = ("OffloadEngine", "Step", "Options", "GraphOptions", "CallOptions", "OffloadScope", "GraphedCallable", "BucketOptions",
              "GraphedStep", "AdamW", "Report", "ArgumentTraits", "ScheduleCheck")
FUNCTIONS = ("find_device", "call", "stays", "owning", "make_graphed_callables", "make_graphed_step", "clip_grad_norm_", "set_schedule")
INTERNAL = re.compile(r"detail::|detail/|_1_1detail")


def copy_of(source, folder):
    """What the reference is made from, for a test that changes it."""
    for part in ("include", BUILDER_FOLDER):
        shutil.copytree(source / part, folder / part)
    return folder


def missing_pages(html):
    names = {re.sub(r"^(class|struct)sidestream_1_1|\.html$", "", path.name) for path in html.glob("*sidestream_1_1*.html")}
    functions = (html / "namespacesidestream.html").read_text()
    return ([f"no page of {name}" for name in DOCUMENTED if name not in names] +
            [f"no description of {name}" for name in FUNCTIONS if f">{name}</a>" not in functions])


def pages_with(html, pattern):
    return [f"{path.name}: {found.group(0)}" for path in sorted(html.rglob("*.html"))
            if (found := pattern.search(path.read_text()))]


def main(source, version):
    sys.path.insert(0, str(source / BUILDER_FOLDER))
    import build_api

    tap = Tap()
    if shutil.which("doxygen") is None:
        print("1..0 # SKIP Doxygen is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        html = folder / "api" / "html"
        problems = build_api.build(source, folder / "api", version)
        tap.case("the reference is built without a warning", problems)
        if not problems:
            tap.case("it has the classes and functions of a trainer", missing_pages(html))
            tap.case("it names nothing internal", pages_with(html, INTERNAL))
            tap.case("it names no folder of this machine", pages_with(html, re.compile(re.escape(str(source)))))
        changed = copy_of(source, folder / "changed")
        header = changed / "include" / "sidestream" / "scope.h"
        header.write_text(header.read_text().replace("  /// Begins the scope.\n", ""))
        tap.case("a member without a comment is a warning",
                 [] if build_api.build(changed, folder / "other", version) else ["it was built all the same"])
    path = build_api.shutil.which
    build_api.shutil.which = lambda name: None
    said = build_api.build(source, pathlib.Path("none"), version)
    build_api.shutil.which = path
    tap.case("without Doxygen it says what to install", [] if "apt-get install" in "".join(said) else said)
    tap.finish()


main(pathlib.Path(sys.argv[1]), sys.argv[2])
