"""Python, partially evaluated: what modeling code has besides it is asked of mechanisms
(`frame.Mechanism`).

| file or folder | holds |
|---|---|
| `values.py`, `object_values.py`, `holes.py` | what is known of a value; of the program's objects; of what calls give |
| `forms.py` | what else is known of a tensor or a dict |
| `frame.py`, `env.py`, `args.py` | a function under evaluation and what it asks of others; its variables; arguments |
| `state.py` | classes and functions under translation |
| `findings.py`, `in_order.py` | what the analysis says of a model; several mechanisms as one |
| `expressions/`, `statements/`, `program/` | one package for each size of code |
| `trees/` | syntax trees alone: making, comparing, tidying them |
"""
