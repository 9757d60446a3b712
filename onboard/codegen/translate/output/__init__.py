"""From translated classes to the text of the file: what is pruned, tied, annotated and printed."""
