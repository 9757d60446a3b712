"""Reviewer, repairer and run agent, and their back ends."""
