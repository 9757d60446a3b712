"""`python -m onboard`."""

from __future__ import annotations

from onboard.cli.main import main

if __name__ == "__main__":
    main()
