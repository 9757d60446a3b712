"""The phases of `onboard <model>`: one file a phase, of its name.

The order in which they run is here alone: the command's help says it, and the tables in
docs/using.md and docs/architecture.md have to.
"""

PHASES = (
    *("gather", "survey", "analyze", "generate", "test", "review"),
    *("register", "run", "matrix", "cookbook", "report", "pull_request"),
)
