"""Helpers of stage `export`: from a module to a graph that holds for all of its layers and
sizes.
"""
