"""Puts this folder on the import path: `checkpoints` and `hub_server` are shared by the tests below it.

Graphs are kept by no test that does not ask for it: each sees the transforms at work.
"""

import os

os.environ["ONBOARD_CACHE"] = ""
