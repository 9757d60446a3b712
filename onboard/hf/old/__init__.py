"""What modeling code of other years finds missing today, put in its place: in the child process
only.

Each stand-in is small and keeps the meaning that matters for inference; what was put in place is
told, for the report.
"""
