"""Counts the test cases in Meson's JUnit log: `N passed, N failed, N skipped`, GoogleTest's cases one by one.

Usage: count_tests.py LOG MESON_STATUS. Exit 1 on a failed case, when Meson failed, when no case ran, and on a skipped
case where SIDESTREAM_REQUIRE_GPU=1, unless it is one of those that need two GPUs.
"""
import os
import sys
import xml.etree.ElementTree as ElementTree

NEED_TWO_GPUS = ("_nccl", "TwoGpus")  # parts of their names


def count(log):
    """Cases by result. A test program that reports no cases of its own is one case in Meson's log. Disabled cases are not
    counted: other cases run them, in processes of their own."""
    totals = {"passed": 0, "failed": 0, "skipped": 0, "unneeded": 0}
    for case in ElementTree.parse(log).getroot().iter("testcase"):
        name = case.get("classname", "") + "." + case.get("name", "")
        if "DISABLED_" in name:
            continue
        if case.find("failure") is not None or case.find("error") is not None:
            totals["failed"] += 1
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            totals["skipped"] += 1
            totals["unneeded"] += any(part in name for part in NEED_TWO_GPUS)
        else:
            totals["passed"] += 1
    return totals


def main(log, meson_status):
    try:
        totals = count(log)
    except (OSError, ElementTree.ParseError) as problem:
        print(f"count_tests: {problem}", file=sys.stderr)
        totals = {"passed": 0, "failed": 1, "skipped": 0, "unneeded": 0}
    if meson_status != 0 and totals["failed"] == 0:
        totals["failed"] = 1  # a program failed outside of its cases: a crash, a time-out, an unexpected warning
    skip_fails = os.environ.get("SIDESTREAM_REQUIRE_GPU") == "1" and totals["skipped"] > totals["unneeded"]
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**totals))
    return 1 if totals["failed"] or skip_fails or not totals["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
