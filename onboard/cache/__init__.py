"""What holds sequences and batches: caches and their pages, a step's numbers, the memory that a run
takes.
"""
