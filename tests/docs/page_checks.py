"""Checks of the documents. Each takes text and gives the problems it finds, as lines that say what to do."""
import difflib
import json
import re

FENCE = re.compile(r"^(```|~~~).*?^\1 *$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
TEST_CASE = re.compile(r"^(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", re.MULTILINE)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|\b(?:src|href)=\"([^\"]+)\"")
DOCUMENT = re.compile(r"\bdocs/[\w./-]+\.(?:md|svg|json)\b")
HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)? *$", re.MULTILINE)
MEASUREMENT = re.compile(r"docs/measurements/[\w.-]+\.json")
UNIT = r"(ms|s|MiB|GiB|GB/s|%|times|percent)(?!\w)"
FIGURE = re.compile(r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?)(?:\s?" + UNIT + r")?(?![\w.,-]*\d)(?![\w-])")
RANGE = re.compile(r"(\d)\s+to\s+(\d[\d,]*(?:\.\d+)?)\s?" + UNIT)
# What a measurement may have to be multiplied by to be in a figure's unit.
FACTORS = {"ms": (1, 1e3), "s": (1, 1e-3), "MiB": (1, 2 ** -20, 2 ** 10), "GiB": (1, 2 ** -30, 2 ** -10), "GB/s": (1,), "%": (1, 100),
           None: (1,)}


