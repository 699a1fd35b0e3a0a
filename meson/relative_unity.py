"""Names the joined sources of a unity build relative to the source folder, which is among the include folders. Meson names them by
absolute paths: then no two clones share what ccache keeps of them. Meson runs this after each set-up."""
import os
import pathlib

source = os.environ["MESON_SOURCE_ROOT"]
for path in pathlib.Path(os.environ["MESON_BUILD_ROOT"]).glob("**/*-unity*.cpp"):
    text = path.read_text()
    relative = text.replace(f"#include<{source}/", "#include<")
    if relative != text:
        path.write_text(relative)
