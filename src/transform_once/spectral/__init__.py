"""The mathematics: transforms, kept modes, initialisation."""
