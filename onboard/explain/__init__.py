"""`onboard explain`: what became of a model, layer by layer, from the records of its onboarding."""
