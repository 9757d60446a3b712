"""Puts this folder on the import path: `checkpoints` and `hub_server` are shared by the tests below it."""
