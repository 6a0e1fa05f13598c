"""A scripted stand-in for the SGLang server, for faults that the real one cannot show on demand. Never deployed."""

__version__ = "0.5.9"
