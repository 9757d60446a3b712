"""`python -m tests.support.program TEXT WORDS`: what `python -W ignore -c TEXT WORDS` does, for processes
that are forked from one with its imports done.
"""

from __future__ import annotations

import sys
import warnings

if __name__ == "__main__":
    _, text, *words = sys.argv
    sys.argv = ["-c", *words]
    warnings.simplefilter("ignore")
    exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
