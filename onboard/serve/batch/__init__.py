"""Many requests from a file, answered into another one."""
