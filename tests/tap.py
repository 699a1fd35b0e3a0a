"""The Test Anything Protocol, as Meson reads it: one line a case, so that each case is counted."""
import sys


class Tap:
    def __init__(self):
        self.cases = 0
        self.failures = 0

    def case(self, name, problems):
        """One case; it fails when `problems` (lines of text) is not empty."""
        self.cases += 1
        self.failures += bool(problems)
        print(f"{'not ok' if problems else 'ok'} {self.cases} - {name}")
        for problem in problems:
            for line in str(problem).splitlines():
                print(f"{name}: {line}", file=sys.stderr)

    def skip(self, name, reason):
        self.cases += 1
        print(f"ok {self.cases} - {name} # SKIP {reason}")

    def finish(self):
        print(f"1..{self.cases}", flush=True)
        sys.exit(1 if self.failures else 0)
