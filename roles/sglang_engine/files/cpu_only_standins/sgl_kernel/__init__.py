"""Stand-in for sgl-kernel on a host declared CPU-only; the CPU path of SGLang 0.5.9 imports it and never calls it."""
