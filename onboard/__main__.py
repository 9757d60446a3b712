"""The program `onboard`, and `python -m onboard`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit, in one line where it is interrupted while its modules load, too."""
    try:
        from onboard.cli.interrupts import keep_interrupts

        keep_interrupts()
        from onboard.cli.main import main as run

        run()
    except KeyboardInterrupt:
        from onboard.errors import INTERRUPTED

        print("onboard: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
