"""Helpers of the transforms of stage `cache_init`: cached ops in the place of canonical ones."""
