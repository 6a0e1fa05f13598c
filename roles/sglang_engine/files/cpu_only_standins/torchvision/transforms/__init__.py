"""The one name that SGLang 0.5.9 reads at import time."""

from .functional import InterpolationMode

__all__ = ["InterpolationMode"]
