"""`python -m onboard.workflow.processes.started PID MODULE ...`: MODULE as a program that does not
outlive process PID, which starts it.
"""

from __future__ import annotations

import sys

from onboard.workflow.processes.orphans import die_with
from onboard.workflow.processes.programs import run_as_main

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    sys.exit(run_as_main(sys.argv[2:]))
