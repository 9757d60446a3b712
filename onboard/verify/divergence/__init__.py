"""How far the next-token distributions of one way of running a model are from another's."""
