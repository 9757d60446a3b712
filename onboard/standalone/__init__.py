"""Model files that are used without this package: `onboard export`."""
