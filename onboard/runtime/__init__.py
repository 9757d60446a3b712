"""Scheduler, sampler, engine and `LLM`."""
