"""Measuring a model's speed: beside what the hardware allows, and beside transformers' own
`generate`.
"""
