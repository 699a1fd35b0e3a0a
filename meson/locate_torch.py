"""Prints the folder of the torch package that this Python would import, without importing it."""
import importlib.util
import sys

spec = importlib.util.find_spec("torch")
if spec is None or not spec.submodule_search_locations:
    sys.exit("no torch in " + sys.executable)
print(next(iter(spec.submodule_search_locations)))
