"""What the sources say to a user: their string literals, those side by side joined as the compiler joins them, and names in JSON."""
import re

FOLDERS = ("include", "src", "graphs", "tools/cli")
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
# From one literal to the next of the same text: white space, or text that is put together while the program runs.
BETWEEN = re.compile(r"\s*(?:\+\s*)?$")
# The members of a type become names in JSON.
MEMBERS = re.compile(r"NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE\(([^)]*)\)")


def texts_of(source):
    """The literals of one C++ source; neighbours, and literals joined by a +, are one text. The members of a type are one text too."""
    texts = []
    end = None
    for match in LITERAL.finditer(source):
        text = match[1].replace('\\"', '"')
        if end is not None and BETWEEN.match(source[end:match.start()]):
            texts[-1] += text
        else:
            texts.append(text)
        end = match.end()
    return texts + MEMBERS.findall(source)


def all_texts(root):
    """One string that holds every text of the sources, one a line."""
    texts = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cpp"):
                texts += texts_of(path.read_text())
    return "\n".join(texts)
