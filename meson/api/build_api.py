"""Builds the API reference with Doxygen, and fails on every warning.

Usage: build_api.py SOURCE_FOLDER OUTPUT_FOLDER VERSION
"""
import pathlib
import shutil
import subprocess
import sys


def build(source, output, version):
    """Lines that say what is wrong; none if output/html is complete."""
    doxygen = shutil.which("doxygen")
    if doxygen is None:
        return ["Doxygen is not installed; run tools/setup --api, or on Debian: apt-get install --no-install-recommends doxygen"]
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    text = (source / "meson" / "api" / "Doxyfile.in").read_text()
    for name, value in {"SOURCE": source, "OUTPUT": output, "VERSION": version}.items():
        text = text.replace(f"@{name}@", str(value))
    doxyfile = output / "Doxyfile"
    doxyfile.write_text(text)
    run = subprocess.run([doxygen, str(doxyfile)], capture_output=True, text=True, check=False)
    log = output / "warnings.txt"
    problems = log.read_text().splitlines() if log.exists() else []
    if run.returncode != 0:
        problems.append(f"doxygen failed with {run.returncode}: {run.stderr.strip()}")
    if not (output / "html" / "index.html").exists():
        problems.append(f"no page was written under {output / 'html'}")
    return problems


if __name__ == "__main__":
    found = build(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])
    if found:
        sys.exit("\n".join(["api: the reference was not built, or has warnings:", *found]))
    print(f"api: {pathlib.Path(sys.argv[2]) / 'html' / 'index.html'}")
