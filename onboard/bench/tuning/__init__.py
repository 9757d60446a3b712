"""`onboard tune`: which choices there are, which is quickest here, and how it is written down."""
