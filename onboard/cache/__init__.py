"""KV caches and their pages, recurrent states, a step's inputs on host and device, and the memory
plan of a run.
"""
