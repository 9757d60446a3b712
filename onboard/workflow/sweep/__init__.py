"""Onboards many architectures, each as a tiny random checkpoint in a process of its own, and says
what works.
"""
