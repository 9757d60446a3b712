"""Tiny random models of a checkpoint's architecture, which every probe and proof looks at."""
