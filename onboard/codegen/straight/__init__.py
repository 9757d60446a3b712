"""Straight forwards: what a forward does on small models, written as plain calls.

| module | what it is |
|---|---|
| `straight_lines.py` | a recorded forward: calls, and what their arguments are |
| `recorders.py` | the recording of one call of one module |
| `watched_calls.py` | what catches the calls of torch, of modules and of functions while a model runs |
| `recorded.py` | a whole model run with sizes as symbols |
| `left.py` | what code leaves at its modules and classes |
| `torch_calls.py` | the names of torch's functions, and which are recorded |
| `sizes.py` | sizes that follow from those of the inputs |
| `rolled.py` | loops over lists of modules |
| `merged.py` | recordings of several models as one: what explains numbers that differ |
| `printed.py` | the method's definition |
| `recorded_names.py` | what its variables are called |
| `checked.py` | the definition beside the forward, on real texts |
| `straighten.py` | the definition of a class, or why there is none |
| `attempts.py` | translations with such definitions, a class at a time |
| `recorded_classes.py` | what a file says of it |
"""
