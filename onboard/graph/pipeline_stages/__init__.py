"""Pipeline stages: consecutive layers that one rank has, where ranks follow one another."""
