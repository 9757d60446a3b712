"""How ranks divide a model, written into its file: found on the exported graph of the small model.

| module | holds |
|---|---|
| `marked_sites.py` | expressions of the file, and the nodes of the graph that have their values |
| `small_division.py` | that graph, and how ranks divide it |
| `output_blocks.py` | blocks of a linear layer's outputs, and what the file calls their sizes |
| `linear_hints.py`, `site_hints.py` | hints of linear layers, and of everything else |
| `hinted_text.py` | hints written into the text, and proven |
| `spans.py`, `named_lines.py` | edits of the text; long statements become several |
| `unhinted_text.py` | the text without them |
| `same_text.py` | whether texts are the same but for them |
"""
