"""Helpers of stage `sharding`: which share of every tensor a rank has, and what ranks exchange."""
