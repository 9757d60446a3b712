"""Which tokens of which requests a step computes, and what each request holds of the caches."""
