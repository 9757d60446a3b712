"""Methods of quantisation, as configs name them, one a file."""