def blanked(text):
    """The text with what is no prose replaced by spaces, so that places in it stay."""
    def spaces(match):
        return re.sub(r"[^\n]", " ", match[0])

    return INLINE_CODE.sub(spaces, FENCE.sub(spaces, text))


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    found = []
    for heading in HEADING.findall(FENCE.sub("", page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        same = sum(1 for other in found if re.fullmatch(re.escape(anchor) + r"(-\d+)?", other))
        found.append(f"{anchor}-{same}" if same else anchor)
    return found


def links(root, name, page):
    """Each relative link leads to a file, and to a heading of it where it names one."""
    problems = []
    text = blanked(page)
    for match in LINK.finditer(text):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        where = f"{name}, line {text.count(chr(10), 0, match.start()) + 1}: the link '{target}'"
        path, _, anchor = target.partition("#")
        file = (root / name).parent / path if path else root / name
        if path and not file.exists():
            problems.append(f"{where} leads to no file; correct its path, or remove it")
        elif anchor and file.suffix == ".md":
            there = anchors(file.read_text() if path else page)
            if anchor not in there:
                near = difflib.get_close_matches(anchor, there, 1, 0)
                problems.append(f"{where} leads to no heading of {file.name}; the nearest there is '#{near[0] if near else ''}'")
    return problems


def mentions(root, name, text):
    """Each document that a source names by its path exists."""
    return [f"{name}, line {text.count(chr(10), 0, match.start()) + 1}: names {match[0]}, which does not exist; name the document "
            "that has its text now" for match in DOCUMENT.finditer(text) if not (root / match[0]).exists()]


def long_cells(name, page, most):
    """No cell of a table is longer than that many characters."""
    problems = []
    for number, line in enumerate(FENCE.sub(lambda m: "\n" * m[0].count("\n"), page).splitlines(), 1):
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                cell = cell.strip()
                if len(cell) > most:
                    problems.append(f"{name}, line {number}: a cell has {len(cell)} characters, at most {most} are allowed; let it say "
                                    f"one thing, and put the rest below its table: {cell[:50]}...")
    return problems


def too_long(name, page, most):
    lines = len(page.splitlines())
    return [] if lines <= most else [f"{name} has {lines} lines, at most {most} are allowed; move what is no first step to "
                                     "docs/reference.md"]


def numbers_of(value):
    """All numbers of a JSON value, those in texts of it too."""
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, (int, float)):
        return [float(value)]
    if isinstance(value, str):
        return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", value)]
    return [number for part in (value.values() if isinstance(value, dict) else value) for number in numbers_of(part)]


def ratios_of(value):
    """All ratios of a JSON value: numbers with "_over_" in their name, and forecasts of a time over the measured median."""
    found = []
    if isinstance(value, dict):
        found = [float(number) for name, number in value.items() if "_over_" in name and isinstance(number, (int, float))]
        if "forecast_ms" in value and "step_ms_median" in value:
            found.append(value["forecast_ms"] / value["step_ms_median"])
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return found + [ratio for part in parts for ratio in ratios_of(part)]


def stands_in(figure, unit, values):
    """True when some measurement in these JSON values, in the figure's unit and rounded as it is, is the figure.

    "1.92 times" is a ratio, "8 percent" the distance of a ratio from 1.
    """
    decimals = len(figure.partition(".")[2])
    shown = float(figure.replace(",", ""))
    half = 0.5000001 * 10 ** -decimals
    if unit == "times":
        measured = ratios_of(values)
    elif unit == "percent":
        measured = [abs(ratio - 1) * 100 for ratio in ratios_of(values)]
    else:
        measured = [number * factor for number in numbers_of(values) for factor in FACTORS[unit]]
    return any(abs(number - shown) <= half for number in measured)


def blocks_of(page):
    """The first line's number and the lines of each paragraph, table and heading."""
    block, first = [], 0
    for number, line in enumerate([*page.splitlines(), ""], 1):
        if line.strip():
            first = first if block else number
            block.append(line)
        elif block:
            yield first, block
            block = []


def prose_figures(text):
    """Figures with a unit, outside of code and of links. Both ends of a range have its unit."""
    prose = RANGE.sub(r"\1 \3 to \2 \3", re.sub(r"\]\([^)]*\)", "]", blanked(text)))
    return [match.groups() for match in FIGURE.finditer(prose) if match[2]]


def readme_figures(root, page):
    """Each picture, and each table with measured times or sizes, is followed by a link to the JSON file that its figures come from.

    The link comes before the next picture, table of figures or heading. The file exists, and has each figure of the table. A paragraph
    above the first section has the link itself, if it has such figures; there a list is held to the files that it links.
    """
    problems = []
    first_screen = True
    shown = []  # pictures and tables without a file so far: their line, and their figures
    text = FENCE.sub(lambda m: "\n" * m[0].count("\n"), page)

    def unproved():
        return [f"README.md, line {line}: a picture or table of figures has no link to its measurements before the next one; name the "
                "file below it, as in [measurements](docs/measurements/NAME.json)" for line, _ in shown]

    for line, block in blocks_of(text):
        joined = "\n".join(block)
        table = block[0].startswith("|")
        figures = [match.groups() for row in block[2:] for cell in row.split("|") if not re.search(r"\]\(", cell)
                   for match in FIGURE.finditer(cell.replace("*", ""))] if table else []
        measured = any(unit for _, unit in figures)
        if block[0].startswith("#") or "![" in joined or "<img" in joined or measured:
            problems += unproved()
            shown = []
        if "![" in joined or "<img" in joined or measured:
            shown.append((line, figures if measured else []))
        files = [] if table else MEASUREMENT.findall(joined)
        first_screen = first_screen and not block[0].startswith("## ")
        if first_screen and not table and (files or not block[0].startswith("- ")) and prose_figures(joined):
            if files:
                shown.append((line, prose_figures(joined)))
            else:
                problems.append(f"README.md, line {line}: a paragraph of figures has no link to its measurements; name the file in it, "
                                "as in [JSON](docs/measurements/NAME.json)")
        values = []
        for file in files:
            if (root / file).exists():
                values.append(json.loads((root / file).read_text()))
            else:
                problems.append(f"README.md, line {line}: {file} does not exist; add the measurement, or name the file that has it")
        if values:
            for at, of in shown:
                problems += [f"README.md, figures at line {at}: {figure}{' ' + unit if unit else ''} is not in {' or '.join(files)}; "
                             "correct the figure, or add its measurement" for figure, unit in of if not stands_in(figure, unit, values)]
        if files:
            shown = []
    return problems + unproved()


def quoted_messages(page, texts):
    """Each text in code in the first column of a table is a part of what the sources say."""
    problems = []
    for number, line in enumerate(page.splitlines(), 1):
        if line.startswith("|"):
            for fragment in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", line)[1]):
                if fragment not in texts:
                    problems.append(f"docs/troubleshooting.md, line {number}: no source says '{fragment}'; quote the message as it is "
                                    "now, or remove the row")
    return problems


def tests_named(name, page, sources):
    """Each row of a table names tests in its last cell, which exist, or is "left out". `sources`: the text of all tests.

    Tests are named as Suite.Case, .Case (of the suite before it) or as a suite: a word that ends with "Test" or begins with "Conformance".
    Code is a text that tests have, such as the name of a program.
    """
    cases = {f"{suite}.{case}" for suite, case in TEST_CASE.findall(sources)}
    suites = {case.partition(".")[0] for case in cases}
    problems, body = [], False
    for number, line in enumerate(page.splitlines(), 1):
        head, body = not body, line.startswith("|") and (body or line.startswith("|---"))
        if not body or head:
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        suite, found = "", cells[1].startswith("left out")
        for match in re.finditer(r"(?:\b([A-Z]\w*))?\.([A-Z]\w+)|\b([A-Z]\w*Test|Conformance\w+)\b|`([^`]+)`", cells[-1]):
            suite = match[1] or match[3] or suite
            known = f'"{match[4]}"' in sources if match[4] else suite in suites if match[3] else f"{suite}.{match[2]}" in cases
            found = found or not match[4]
            if not known:
                problems.append(f"{name}, line {number}: there is no test '{match[0]}'; name the test that checks this now")
        if not found:
            problems.append(f"{name}, line {number}: names no test; name one, or say 'left out' and why")
    return problems
