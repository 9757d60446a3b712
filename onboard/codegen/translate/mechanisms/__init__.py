"""What modeling code has besides plain Python, a module each; `order.py` has all of them in their
order.
"""
