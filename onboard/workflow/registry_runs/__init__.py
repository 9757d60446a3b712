"""Runs of the registry's entries: which (`expression`, `selection`), where (`places`), each in a
process (`runner`).
"""
