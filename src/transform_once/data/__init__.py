"""Fields: one type for everyone's formats, their symmetries, and their spectra."""
