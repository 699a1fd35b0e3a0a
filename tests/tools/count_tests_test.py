"""What tools/count_tests.py makes of Meson's log: the last line and the exit status of tools/test.

Usage: count_tests_test.py COUNT_TESTS
"""
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tap import Tap  # noqa: E402

PASSED = '<testcase name="a" status="run"/>'
FAILED = '<testcase name="b" status="run"><failure message="x"/></testcase>'
SKIPPED = '<testcase name="c" status="run" result="skipped"><skipped message="no GPU"/></testcase>'
TWO_GPUS = SKIPPED.replace('"c"', '"reducer_nccl"')
OF_TWO_GPUS = SKIPPED.replace('"c"', '"c" classname="Wrapped/TwoGpusTest"')
DISABLED = '<testcase name="d" classname="DISABLED_Alone" status="notrun" result="suppressed"/>'


def outcome(count_tests, cases, meson_status=0, require_gpu=False):
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log.xml"
        if cases is not None:
            log.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        environment = {name: value for name, value in os.environ.items() if name != "SIDESTREAM_REQUIRE_GPU"}
        if require_gpu:
            environment["SIDESTREAM_REQUIRE_GPU"] = "1"
        result = subprocess.run([sys.executable, count_tests, log, str(meson_status)], env=environment, text=True,
                                capture_output=True, check=False)
        return result.stdout.splitlines()[-1], result.returncode


def expect(tap, name, got, line, status):
    tap.case(name, [] if got == (line, status) else [f"got {got}, expected {(line, status)}"])


def main(count_tests):
    tap = Tap()
    expect(tap, "passes and skips", outcome(count_tests, [PASSED, PASSED, SKIPPED]), "2 passed, 0 failed, 1 skipped", 0)
    expect(tap, "a failure", outcome(count_tests, [PASSED, FAILED], 1), "1 passed, 1 failed, 0 skipped", 1)
    expect(tap, "a program that crashes after its cases", outcome(count_tests, [PASSED], 1),
           "1 passed, 1 failed, 0 skipped", 1)
    expect(tap, "no log", outcome(count_tests, None), "0 passed, 1 failed, 0 skipped", 1)
    expect(tap, "no case", outcome(count_tests, []), "0 passed, 0 failed, 0 skipped", 1)
    expect(tap, "a skip where a GPU is required", outcome(count_tests, [PASSED, SKIPPED], require_gpu=True),
           "1 passed, 0 failed, 1 skipped", 1)
    expect(tap, "a skip for want of a second GPU", outcome(count_tests, [PASSED, TWO_GPUS, OF_TWO_GPUS], require_gpu=True),
           "1 passed, 0 failed, 2 skipped", 0)
    expect(tap, "a disabled case where a GPU is required", outcome(count_tests, [PASSED, DISABLED], require_gpu=True),
           "1 passed, 0 failed, 0 skipped", 0)
    tap.finish()


main(sys.argv[1])
