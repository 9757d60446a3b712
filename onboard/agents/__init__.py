"""Roles that propose: porter, repairer, reviewer and runner, and the back ends that play them.

What they say is input. It is read by a schema, applied to copies, vetted and judged by the tests.
"""
