"""`onboard verify`: the model computed after every transform, and compared."""
