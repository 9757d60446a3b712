"""Commands that measure: speed (`bench`, `tune`), and what a way of running changes (`kld`)."""
